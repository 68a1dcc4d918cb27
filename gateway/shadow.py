"""Shadow mode: a share of requests is also asked of the other path, after the old one has answered.

The old path's answer is the only one that anybody sees. The second one goes where the same allowed set lets the request
go, with the same redaction; it is reserved and settled like any answer, and neither shown, cached nor remembered. What
is kept of it is a line of numbers in the audit (gateway.shadow_measure).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from attrs import define, evolve, field, frozen

from gateway.answer import Answer
from gateway.attempt import StreamPorts
from gateway.candidates import Candidates
from gateway.context import Caller, RequestContext
from gateway.ending import Ending, Made
from gateway.ports import (
    CacheKey,
    Estimate,
    Findings,
    FreeReservation,
    Invocation,
    NoCache,
    NoConversations,
    Redaction,
    Reservation,
    Routed,
    Spent,
)
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.shadow_measure import Difference, compared, told
from gateway.spending import Spending, costs, most_money, prompt_size
from gateway.stream import StreamOwner
from gateway.targets import AnswerLengths, Target, TargetBoard
from protocol.chat import ChatRequest
from protocol.errors import MidstreamError
from protocol.events import Shadowed, ignore
from protocol.policy import Policy
from protocol.trace import TraceContext, child

log = logging.getLogger("midstream.gateway.shadow")

DAY_S = 86_400.0
ROUNDING = 1e-12


@frozen
class Case:
    """One request as it stood before it was redacted for its own targets."""

    request_id: str
    chat: ChatRequest
    caller: Caller
    routed: Routed
    findings: Findings
    policy: Policy
    trace: TraceContext


@define(eq=False)
class _Record:
    """The audit of a shadow's own answer: what it spent and how it ended, and nothing on disk."""

    invoked: Invocation | None = None

    def invocation(self, record: Invocation) -> None:
        self.invoked = record

    def shadow(self, difference: Difference) -> None:
        """A shadow has no shadow."""


