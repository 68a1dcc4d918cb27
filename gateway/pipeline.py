"""The order of steps of a text request, one line each; gateway.ports says what each step is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, frozen

from engines.renamed import RenamedTextEngine
from gateway import dispatch
from gateway.answer import Answer, Source
from gateway.attempt import StreamPorts
from gateway.context import LOCAL, Caller, Constraints, RequestContext, constraints_of
from gateway.dispatch_live import Dispatcher
from gateway.dispatch_plans import Plans
from gateway.doubt import doubt_of
from gateway.embedding import EmbeddingRun
from gateway.ending import Ending
from gateway.flights import Flights
from gateway.kept import KeptAnswer
from gateway.ports import AUTO, CacheKey, Compressed, Estimate, Findings, Reservation, Routed, Signals
from gateway.relay_plan import Relay, RelayPorts, Running, relay_of
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.shadow import Case, Shadows
from gateway.shelf import Shelf
from gateway.spending import Spending, most_money, prompt_size
from gateway.stream import StreamOwner
from gateway.targets import AnswerLengths, Target, TargetBoard, TargetView, offered
from gateway.tool_prompt import adapted
from gateway.wants import wants
from links.port import Request
from protocol.chat import ChatRequest, EmbeddingsRequest, prompt_bytes, tools_bytes
from protocol.errors import Full, Loading, MidstreamError, NotAllowed, NotFound, TooLarge, Unsupported
from protocol.policy import DispatchPolicy, LimitsPolicy, Policy, Start
from protocol.trace import RANDOM_BYTES, entered

BYTES_PER_TOKEN = 4
"""Rough size of a token, enough to scale patience before anything was tokenised."""

MAX_NAMED_MODELS = 20
"""Models that an error names; more would hide the message."""

LOADING_RETRY_S = 2.0
"""A small model is in memory after a few seconds; who asks again sooner does no harm."""

ABORT_S = 1.0
"""Answers that were cut get this long to tell their clients."""


@frozen
class Decision:
    """Where a request would go. plan: which target starts and which joins; local: places by target name."""

    findings: Findings
    routed: Routed
    plan: dispatch.DispatchPlan
    local: Mapping[str, bool]
    reservation: Reservation


class TextWay:
    """Takes validated requests, gives answers that have not begun yet. Holds what requests share."""

    def __init__(self, settings: GatewaySettings, ports: GatewayPorts) -> None:
        self.settings = settings
        self.ports = ports
        self.board = TargetBoard()
        self._lengths = AnswerLengths()
        self._flights: Flights[bytes] = Flights()
        self._running: dict[int, Running] = {}
        self._stopping = False
        self._policy_started: DispatchPolicy | None = None
        self._starts: dict[Start, DispatchPolicy] = {}
        self.shadows = Shadows(ports, settings, self.board, self.able, self.capable, self._tells_calls)
        self.dispatcher = Dispatcher(
            Plans(self._lengths.mean_tokens),
            self.views,
            ports.policy,
            lambda: len(self._running),
            self.board.work,
            ports.power,
            ports.clock,
            ports.emit,
        )

    def caller(self, request: Request) -> Caller:
        """Who asks. Raises Unauthenticated or NotAllowed."""
        return self.ports.keys.caller(request.headers, request.remote, request.peer)

    async def answer(self, asked: ChatRequest, caller: Caller = LOCAL) -> Answer:
        """Everything that is decided before an engine is asked; the caller closes what it is given.

        Raises NotFound, Loading, NotAllowed, TooLarge, RateLimited or BudgetExceeded; the engines' own refusals come
        with the first piece.
        """
        policy, came_s = self.ports.policy(), self.ports.clock()
        chat = _bounded(asked, await self.ports.conversations.opened(caller, asked), policy.limits)
        spending = await self._reserved(chat, caller)
        try:
            return await self._admitted(asked, chat, caller, policy, spending, came_s)
        except BaseException:
            await spending.reservation.release()
            raise

    async def _admitted(
        self, asked: ChatRequest, chat: ChatRequest, caller: Caller, policy: Policy, spending: Spending, came_s: float
    ) -> Answer:
        ports, reservation, sized = self.ports, spending.reservation, chat
        findings, routed, targets = await self._decided(chat, caller, policy, reservation)
        redaction = None if all(target.local for target in targets) else ports.privacy.redact(chat, findings)
        chat = (redaction.chat if redaction else chat).named(routed.model)
        key = CacheKey(caller.tenant, chat, bool(findings.spans))
        kept = await ports.cache.find(key)
        plan = dispatch.NO_PLAN if kept else self._plan(chat, targets, routed, policy)
        compressed = await self._compressed(caller, chat, plan, targets)
        context = self._context(routed, caller, policy, came_s)
        if compressed.chat is not sized:
            spending.size = prompt_size(compressed.chat)
        restorer = redaction.restorer if redaction else None
        relay = None if kept or restorer else self._relay(compressed.chat, context, plan, targets)

        def owner() -> Source:
            return KeptAnswer(kept) if kept else self._owner(context, compressed.chat, plan, targets, spending, routed)

        ending = Ending(
            ports=ports,
            request_id=context.id,
            caller=caller,
            asked=asked,
            routed=routed,
            findings=findings,
            redaction=redaction,
            key=key,
            reservation=reservation,
            spending=spending,
            targets={target.name: target for target in targets},
            cached=kept is not None,
            saved_tokens=compressed.saved_tokens,
            shadow=self.shadows.of(Case(context.id, sized, caller, routed, findings, policy, context.trace))
            if policy.routing.shadow.share > 0
            else None,
        )
        return Answer(
            context,
            chat,
            owner,
            plan.reason,
            self._admit,
            ending,
            restorer,
            ports.clock,
            ports.emit,
            tells_calls=lambda side: kept is not None or self._tells_calls(ending.targets.get(side), routed.model),
            relay=relay,
        )

    async def _decided(
        self, chat: ChatRequest, caller: Caller, policy: Policy, reservation: Reservation
    ) -> tuple[Findings, Routed, list[Target]]:
        """What was found in the request, where it may go, and the targets there that can take it."""
        findings = self.ports.privacy.inspect(chat, caller, policy)
        if stays := await self.ports.conversations.stays(caller, chat):
            findings = evolve(findings, local_only=True, reason=findings.reason or stays)
        asker = await self.ports.router.consulted(chat, caller, policy)
        shelf = self.shelf()
        routed = self.ports.router.route(chat, asker, findings, shelf, policy, self.ports.draw())
        routed = degraded(routed, reservation)
        able = self.able(routed.model, routed.constraints, shelf)
        return findings, routed, await self.capable(chat.named(routed.model), able)

    async def route(self, asked: ChatRequest, caller: Caller = LOCAL) -> Decision:
        """Where the request would go now; nothing is generated and nothing is charged. Raises what `answer` raises."""
        policy = self.ports.policy()
        chat = within_limits(asked, policy.limits)
        reservation = (await self._reserved(chat, caller)).reservation
        try:
            findings, routed, targets = await self._decided(chat, caller, policy, reservation)
            plan = self._plan(chat.named(routed.model), targets, routed, policy)
            return Decision(findings, routed, plan, {target.name: target.local for target in targets}, reservation)
        finally:
            await reservation.release()

    async def count_tokens(self, asked: ChatRequest, caller: Caller = LOCAL) -> int:
        """Tokens of the prompt as a target of this machine reads it, tools included. Raises Unsupported without one."""
        policy = self.ports.policy()
        chat = within_limits(evolve(asked, sampling=evolve(asked.sampling, max_tokens=1)), policy.limits)
        reservation = (await self._reserved(chat, caller)).reservation
        try:
            _, routed, targets = await self._decided(chat, caller, policy, reservation)
            local = next((target for target in targets if target.local), None)
            if local is None:
                raise Unsupported("no model of this machine can count this prompt", field="model")
            can = await self.board.capabilities(local, routed.model)
            request = adapted(evolve(chat, model=routed.model).text_request(), can)
            continuation = await local.engine.prepare(request, self.settings.deadline_s)
            try:
                return continuation.prompt_tokens
            finally:
                await continuation.close()
        finally:
            await reservation.release()

    def _relay(
        self, chat: ChatRequest, context: RequestContext, plan: dispatch.DispatchPlan, targets: Sequence[Target]
    ) -> Relay | None:
        if chat.stream and context.policy.delivery.mode != "raw":
            return None  # a reader's pace is kept token by token
        by_name = {target.name: target for target in targets}
        starts = [by_name[name] for name, _ in plan.starts]
        request = chat.text_request(context.caller.tenant, context.trace.header)
        return relay_of(request, chat.stream, starts, targets, RelayPorts(self.board, self._flights, self._hold))

    def _tells_calls(self, target: Target | None, model: str) -> bool:
        known = self.board.known(target, model) if target is not None else None
        return known is not None and known.tools

    async def _compressed(
        self, caller: Caller, chat: ChatRequest, plan: dispatch.DispatchPlan, targets: Sequence[Target]
    ) -> Compressed:
        """The request as the plan's first target gets it."""
        first = next((target for target in targets if plan.starts and target.name == plan.starts[0][0]), None)
        if first is None:
            return Compressed(chat)
        known = self.board.known(first, chat.model)
        room_tokens = known.context_tokens - chat.sampling.max_tokens if known is not None else 0
        return await self.ports.conversations.compressed(caller, chat, first.name, max(0, room_tokens))

    async def embedding(self, wanted: EmbeddingsRequest, caller: Caller = LOCAL) -> EmbeddingRun:
        """The same steps for vectors, within the same bounds. Raises what `answer` raises."""
        policy, came_s = self.ports.policy(), self.ports.clock()
        size_bytes = sum(prompt_bytes(text) for text in wanted.texts)
        check_size(size_bytes, policy.limits, "input")
        chat = ChatRequest(wanted.model, "\n".join(wanted.texts), endpoint="embedding")
        spending = await self._reserved(chat, caller)
        reservation = spending.reservation
        try:
            _, routed, targets = await self._decided(chat, caller, policy, reservation)
        except BaseException:
            await reservation.release()
            raise
        context = self._context(routed, caller, policy, came_s)
        return EmbeddingRun(
            context, wanted, targets, self.board, self._hold, self.ports.clock, self.ports.emit, spending
        )

    def shelf(self) -> Shelf:
        """What there is to choose from now."""
        now_s, view = self.ports.clock(), self.board.view
        allowed = constraints_of(self.ports.policy())
        return Shelf(self.offered(), allowed, lambda target, model: view(target, model, now_s), self.signals)

    def views(self, model: str) -> Sequence[TargetView]:
        """What may be known of the targets that have `model`."""
        return self.shelf().views(model)

    def signals(self, caller: Caller) -> Signals:
        """What moves routing: the caller's budgets, battery and heat."""
        left, state = self.ports.limits.left_ratios(caller), self.dispatcher.state
        return Signals(
            left.get("day"),
            left.get("month"),
            state.charge if state.power == "battery" else None,
            state.headroom_k is not None and state.headroom_k <= 0,
        )

    def offered(self) -> Sequence[Target]:
        """What can answer now, with the policy's prices and without models that it lets nobody stand in for."""
        return offered(self.ports.targets(), self.ports.policy().dispatch)

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
                capabilities = await self.board.capabilities(target, chat.model)
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
        for target in self.able(model, constraints_of(self.ports.policy())):
            can = await self.board.capabilities(target, model)
            context_tokens = max(context_tokens, can.context_tokens)
            found |= ({"embedding"} if can.embeds else set()) | ({"vision"} if can.images else set())
        return context_tokens, tuple(sorted(found))

    def check_loading(self, model: str) -> None:
        """Raises Loading for a model that this machine is about to serve."""
        if model in self.ports.loading():
            raise Loading(f"model {model!r} is still loading", retry_after_s=LOADING_RETRY_S)

    def _named_models(self) -> str:
        known = list(self.models())
        if not known:
            return "no model is loaded; see `midstream models`"
        more = f" and {len(known) - MAX_NAMED_MODELS} more" if len(known) > MAX_NAMED_MODELS else ""
        return f"available: {', '.join(known[:MAX_NAMED_MODELS])}{more}"

    def _started(self, policy: DispatchPolicy, start: Start) -> DispatchPolicy:
        """The policy with another side first; made once per policy and side."""
        if policy.start == start:
            return policy
        if policy is not self._policy_started:
            self._policy_started, self._starts = policy, {}
        found = self._starts.get(start)
        if found is None:
            found = self._starts[start] = evolve(policy, start=start)
        return found

    def _plan(
        self, chat: ChatRequest, targets: Sequence[Target], routed: Routed, policy: Policy
    ) -> dispatch.DispatchPlan:
        now_s, start = self.ports.clock(), routed.start or policy.dispatch.start
        views = [self.board.view(target, chat.model, now_s, chat.prompt) for target in targets]
        prompt_tokens = prompt_bytes(chat.prompt) // BYTES_PER_TOKEN
        return self.dispatcher.plan(
            chat.model,
            prompt_tokens,
            views,
            routed.constraints,
            self.ports.draw(),
            self._started(policy.dispatch, start),
            policy.migration.stall_s,
        )

    async def _reserved(self, chat: ChatRequest, caller: Caller) -> Spending:
        """Holds the most the request may take, at the dearest target of its model (of all, if the model is open)."""
        size = prompt_size(chat)
        able = [one for one in self.offered() if chat.model == AUTO or chat.model in one.models]
        money = most_money(chat, size, able)
        answer_tokens = 0 if chat.endpoint == "embedding" else chat.sampling.max_tokens
        estimate = Estimate(chat.model, size.likely_tokens, answer_tokens, money)
        reservation = await self.ports.limits.reserve(caller, estimate)
        return Spending(reservation, 0.0 if reservation.degrade else money, size)

    def _context(self, routed: Routed, caller: Caller, policy: Policy, came_s: float) -> RequestContext:
        ports = self.ports
        now_s = ports.clock()
        return RequestContext(
            ports.ids(),
            routed.model,
            now_s + self.settings.deadline_s,
            policy,
            routed.constraints,
            caller,
            entered(caller.traceparent, ports.chance(RANDOM_BYTES)),
            now_s - came_s,
        )

    def _owner(
        self,
        context: RequestContext,
        chat: ChatRequest,
        plan: dispatch.DispatchPlan,
        targets: Sequence[Target],
        spending: Spending,
        routed: Routed,
    ) -> StreamOwner:
        by_name = {target.name: target for target in targets}
        starts = [(by_name[name], after_s) for name, after_s in plan.starts]
        priced = self.dispatcher.plans.priced
        ports = StreamPorts(
            self.board, self._lengths, self.ports.clock, self.ports.emit, self.ports.rtt_s, spending, priced
        )
        request = chat.text_request(context.caller.tenant, context.trace.header)
        intent = context.caller.intent or routed.intent or ""
        better = [*targets, *self._upgrades(routed, context.constraints)]
        doubt = doubt_of(context.policy, targets, better, self.ports.curves, intent)
        return StreamOwner(context, request, starts, targets, ports, self.settings, doubt)

    def _upgrades(self, routed: Routed, constraints: Constraints) -> list[Target]:
        """Allowed remote targets of the model that the cloud would answer with, asked under this request's model."""
        other = routed.other_model
        if other is None or other == routed.model:
            return []
        return [
            evolve(target, engine=RenamedTextEngine(target.engine, other), models=frozenset({routed.model}), relay=None)
            for target in self.ports.targets()
            if other in target.models and not target.local and constraints.allows(target.name, target.local)
        ]

    def _admit(self, answer: Answer) -> Callable[[], None]:
        """Take a place; giving it back also counts what was decoded here."""
        release = self._hold(answer.owner)

        def ended() -> None:
            release()
            for name, tokens in answer.owner.sides:
                target = answer.ending.targets.get(name)
                if target is not None and target.local:
                    self.board.work.decoded(target, tokens)

        return ended

    def _hold(self, running: Running) -> Callable[[], None]:
        """Take a place; returns the way to give it back. Raises Full."""
        if self._stopping:
            raise Full("this process is stopping", retry_after_s=5.0)
        if len(self._running) >= self.settings.max_concurrent:
            raise Full(f"{len(self._running)} requests are under way already", retry_after_s=1.0)
        key = id(running)
        self._running[key] = running
        return lambda: self._release(key)

    def _release(self, key: int) -> None:
        self._running.pop(key, None)

    async def stop(self) -> None:
        """Take nothing new, let running answers end for `drain_s`, then cut the rest with an error that says so."""
        self._stopping = True
        self.ports.router.close()
        await self.shadows.stop()
        await self._ended(self.settings.drain_s)
        for running in tuple(self._running.values()):
            await running.abort("this process is stopping")
        await self._ended(ABORT_S)
        self.dispatcher.stop()

    async def _ended(self, seconds: float) -> None:
        end_s = self.ports.clock() + seconds
        while self._running and self.ports.clock() < end_s:
            await asyncio.sleep(0.02)


