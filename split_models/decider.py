"""Pure: what a runner decides for the requests of one model: the arm, when to leave it, when to look at a silent link.

Live requests and the replay of a trace drive the same decider; views, costs and time are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf, isfinite

from attrs import define, evolve, field, frozen

from netprobe.under_way import recovered
from netprobe.view import UNKNOWN_LINK, LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.detours import ahead, beside, safer, trial
from split_models.hedge import (
    NEVER,
    Hedge,
    HedgeBudget,
    hedge,
    instead,
    parting,
    seconds_alone,
    timely,
    usual_s,
    worth_trying,
)
from split_models.lateness import Lateness
from split_models.planner import Proposal, exploration, explore_now, propose, slower_way, worth_a_look
from split_models.progress import Progress
from split_models.switch import Held, hold

PATIENCE_RATIO = 3.0
PATIENCE_S = 1.0
"""A link arm that takes this much longer than predicted, or longer by PATIENCE_RUNS of the device where that is more
(DEAR_PATIENCE_RUNS while late answers have a price), is given up, and the device answers; one that shows its pace is
judged by that, and mostly sooner."""

PATIENCE_RUNS, DEAR_PATIENCE_RUNS = 2.0, 1.0

SETTLING_PERIODS = 20
"""What a request began with rests on one transfer: for so long another arm need not be better by the policy's ratio."""

MOST_CREDIT = 4.0
"""Looks at a link that may be saved while it is in use."""

DOWN_S = 60.0
"""A link that failed is left alone so long where the policy allows no looks, which would find it again sooner."""

SEEN_SHARE = 0.5
"""No transfer that is slower than the device is given up before this share of its predicted time: what has moved is
known a round trip later, and a start is often slow. The last moment in which the device is in time may come sooner."""

HEAD_FIRST = Hedge(inf, "the head runs first")

RESERVE_RATIO = 1.5
"""Device seconds kept back from the deadline for the fallback, over their estimate."""


@frozen
class Decision:
    """What one request does. `left` is the arm that was held until now, when this request brought a switch.

    device_s: what the whole model would take on this device now, without waiting; 0 when it is not on offer. cost: of
    the arm. covered: the allowance for hedges suffices to start the device beside it. waits: a switch is due, and put
    off until the look at that link has ended. began_s: when it was asked for. tries: the arm's link failed last time,
    and the device starts at once beside it.
    """

    arm: Arm
    reason: str
    proposal: Proposal
    left: Arm | None = None
    device_s: float = 0.0
    cost: ArmCost | None = None
    covered: bool = False
    waits: bool = False
    began_s: float = 0.0
    tries: bool = False


@define
class _Seat:
    """The held arm of one kind of request: what suits one may not suit the other. fled: a link was left for the device
    without waiting any periods, so that single requests need not wait for them to return. settling: periods in which
    what was begun with is still revised without the policy's ratio.
    """

    period_began_s: float
    held: Held = field(factory=Held)
    finished: bool = False
    waits: bool = False
    starting: bool = True
    settling: int = 0
    fled: bool = False


@define
class _LinkState:
    """down_since_s: the last attempt failed then. looked: was explored once. closed_until_s: the far end is left alone
    until then. trouble: why one or the other, for people. alike: requests in a row that sent `sent_bytes` and nothing
    else. spared: requests since it failed or was tried last. failing_since_s: since it failed first after its last
    answer; tried_s: and was still no better then.
    """

    down_since_s: float | None = None
    trouble: str = ""
    looked: bool = False
    closed_until_s: float = 0.0
    silent_requests: int = 0
    credit: float = 0.0
    sent_bytes: int = 0
    alike: int = 0
    spared: int = 0
    failing_since_s: float = 0.0
    tried_s: float = 0.0