@define(eq=False)
class Shadows:
    """The shadows of one way."""

    ports: GatewayPorts
    settings: GatewaySettings
    board: TargetBoard
    candidates: Candidates
    _lengths: AnswerLengths = field(factory=AnswerLengths, init=False)
    _running: set[asyncio.Task[None]] = field(factory=set, init=False)
    _stopping: bool = field(default=False, init=False)
    _day: int = field(default=-1, init=False)
    _day_usd: float = field(default=0.0, init=False)

    def of(self, case: Case) -> Callable[[Made, Spent], None] | None:
        """What is called with the delivered answer when this request was drawn; None for the others."""
        if self.ports.draw() >= case.policy.routing.shadow.share:
            return None
        return lambda made, spent: self._begin(case, made, spent)

    async def stop(self) -> None:
        """Cancel what runs; what it took so far is settled."""
        self._stopping = True
        running = tuple(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _begin(self, case: Case, made: Made, spent: Spent) -> None:
        if made.status != "ok" or not made.sides or self._stopping:
            return
        if len(self._running) >= case.policy.routing.shadow.concurrent:
            self._tell(case, "", "skipped")
            return
        task = asyncio.get_running_loop().create_task(self._ask(case, made, spent), name="shadow")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _ask(self, case: Case, made: Made, spent: Spent) -> None:
        try:
            found = await self._other(case, made)
            if found is None or not await self._asked(case, made, spent, *found):
                self._tell(case, "", "skipped")
        except MidstreamError as err:
            log.info("a shadow was not asked: %s", err)
            self._tell(case, "", "skipped")

    async def _other(self, case: Case, made: Made) -> tuple[Target, ChatRequest] | None:
        """Who would have answered on the other side, with the request for it; None where nobody may or can now."""
        models = dict.fromkeys((case.routed.model, case.routed.other_model or case.routed.model))
        sides = {t.local for t in self.ports.targets() if t.name == made.sides[0][0]}
        for model in models if len(sides) == 1 else ():
            if case.caller.models is not None and model not in case.caller.models:
                continue
            chat = case.chat.named(model)
            try:
                there = [one for one in self.candidates.able(model, case.routed.constraints) if one.local not in sides]
                there = await self.candidates.capable(chat, there) if there else []
            except MidstreamError:
                continue
            idle = [one for one in there if not one.local or one.engine.load().running == 0]
            if idle:
                return idle[0], chat
        return None

    async def _asked(self, case: Case, made: Made, spent: Spent, target: Target, chat: ChatRequest) -> bool:
        """Whether it was asked: there must be money for it."""
        size = prompt_size(chat)
        money = most_money(chat, size, [target])
        if not self._holds(case, money):
            return False
        took, reservation = money, None
        try:
            reservation = await self._reserved(case, target, chat.model, money)
            if reservation.degrade:
                await reservation.release()
                took = 0.0
                return False
            spending = Spending(reservation, money, size)
            try:
                await self._compared(case, made, spent, target, chat, spending)
            finally:
                took = max(spending.known, spending.held)
            return True
        finally:
            self._day_usd = max(0.0, self._day_usd - money + (took if reservation is not None else 0.0))

    async def _reserved(self, case: Case, target: Target, model: str, money: float) -> Reservation:
        """Its tenant pays for it; one that costs nothing takes no place from the tenant's own requests."""
        if not costs(target):
            return FreeReservation()
        return await self.ports.limits.reserve(case.caller, Estimate(model, 0, 0, money))

    def _holds(self, case: Case, money: float) -> bool:
        """Hold `money` of what shadows may take in a day (UTC), as far as this process knows."""
        day = int(self.ports.wall().unix_s // DAY_S)
        if day != self._day:
            self._day, self._day_usd = day, 0.0
        if self._day_usd + money > case.policy.routing.shadow.usd_per_day + ROUNDING:
            return False
        self._day_usd += money
        return True

    async def _compared(
        self, case: Case, made: Made, spent: Spent, target: Target, chat: ChatRequest, spending: Spending
    ) -> None:
        record, policy = _Record(), case.policy.routing.shadow
        answer = self._answer(case, target, chat, spending, record)
        try:
            async for _ in answer.pieces():
                pass
        except MidstreamError as err:
            log.info("a shadow at %s ended with %s", target.name, err.code)
        finally:
            await answer.aclose()
        took = record.invoked
        assert took is not None, "an answer ends with its record"
        ratio, alike = (
            compared(made.shown, answer.message, policy.alike_ratio) if took.status == "ok" else (None, False)
        )
        difference = Difference(
            case.request_id, case.caller.tenant, case.routed.intent, case.routed.level, case.routed.reason,
            told(
                made.sides[0][0], case.routed.model, made.status, made.finish, made.shown,
                made.usage.completion_tokens, made.ttft_s, made.total_s, spent.money,
            ),
            told(
                target.name, chat.model, took.status, answer.finish, answer.message,
                took.spent.completion_tokens, took.ttft_s, took.total_s, took.spent.money,
            ),
            ratio, alike,
        )  # fmt: skip
        self.ports.audit.shadow(difference)
        self._tell(case, target.name, "failed" if ratio is None else "alike" if alike else "different", ratio)

    def _answer(self, case: Case, target: Target, chat: ChatRequest, spending: Spending, record: _Record) -> Answer:
        """An answer like any other, whose end is told to `record` alone."""
        ports, policy = self.ports, case.policy
        redaction: Redaction | None = None if target.local else ports.privacy.redact(chat, case.findings)
        asked = (redaction.chat if redaction is not None else chat).named(chat.model)
        deadline_at_s = ports.clock() + policy.routing.shadow.deadline_s
        constraints = evolve(case.routed.constraints, targets=frozenset({target.name}))
        request_id = f"{case.request_id}-shadow"
        context = RequestContext(request_id, chat.model, deadline_at_s, policy, constraints, case.caller)
        trace = child(case.trace, ports.chance(8))
        stream = StreamPorts(self.board, self._lengths, ports.clock, ignore, ports.rtt_s, spending)
        request = asked.text_request(case.caller.tenant, trace.header)
        ending = Ending(
            ports=evolve(ports, cache=NoCache(), conversations=NoConversations(), audit=record), request_id=request_id,
            caller=case.caller, asked=chat, routed=case.routed, findings=case.findings, redaction=redaction,
            key=CacheKey(case.caller.tenant, asked), reservation=spending.reservation,
            spending=spending, targets={target.name: target}, cached=False, saved_tokens=0,
        )  # fmt: skip
        return Answer(
            context,
            asked,
            lambda: StreamOwner(context, request, [(target, 0.0)], [target], stream, self.settings),
            "shadow",
            lambda _: _nothing,
            ending,
            redaction.restorer if redaction is not None else None,
            ports.clock,
            ignore,
            tells_calls=lambda side: self.candidates.tells_calls(target, chat.model),
        )

    def _tell(
        self, case: Case, target: str, outcome: Literal["alike", "different", "failed", "skipped"],
        similarity_ratio: float | None = None,
    ) -> None:  # fmt: skip
        self.ports.emit(
            Shadowed(
                at_s=self.ports.clock(), request_id=case.request_id, model=case.routed.model, target=target,
                outcome=outcome, similarity_ratio=similarity_ratio,
            )
        )  # fmt: skip


def _nothing() -> None:
    """A shadow holds no place."""
