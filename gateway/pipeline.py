"""The order of steps of a text request, one line each; gateway.ports says what each step is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, frozen

from gateway import dispatch
from gateway.answer import Answer, Source
from gateway.attempt import StreamPorts
from gateway.candidates import Candidates
from gateway.context import LOCAL, Caller, RequestContext
from gateway.dispatch_live import Dispatcher
from gateway.dispatch_plans import Plans
from gateway.doubt import doubt_of
from gateway.embedding import EmbeddingRun
from gateway.ending import Ending
from gateway.flights import Flights
from gateway.kept import KeptAnswer
from gateway.places import Places
from gateway.ports import AUTO, CacheKey, Compressed, Estimate, Findings, Reservation, Routed, Signals
from gateway.prompt_bounds import check_size, opened_within_limits, within_limits
from gateway.relay_plan import Relay, RelayPorts, relay_of
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.shadow import Case, Shadows
from gateway.spending import BYTES_PER_TOKEN, Spending, most_money, prompt_size
from gateway.stream import StreamOwner
from gateway.targets import AnswerLengths, Target, TargetBoard
from gateway.tool_prompt import adapted
from links.port import Request
from protocol.chat import ChatRequest, EmbeddingsRequest, prompt_bytes
from protocol.errors import Unsupported
from protocol.policy import DispatchPolicy, Policy, Start
from protocol.trace import RANDOM_BYTES, entered


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
        self.places = Places(settings.max_concurrent, ports.clock)
        self._relay_ports = RelayPorts(self.board, Flights(), self.places.hold)
        self._policy_started: DispatchPolicy | None = None
        self._starts: dict[Start, DispatchPolicy] = {}
        self.candidates = Candidates(ports, self.board, self.signals)
        self.shadows = Shadows(ports, settings, self.board, self.candidates)
        self.dispatcher = Dispatcher(
            Plans(self._lengths.mean_tokens),
            self.candidates.views,
            ports.policy,
            lambda: len(self.places),
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
        chat = opened_within_limits(asked, await self.ports.conversations.opened(caller, asked), policy.limits)
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

        def tells_calls(side: str) -> bool:
            return kept is not None or self.candidates.tells_calls(ending.targets.get(side), routed.model)

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
            tells_calls=tells_calls,
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
        shelf = self.candidates.shelf()
        routed = self.ports.router.route(chat, asker, findings, shelf, policy, self.ports.draw())
        routed = degraded(routed, reservation)
        able = self.candidates.able(routed.model, routed.constraints, shelf)
        return findings, routed, await self.candidates.capable(chat.named(routed.model), able)

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
        return relay_of(request, chat.stream, starts, targets, self._relay_ports)

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
            context, wanted, targets, self.board, self.places.hold, self.ports.clock, self.ports.emit, spending
        )

    def signals(self, caller: Caller) -> Signals:
        """What moves routing: the caller's budgets, battery and heat."""
        left, state = self.ports.limits.left_ratios(caller), self.dispatcher.state
        return Signals(
            left.get("day"),
            left.get("month"),
            state.charge if state.power == "battery" else None,
            state.headroom_k is not None and state.headroom_k <= 0,
        )

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
        started = self._started(policy.dispatch, routed.start or policy.dispatch.start)
        prompt_tokens = prompt_bytes(chat.prompt) // BYTES_PER_TOKEN
        if len(targets) == 1 and not targets[0].local:  # a local one's queue is looked at all the same, for its rates
            return self.dispatcher.alone(chat.model, prompt_tokens, targets[0].name, started)
        now_s = self.ports.clock()
        views = [self.board.view(target, chat.model, now_s, chat.prompt) for target in targets]
        return self.dispatcher.plan(
            chat.model,
            prompt_tokens,
            views,
            routed.constraints,
            self.ports.draw(),
            started,
            policy.migration.stall_s,
        )

    async def _reserved(self, chat: ChatRequest, caller: Caller) -> Spending:
        """Holds the most the request may take, at the dearest target of its model (of all, if the model is open)."""
        size = prompt_size(chat)
        able = [one for one in self.candidates.offered() if chat.model == AUTO or chat.model in one.models]
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
        better = [*targets, *self.candidates.upgrades(routed, context.constraints)]
        doubt = doubt_of(context.policy, targets, better, self.ports.curves, intent)
        return StreamOwner(context, request, starts, targets, ports, self.settings, doubt)

    def _admit(self, answer: Answer) -> Callable[[], None]:
        """Take a place; giving it back also counts what was decoded here."""
        release = self.places.hold(answer.owner)

        def ended() -> None:
            release()
            for name, tokens in answer.owner.sides:
                target = answer.ending.targets.get(name)
                if target is not None and target.local:
                    self.board.work.decoded(target, tokens)

        return ended

    async def stop(self) -> None:
        """Take nothing new, let running answers end for `drain_s`, then cut the rest with an error that says so."""
        self.places.close()
        self.ports.router.close()
        await self.shadows.stop()
        await self.places.emptied(self.settings.drain_s)
        self.dispatcher.stop()


def degraded(routed: Routed, reservation: Reservation) -> Routed:
    """At the cost cap, where policy says so, only this machine may answer."""
    if not reservation.degrade:
        return routed
    reason = "the cost cap is reached: the device answers"
    return routed._replace(reason=reason, constraints=evolve(routed.constraints, local_only=True, reason=reason))