class Decider:
    """State of one model's decisions. Not thread-safe; `now_s` is monotonic and never goes back.

    start: kinds of arms that are taken at once if they are best when a link is first known; others wait their periods.
    """

    def __init__(self, now_s: float, start: Callable[[], Collection[str]] = tuple) -> None:
        self._start = start
        self._seats = {True: _Seat(now_s), False: _Seat(now_s)}
        self._links: dict[str, _LinkState] = {}
        self._budget = HedgeBudget()
        self._lateness = Lateness()
        self.progress = Progress()
        self.last: Proposal | None = None

    def held(self, *, encoded: bool = True) -> Held:
        """What requests of this kind use now."""
        return self._seats[encoded].held

    def decide(
        self,
        costs: Sequence[ArmCost],
        views: Mapping[str, LinkView],
        device_wait_s: float,
        policy: SplitPolicy,
        now_s: float,
        *,
        encoded: bool = True,
        looking: Collection[str] = (),
    ) -> Decision:
        """Which arm this request takes; counts as a sampling period when one is over.

        looking: links that are being looked at now. No request switches to one of them: it would stand in line behind
        the look.
        """
        proposal = propose(costs, views, device_wait_s, policy, self._troubles(now_s, policy))
        self.last = proposal
        device = _cost_of(costs, DEVICE_ARM)
        device_s = device.device_s if device is not None else 0.0
        self._budget = self._budget.requested(device_s, policy)
        if device_s > 0:
            link_s = self._by_link_s(proposal, costs, views, device_s, now_s)
            self._lateness = self._lateness.asked(link_s, device_s, now_s)
        seat = self._seats[encoded]
        before = _cost_of(costs, seat.held.arm)
        left = self._switch(seat, proposal, policy, now_s, self._covered(before, device_s, policy), looking)
        if left is not None:
            found = self._safer(_cost_of(costs, seat.held.arm), proposal, costs, views, device_s, policy, looking)
            arm, reason = found or (seat.held.arm, seat.held.reason)
            return self._decision(arm, reason, proposal, costs, policy, now_s, left=left)
        if seat.waits:
            return self._decision(seat.held.arm, proposal.reason, proposal, costs, policy, now_s, waits=True)
        arm, reason = self._detour(seat, proposal, costs, views, device_s, policy, looking)
        tried = self._trial(costs, device_s, policy, now_s, looking) if arm == DEVICE_ARM else None
        if tried is None and arm == DEVICE_ARM:
            tried = beside(costs, proposal, views, self._budget.allowance_s(policy), policy)
            tried = None if tried is not None and tried.arm.link in looking else tried
        if tried is None:
            return self._decision(arm, reason, proposal, costs, policy, now_s)
        reason = f"{tried.arm} is tried beside the device"
        return self._decision(tried.arm, reason, proposal, costs, policy, now_s, tries=True)

    def _detour(
        self,
        seat: _Seat,
        proposal: Proposal,
        costs: Sequence[ArmCost],
        views: Mapping[str, LinkView],
        device_s: float,
        policy: SplitPolicy,
        looking: Collection[str],
    ) -> tuple[Arm, str]:
        """The arm of this one request, and why; mostly the held one."""
        held = seat.held.arm
        cost, price_s = _cost_of(costs, held), self._late_price_s(device_s, policy)
        other = self._safer(cost, proposal, costs, views, device_s, policy, looking)
        if other is not None:
            return other
        found = ahead(held, costs, proposal, views, policy, price_s) if seat.fled or held != DEVICE_ARM else None
        if found is not None and found[0].arm.link not in looking:
            better, sure = found
            if sure or (self._covered(better, device_s, policy) and (held == DEVICE_ARM or timely(better, device_s))):
                other = self._safer(better, proposal, costs, views, device_s, policy, looking)
                return other or (better.arm, f"{better.arm} is better now")
        return held, proposal.reason

    def _safer(
        self,
        cost: ArmCost | None,
        proposal: Proposal,
        costs: Sequence[ArmCost],
        views: Mapping[str, LinkView],
        device_s: float,
        policy: SplitPolicy,
        looking: Collection[str],
    ) -> tuple[Arm, str] | None:
        """Another arm than this one, and why, for a request that may well be late."""
        if cost is None:
            return None
        price_s, allowance_s = self._late_price_s(device_s, policy), self._budget.allowance_s(policy)
        usable = [one for one in costs if one.arm.link not in looking]
        return safer(cost, proposal, usable, views, device_s, allowance_s, policy, price_s)

    def _decision(
        self,
        arm: Arm,
        reason: str,
        proposal: Proposal,
        costs: Sequence[ArmCost],
        policy: SplitPolicy,
        now_s: float,
        *,
        left: Arm | None = None,
        waits: bool = False,
        tries: bool = False,
    ) -> Decision:
        device, cost = _cost_of(costs, DEVICE_ARM), _cost_of(costs, arm)
        device_s = device.device_s if device is not None else 0.0
        covered = self._covered(cost, device_s, policy)
        return Decision(arm, reason, proposal, left, device_s, cost, covered, waits, now_s, tries)

    def hedge(
        self,
        decision: Decision,
        views: Mapping[str, LinkView],
        now_s: float,
        policy: SplitPolicy,
        *,
        stoppable: bool = False,
        head_over: bool = False,
    ) -> Hedge:
        """When to start the device too, for a request under way; may be asked again meanwhile.

        stoppable: a run on the device that loses is stopped. head_over: a cut's head has run; where the tail is in
        memory here the device goes on from there, and until then there is nothing sooner that it could begin.
        """
        if decision.tries:
            return Hedge(0.0, decision.reason, decision.device_s)
        entry, device = decision.proposal.of(decision.arm), decision.proposal.of(DEVICE_ARM)
        if entry is None or device is None or decision.cost is None or not isfinite(entry.predicted_s):
            return NEVER
        view = slower_way(decision.cost, views)
        left_s = self.progress.left_s(decision.cost, views, decision.began_s, now_s)
        elapsed_s, allowance_s = max(0.0, now_s - decision.began_s), self._budget.allowance_s(policy)
        rest = decision.cost.goes_on_s < decision.device_s
        if rest and not head_over:
            return HEAD_FIRST
        run_s = decision.cost.goes_on_s if rest else decision.device_s
        answers_s = max(0.0, device.predicted_s - decision.device_s) + run_s
        begun = view.under_way is not None and view.under_way.seconds > SEEN_SHARE * entry.link_s
        if begun and instead(left_s, answers_s, allowance_s, run_s, policy):
            return Hedge(0.0, f"the device answers in {answers_s:.2f} s, sooner than the link", rest=rest, instead=True)
        parted = parting(left_s, elapsed_s, answers_s, device, allowance_s, run_s, policy)
        if parted is not None:
            return evolve(parted, rest=rest)
        found = hedge(
            entry, device, view, elapsed_s, allowance_s, policy, run_s,
            answers_s=answers_s, left_s=left_s, stoppable=stoppable,
            late_price_s=self._late_price_s(decision.device_s, policy),
        )  # fmt: skip
        return evolve(found, rest=rest)

    def hedged(self, found: Hedge) -> None:
        """The device was started beside the link: its seconds count against the allowance, whoever wins."""
        self._budget = self._budget.started(found.run_s)

    def hedge_over(self, found: Hedge, ran_s: float) -> None:
        """That run is over after `ran_s` device seconds; what it did not use may be spent by another hedge."""
        self._budget = self._budget.over(found.run_s, ran_s)

    @property
    def budget(self) -> HedgeBudget:
        """Device seconds so far."""
        return self._budget

    def finished(self, *, encoded: bool = True) -> None:
        """A request of this kind has ended, well or not."""
        self._seats[encoded].finished = True

    def took(self, decision: Decision, now_s: float) -> None:
        """The request of this decision has its answer, or failed, at `now_s`: whether that was late is remembered."""
        self.progress.over(decision.began_s)
        device = decision.proposal.of(DEVICE_ARM)
        if device is not None and not device.excluded:
            self._lateness = self._lateness.answered(now_s - decision.began_s, device.predicted_s)

    def looks(
        self,
        arm: Arm,
        names: Sequence[str],
        busy: Collection[str],
        costs: Sequence[ArmCost],
        views: Mapping[str, LinkView],
        policy: SplitPolicy,
        now_s: float,
    ) -> Sequence[ArmCost]:
        """Arms through which this request also looks at links; it runs on `arm` itself.

        Links that it leaves alone, and its own one when nothing tells that one's floor from its rate.

        One that is not loaded must be loaded and not run. busy: links that are being looked at now.
        """
        found: list[ArmCost] = []
        for name in names:
            state = self._link(name)
            if policy.explore_one_in > 0:
                state.credit = min(MOST_CREDIT, state.credit + 1.0 / policy.explore_one_in)
            if arm.link == name:
                state.silent_requests = 0
                other = self._other_size(arm, state, costs, policy)
                if other is not None and name not in busy:
                    state.alike = 0
                    found.append(other)
                continue
            state.silent_requests += 1
            if name in busy or state.closed_until_s > now_s:
                continue
            target = exploration([cost for cost in costs if cost.arm.link == name], policy)
            if target is None:
                continue
            view = views.get(name, UNKNOWN_LINK)
            if not target.loaded:
                found.append(target)
            elif explore_now(state.silent_requests, state.looked, view, policy, state.credit):
                state.looked, state.credit = True, max(0.0, state.credit - 1.0)
                found.append(target)
        return found

    def _other_size(self, arm: Arm, state: _LinkState, costs: Sequence[ArmCost], policy: SplitPolicy) -> ArmCost | None:
        """One request in N that uses a link also sends more over it, where that may show a better arm."""
        held = next((cost for cost in costs if cost.arm == arm), None)
        entry = self.last.of(arm) if self.last is not None else None
        if held is None or entry is None or policy.explore_one_in <= 0:
            return None
        state.alike = state.alike + 1 if held.up_bytes == state.sent_bytes else 0
        state.sent_bytes = held.up_bytes
        if state.alike < policy.explore_one_in:
            return None
        return worth_a_look(costs, held, entry, policy)

    def patience_s(self, decision: Decision, left_s: float) -> float:
        """Seconds for the link, so that the device can still answer in the `left_s` until the deadline.

        Where both do not fit into `left_s` one after the other the link has all of it, or, if only the device can
        answer in time, nothing. While a hedge can be afforded nothing but the deadline ends the wait: the device starts
        beside the link.
        """
        arm, proposal = decision.arm, decision.proposal
        if decision.tries:
            return left_s
        entry, device = proposal.of(arm), proposal.of(DEVICE_ARM)
        reserve_s = RESERVE_RATIO * device.predicted_s if device else 0.0
        predicted_s = entry.predicted_s if entry else 0.0
        if predicted_s + reserve_s <= left_s:
            most_s = left_s - reserve_s
        elif device is not None and device.predicted_s <= left_s < predicted_s:
            return 0.0
        else:
            most_s = left_s
        if decision.covered:
            return most_s
        runs = PATIENCE_RUNS if self._lateness.price_s(1.0) == 0 else DEAR_PATIENCE_RUNS
        runs_s = runs * device.predicted_s if device and isfinite(device.predicted_s) else 0.0
        slack_s = max(PATIENCE_S, runs_s)
        return min(most_s, max(PATIENCE_RATIO * predicted_s, predicted_s + slack_s))

    def answered(self, link: str) -> None:
        """`link` gave an answer: whatever was wrong with it is over."""
        state = self._link(link)
        state.down_since_s, state.spared = None, 0

    def failed(self, link: str, trouble: str, now_s: float) -> None:
        """An attempt failed: leave `link` until it has answered again, or for DOWN_S where nothing looks at it."""
        state = self._link(link)
        state.failing_since_s = now_s if state.down_since_s is None else state.failing_since_s
        state.down_since_s, state.tried_s, state.trouble = now_s, now_s, trouble

    def close(self, link: str, until_s: float, trouble: str) -> None:
        """The far end of `link` is to be left alone until `until_s`."""
        state = self._link(link)
        state.closed_until_s, state.trouble = until_s, trouble

    def open(self, link: str, policy: SplitPolicy, now_s: float) -> bool:
        """Whether the link answered last time, and its peer does not want to be left alone now."""
        state = self._link(link)
        if state.down_since_s is not None and (policy.explore_one_in > 0 or now_s < state.down_since_s + DOWN_S):
            return False
        return state.closed_until_s <= now_s

    def _troubles(self, now_s: float, policy: SplitPolicy) -> Mapping[str, str]:
        """Links that failed or sent us away; each counts as unknown until it is open again."""
        return {name: state.trouble for name, state in self._links.items() if not self.open(name, policy, now_s)}

    def _switch(
        self,
        seat: _Seat,
        proposal: Proposal,
        policy: SplitPolicy,
        now_s: float,
        covered: bool,
        looking: Collection[str],
    ) -> Arm | None:
        """Once per sampling period; an arm that may not be used is left at once. The arm before, when it changed."""
        if seat.starting and any(entry.arm.link and not entry.excluded for entry in proposal.ranking):
            seat.starting = False
            if proposal.arm.link is not None and proposal.arm.kind in self._start():
                seat.settling = SETTLING_PERIODS
                before, seat.held = seat.held.arm, Held(proposal.arm, reason=f"{proposal.arm} to begin with")
                return before if before != proposal.arm else None
        current = proposal.of(seat.held.arm)
        usable = current is not None and not current.excluded
        elapsed = now_s - seat.period_began_s >= policy.period_s and seat.finished
        seat.waits = False
        if usable and not elapsed:
            return None
        settled = policy if seat.settling <= 0 else evolve(policy, ratio=0.0)
        before, after = seat.held.arm, hold(seat.held, proposal, settled, covered=covered)
        seat.waits = usable and after.arm != before and after.arm.link in looking
        if seat.waits:
            return None
        if elapsed:
            seat.period_began_s, seat.finished = now_s, False
            seat.settling -= 1
        if after.arm != before:
            seat.fled = before.link is not None and after.arm == DEVICE_ARM
        seat.held = after
        return before if after.arm != before else None

    def _trial(
        self, costs: Sequence[ArmCost], device_s: float, policy: SplitPolicy, now_s: float, looking: Collection[str]
    ) -> ArmCost | None:
        """An arm of a link that failed, for a request of the device's that the allowance can pay for: the link may
        answer sooner, and else nothing is lost. As soon as that is worth the allowance, at the latest one request in N.
        """
        if not seconds_alone(policy) or policy.explore_one_in <= 0:
            return None
        for name, state in self._links.items():
            if state.down_since_s is None or state.closed_until_s > now_s or name in looking:
                continue
            state.spared += 1
            back = recovered(state.tried_s - state.failing_since_s, now_s - state.tried_s)
            runs = self._budget.allowance_s(policy) / device_s if device_s > 0 else 0.0
            due = state.spared >= policy.explore_one_in or worth_trying(back, runs)
            target = trial(name, costs, device_s, policy) if due else None
            if target is not None and self._covered(target, device_s, policy):
                state.spared, state.tried_s = 0, now_s
                state.credit = max(0.0, state.credit - 1.0)
                return target
        return None

    def _covered(self, cost: ArmCost | None, device_s: float, policy: SplitPolicy) -> bool:
        """Whether the allowance suffices to start the device beside an arm of this cost."""
        run_s = min(device_s, cost.goes_on_s) if cost is not None else device_s
        return 0.0 < run_s <= self._budget.allowance_s(policy)

    def _late_price_s(self, device_s: float, policy: SplitPolicy) -> float:
        return self._lateness.price_s(device_s) if seconds_alone(policy) else 0.0

    def _by_link_s(
        self,
        proposal: Proposal,
        costs: Sequence[ArmCost],
        views: Mapping[str, LinkView],
        device_s: float,
        now_s: float,
    ) -> float:
        """What a request is expected to take on its best link arm; without any, since the last one failed."""
        best = next((entry for entry in proposal.ranking if entry.arm.link and not entry.excluded), None)
        cost = _cost_of(costs, best.arm) if best is not None else None
        if best is not None and cost is not None:
            return usual_s(best, slower_way(cost, views))
        down = [state.down_since_s for state in self._links.values() if state.down_since_s is not None]
        return now_s - max(down) if down else device_s

    def _link(self, name: str) -> _LinkState:
        return self._links.setdefault(name, _LinkState())


def _cost_of(costs: Sequence[ArmCost], arm: Arm) -> ArmCost | None:
    return next((cost for cost in costs if cost.arm == arm), None)
