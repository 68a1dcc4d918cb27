"""The arms of one request: the held one, the device when a link is late or fails, the cloud when the device is full.

Exactly one answer leaves. An error of one arm while another runs does not end the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from attrs import define, evolve, frozen

from protocol.errors import BadRequest, EngineError, Full, LinkTimeout, Loading, MidstreamError
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.arms import ArmAnswer, Arms, FarEndError, Work
from split_models.decider import HEAD_FIRST, Decider, Decision
from split_models.hedge import Hedge
from split_models.link_states import LinkStates
from split_models.looks import HANDS_OFF_S
from split_models.plan import ModelPlan
from split_models.planner import forbidden
from split_models.runner_ports import RunnerPorts
from split_models.sanity import finite

ASK_AGAIN_S = 0.05
"""A request that waits for a link asks this often whether the device should start: what is seen of the link changes."""


@frozen
class Outcome:
    """What one request came to. lost_s: seconds until the arm that answered was begun. hedged: two arms ran at once."""

    answer: ArmAnswer
    arm: Arm
    reason: str
    lost_s: float = 0.0
    hedged: bool = False


@define(eq=False)
class Entry:
    """One request on its way. costs: of all arms as they were at its start. ends_s: when its deadline passes."""

    decision: Decision
    work: Work
    policy: SplitPolicy
    costs: Sequence[ArmCost]
    began_s: float
    ends_s: float

    @property
    def arm(self) -> Arm:
        """The held one."""
        return self.decision.arm


class _LinkGaveUp(Exception):
    """The link's arm did not answer. `blame`: what the far end or the link is to be blamed for, if anything."""

    def __init__(self, err: MidstreamError, blame: MidstreamError | None) -> None:
        super().__init__(str(err))
        self.err = err
        self.blame = blame