def degraded(routed: Routed, reservation: Reservation) -> Routed:
    """At the cost cap, where policy says so, only this machine may answer."""
    if not reservation.degrade:
        return routed
    reason = "the cost cap is reached: the device answers"
    return evolve(routed, reason=reason, constraints=evolve(routed.constraints, local_only=True, reason=reason))


def _bounded(asked: ChatRequest, opened: ChatRequest, limits: LimitsPolicy) -> ChatRequest:
    """As `within_limits`; a client cannot shorten what was kept for it, so it is told what it can do."""
    if opened is asked:
        return within_limits(asked, limits)
    within_limits(asked, limits)
    try:
        return within_limits(opened, limits)
    except TooLarge as err:
        raise TooLarge(
            f"with its conversation {err.message}",
            next_step="begin another conversation_id, with a summary of this one if it matters",
            field="conversation_id",
        ) from err


def within_limits(chat: ChatRequest, limits: LimitsPolicy) -> ChatRequest:
    """The request with its answer bounded by policy. Raises TooLarge for a prompt over the bound."""
    size_bytes = prompt_bytes(chat.prompt) + tools_bytes(chat.tools)
    check_size(size_bytes, limits, "messages" if chat.endpoint == "chat" else "prompt")
    bounded = min(chat.sampling.max_tokens, limits.max_answer_tokens)
    if bounded == chat.sampling.max_tokens:
        return chat
    return evolve(chat, sampling=evolve(chat.sampling, max_tokens=bounded))


def check_size(size_bytes: int, limits: LimitsPolicy, field: str) -> None:
    """Raises TooLarge for a prompt over the bound."""
    if size_bytes > limits.max_prompt_bytes:
        raise TooLarge(
            f"the prompt has {size_bytes} bytes, policy.limits.max_prompt_bytes is {limits.max_prompt_bytes}",
            next_step="shorten the prompt or change the policy",
            field=field,
        )
