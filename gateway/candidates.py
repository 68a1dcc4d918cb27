"""Who may answer a request: the targets that have its model, may see it and can do what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve

from engines.renamed import RenamedTextEngine
from gateway.context import Caller, Constraints, constraints_of
from gateway.ports import Routed, Signals
from gateway.settings import GatewayPorts
from gateway.shelf import Shelf
from gateway.targets import Target, TargetBoard, TargetView, offered
from gateway.wants import wants
from protocol.chat import ChatRequest
from protocol.errors import Loading, MidstreamError, NotAllowed, NotFound

MAX_NAMED_MODELS = 20
"""Models that an error names; more would hide the message."""

LOADING_RETRY_S = 2.0
"""A small model is in memory after a few seconds; who asks again sooner does no harm."""


class Candidates:
    """The house's targets as its policy offers them. told: what moves routing, beside the targets."""

    def __init__(self, ports: GatewayPorts, board: TargetBoard, told: Callable[[Caller], Signals]) -> None:
        self._ports = ports
        self._board = board
        self._told = told

    def shelf(self) -> Shelf:
        """What there is to choose from now."""
        now_s, view = self._ports.clock(), self._board.view
        allowed = constraints_of(self._ports.policy())
        return Shelf(self.offered(), allowed, lambda target, model: view(target, model, now_s), self._told)

    def views(self, model: str) -> Sequence[TargetView]:
        """What may be known of the targets that have `model`."""
        return self.shelf().views(model)

    def offered(self) -> Sequence[Target]:
        """What can answer now, with the policy's prices and without models that it lets nobody stand in for."""
        return offered(self._ports.targets(), self._ports.policy().dispatch)

    def models(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the targets by model, allowed ones only."""
        return self.shelf().models()

    def able(self, model: str, constraints: Constraints, shelf: Shelf | None = None) -> list[Target]:
        """Targets that have the model and may see the request, one per name."""
        having = (shelf or self.shelf()).having(model)
        allowed = {t.name: t for t in reversed(having) if constraints.allows(t.name, t.local)}
        if not allowed:
            self.check_loading(model)
        if not having:
            raise NotFound(f"there is no model {model!r} here", next_step=self._named_models(), field="model")
        if not allowed:
            elsewhere = ", ".join(sorted({target.name for target in having}))
            raise NotAllowed(
                f"model {model!r} is only at {elsewhere}, where this request may not go ({constraints.reason})",
                next_step="pull the model onto this machine, or change the policy",
                field="model",
            )
        return list(reversed(allowed.values()))

    async def capable(self, chat: ChatRequest, targets: list[Target]) -> list[Target]:
        """Those that can do what the request asks for. Raises Unsupported, or what kept them all from telling."""
        wanted = wants(chat)
        if not wanted:
            return targets
        found: list[Target] = []
        lost: MidstreamError | None = None
        missing = wanted[0]
        for target in targets:
            try:
                capabilities = await self._board.capabilities(target, chat.model)
            except MidstreamError as err:
                lost = err
                continue
            lacking = [want for want in wanted if not want.met(capabilities)]
            missing = lacking[0] if lacking else missing
            found += [] if lacking else [target]
        if not found:
            raise missing.refusal(chat.model) if lost is None else lost
        return found

    async def abilities(self, model: str) -> tuple[int, tuple[str, ...]]:
        """The largest context of the targets that have `model`, in tokens, and what they can do, in Ollama's words."""
        context_tokens, found = 0, {"completion", "tools"}
        for target in self.able(model, constraints_of(self._ports.policy())):
            can = await self._board.capabilities(target, model)
            context_tokens = max(context_tokens, can.context_tokens)
            found |= ({"embedding"} if can.embeds else set()) | ({"vision"} if can.images else set())
        return context_tokens, tuple(sorted(found))

    def check_loading(self, model: str) -> None:
        """Raises Loading for a model that this machine is about to serve."""
        if model in self._ports.loading():
            raise Loading(f"model {model!r} is still loading", retry_after_s=LOADING_RETRY_S)

    def tells_calls(self, target: Target | None, model: str) -> bool:
        """Whether the target is known to tell tool calls from text by itself."""
        known = self._board.known(target, model) if target is not None else None
        return known is not None and known.tools

    def upgrades(self, routed: Routed, constraints: Constraints) -> list[Target]:
        """Allowed remote targets of the model that the cloud would answer with, asked under this request's model."""
        other = routed.other_model
        if other is None or other == routed.model:
            return []
        return [
            evolve(target, engine=RenamedTextEngine(target.engine, other), models=frozenset({routed.model}), relay=None)
            for target in self._ports.targets()
            if other in target.models and not target.local and constraints.allows(target.name, target.local)
        ]

    def _named_models(self) -> str:
        known = list(self.models())
        if not known:
            return "no model is loaded; see `midstream models`"
        more = f" and {len(known) - MAX_NAMED_MODELS} more" if len(known) > MAX_NAMED_MODELS else ""
        return f"available: {', '.join(known[:MAX_NAMED_MODELS])}{more}"