class Race:
    """Of one model. Whoever loses is cancelled; a run that has begun is stopped, or ends by itself, unheard."""

    def __init__(self, plan: ModelPlan, arms: Arms, ports: RunnerPorts, decider: Decider, states: LinkStates) -> None:
        self._plan = plan
        self.arms = arms
        self._ports = ports
        self._decider = decider
        self._states = states
        self._losers: set[asyncio.Task[Any]] = set()

    async def run(self, entry: Entry) -> Outcome:
        """One answer. Raises BadRequest for the input, else what the last arm raised."""
        if entry.arm.link is None:
            return await self._on_device(entry, entry.decision.reason)
        left_s = entry.ends_s - self._ports.clock()
        budget_s = self._decider.patience_s(entry.decision, left_s)
        if budget_s <= 0:
            return await self._on_device(entry, "no time left to try the link")
        link = asyncio.create_task(self._by_link(entry, budget_s), name=f"{entry.arm}")
        device: asyncio.Task[Outcome] | None = None
        try:
            late = await self._when_late(entry, link)
            if late is not None and late.instead:
                self._part_with(link)
                if self._decider.progress.stands_still(entry.decision.began_s):
                    self._states.stood_still(entry.arm.link, self._ports.clock() - entry.began_s)
                return await self._on_device(entry, f"{entry.arm} given up: {late.reason}")
            device = asyncio.create_task(self._hedge(entry, late), name="hedge") if late is not None else None
            return await self._first(entry, link, device)
        finally:
            self._part_with(link, device)

    async def close(self) -> None:
        """Wait for what was cancelled."""
        await asyncio.gather(*self._losers, return_exceptions=True)

    async def _when_late(self, entry: Entry, link: asyncio.Task[ArmAnswer]) -> Hedge | None:
        """What the device is to begin now, since the link is late; None when the link ended before."""
        stoppable = self.arms.stops(self._plan)
        while not link.done():
            now_s, views = self._ports.clock(), self._ports.links()
            found = self._decider.hedge(
                entry.decision, views, now_s, entry.policy, stoppable=stoppable, head_over=entry.work.crossed.is_set()
            )
            if found.start_in_s <= 0:
                return found
            await self._wait(entry, link, found)
        return None

    async def _wait(self, entry: Entry, link: asyncio.Task[ArmAnswer], found: Hedge) -> None:
        """Until something may have changed: the link ended, its head has run, or some time has passed."""
        if found is not HEAD_FIRST:
            await asyncio.wait({link}, timeout=min(found.start_in_s, ASK_AGAIN_S))
            return
        crossed = asyncio.create_task(entry.work.crossed.wait(), name="head")
        try:
            await asyncio.wait({link, crossed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            crossed.cancel()

    async def _hedge(self, entry: Entry, found: Hedge) -> Outcome:
        """The device beside the link: the tail from where the head left off, where that is here, else the whole."""
        reason = f"hedge for {entry.arm}: {found.reason}"
        self._count(entry, found)
        if found.rest:
            began_s = self._ports.clock()
            outcome = await self._from_the_head(entry, reason)
            if outcome is not None:
                return outcome
            self._decider.hedge_over(found, self._ports.clock() - began_s)
            self._count(entry, Hedge(0.0, reason, entry.decision.device_s))
        return await self._timed(entry, DEVICE_ARM, reason)

    def _count(self, entry: Entry, found: Hedge) -> None:
        """Against the allowance; what a run that is stopped did not use comes back."""
        self._decider.hedged(found)
        entry.work.left = partial(self._decider.hedge_over, found)

    async def _from_the_head(self, entry: Entry, reason: str) -> Outcome | None:
        """The held cut's tail here; None when it failed, and is set aside, or is not in memory any more. Raises Full.

        A deadline that passed and an input that is not finite say nothing of a tail.
        """
        tail = self._plan.tail(self._plan.cut(entry.arm))
        try:
            outcome = await self._timed(entry, evolve(entry.arm, link=None), reason)
        except Loading:
            return None
        except Full:
            raise
        except MidstreamError as err:
            if self._ports.clock() < entry.ends_s and finite(entry.work.tensors):
                self._ports.ran(tail, err)
            return None
        self._ports.ran(tail, None)
        return outcome

    async def _first(
        self, entry: Entry, link: asyncio.Task[ArmAnswer], device: asyncio.Task[Outcome] | None
    ) -> Outcome:
        """The first answer; when the link gave up and nothing runs beside it, the device's."""
        hedged = device is not None
        winner = await _answered(link, device)
        gave_up = link.exception() if link.done() else None
        if gave_up is None and winner is link:
            self._states.answered(entry.arm.link or "")
            return Outcome(link.result(), entry.arm, entry.decision.reason, hedged=hedged)
        known = gave_up if isinstance(gave_up, _LinkGaveUp) else None
        if gave_up is not None and known is None and winner is None:
            raise gave_up
        return await self._instead(entry, known, device)

    def _part_with(self, *tasks: asyncio.Task[Any] | None) -> None:
        for task in tasks:
            if task is not None and not task.done() and task not in self._losers:
                task.cancel()
                self._losers.add(task)
                task.add_done_callback(self._lost)

    def _lost(self, task: asyncio.Task[Any]) -> None:
        self._losers.discard(task)
        if not task.cancelled():
            task.exception()  # nobody else will ask for it

    async def _by_link(self, entry: Entry, budget_s: float) -> ArmAnswer:
        """The link's arm. Raises _LinkGaveUp, or BadRequest when this device cannot read the input."""
        told_s = budget_s - min(HANDS_OFF_S, budget_s / 10)
        began_s = self._ports.clock()
        try:
            async with asyncio.timeout(budget_s):
                answer = await self.arms.run(entry.arm, self._plan, entry.work, told_s)
        except TimeoutError as err:
            late = LinkTimeout(f"{entry.arm} gave no answer within {budget_s:.2f} s")
            raise _LinkGaveUp(late, self._blame(entry, entry.arm, late, began_s + budget_s)) from err
        except FarEndError as err:
            raise _LinkGaveUp(err.cause, self._blame(entry, entry.arm, err.cause, began_s + budget_s)) from err
        except BadRequest:
            raise
        except MidstreamError as err:
            self._head_ran(entry, err, began_s + told_s)
            raise _LinkGaveUp(err, None) from err
        self._head_ran(entry, None, began_s + told_s)
        return answer

    def _blame(self, entry: Entry, arm: Arm, cause: MidstreamError, ends_s: float) -> MidstreamError | None:
        """What link or far end did wrong in an arm that had until `ends_s`; None if it was not theirs."""
        if isinstance(cause, EngineError) and not finite(entry.work.tensors):
            return None  # the input itself was not finite, so an answer that is not either is the right one
        if isinstance(cause, LinkTimeout) and not self._had_time(entry, arm, ends_s):
            return None  # what was sent is known to the probe all the same
        return cause

    def _had_time(self, entry: Entry, arm: Arm, ends_s: float) -> bool:
        """Whether the far end was asked, and with as much time left as wire and server were predicted to take."""
        if entry.work.asked_s is None:
            return False
        ranked = entry.decision.proposal.of(arm)
        server_s = next((cost.server_s for cost in entry.costs if cost.arm == arm), 0.0)
        return ends_s - entry.work.asked_s >= (ranked.link_s if ranked else 0.0) + server_s

    def _head_ran(self, entry: Entry, err: MidstreamError | None, ends_s: float) -> None:
        if entry.arm.kind != "cut" or isinstance(err, Full):
            return
        if err is None or self._ports.clock() < ends_s:  # a deadline that passed says nothing of the head
            self._ports.ran(self._plan.head(self._plan.cut(entry.arm)), err)

    async def _instead(
        self, entry: Entry, gave_up: _LinkGaveUp | None, device: asyncio.Task[Outcome] | None
    ) -> Outcome:
        """The device answers for the link; whether that one is to be blamed may only show by the device's answer."""
        link, blame = entry.arm.link or "", gave_up.blame if gave_up else None
        if blame is not None and not isinstance(blame, BadRequest):
            self._states.failed(link, blame, entry.began_s)
        reason = f"{entry.arm} failed: {gave_up.err}" if gave_up else ""
        outcome = await self._beside(entry, device, reason)
        if isinstance(blame, BadRequest):  # the input was good, so what we send does not fit what they serve
            self._states.failed(link, EngineError(blame.message), entry.began_s)
        return outcome

    async def _beside(self, entry: Entry, device: asyncio.Task[Outcome] | None, reason: str) -> Outcome:
        """The answer of the device's run that is under way, or of one that begins now."""
        if device is None:
            return await self._on_device(entry, reason)
        try:
            outcome = await device
        except Full:
            return evolve(await self._on_device(entry, reason), hedged=True)
        return evolve(outcome, hedged=True, reason=reason or outcome.reason)

    async def _on_device(self, entry: Entry, reason: str) -> Outcome:
        """The device, from where a head left off if it can; when it is full, the best arm that needs no model here."""
        try:
            outcome = await self._from_the_head(entry, reason) if self._can_go_on(entry) else None
            return outcome or await self._timed(entry, DEVICE_ARM, reason)
        except Full as full:
            spill = self._spill(entry)
            if spill is None:
                raise
            return await self._spilled(entry, spill, full)

    def _can_go_on(self, entry: Entry) -> bool:
        """Whether the head of the held cut has run for this request, and its tail is here and sooner than the whole."""
        cost = entry.decision.cost
        if cost is None or not entry.work.crossed.is_set():
            return False
        tail = self._plan.tail(self._plan.cut(entry.arm))
        return cost.goes_on_s < entry.decision.device_s and self._ports.loaded(tail)

    def _spill(self, entry: Entry) -> Arm | None:
        """The best cloud arm that policy and links allow now: both may have changed since the request began."""
        policy = self._ports.policy()
        allowed = {cost.arm for cost in entry.costs if cost.arm.kind == "cloud" and not forbidden(cost, policy)}
        ranking = entry.decision.proposal.ranking
        spill = next((ranked.arm for ranked in ranking if ranked.arm in allowed and not ranked.excluded), None)
        return spill if spill is not None and self._states.open(spill.link or "", policy) else None

    async def _spilled(self, entry: Entry, arm: Arm, full: Full) -> Outcome:
        """The cloud's answer; without one the device's Full stands, and the link is left if it is to be blamed."""
        link, began_s = arm.link or "", self._ports.clock()
        try:
            outcome = await self._timed(entry, arm, "device full")
        except FarEndError as err:
            blame = self._blame(entry, arm, err.cause, entry.ends_s)
            if blame is not None and not isinstance(blame, BadRequest):
                self._states.failed(link, blame, began_s)
            raise full from err
        self._states.answered(link)
        return outcome

    async def _timed(self, entry: Entry, arm: Arm, reason: str) -> Outcome:
        lost_s = self._lost_s(entry)
        left_s = max(0.001, entry.ends_s - self._ports.clock())
        return Outcome(await self.arms.run(arm, self._plan, entry.work, left_s), arm, reason, lost_s)

    def _lost_s(self, entry: Entry) -> float:
        """Seconds so far that an arm which begins now has no use of; a decoded input is of use."""
        work = entry.work
        used_s = work.before_s + work.before_queue_s if work.made is not None else 0.0
        return max(0.0, self._ports.clock() - entry.began_s - used_s)


async def _answered(*tasks: asyncio.Task[Any] | None) -> asyncio.Task[Any] | None:
    """The first of them to end well; None when all ended in errors."""
    racing = [task for task in tasks if task is not None]
    while racing:
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in racing if task.done()]:
            racing.remove(task)
            if not task.cancelled() and task.exception() is None:
                return task
    return None
