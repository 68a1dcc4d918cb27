"""Pure: when a request that waits for a link also starts on the device, and what that may cost.

The link's own statistics (how its last transfers stood to their predictions) give the distribution of the time that
remains, given that the answer has not come yet. The start of the device is put where the expected time of the first
answer plus the price of the device seconds is least. The price falls as unspent allowance grows, so that the budget
goes where it saves most (drift plus penalty: Neely, Stochastic Network Optimization, 2010, chapter 4).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf, isfinite

from attrs import evolve, frozen

from netprobe.view import LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import ArmCost
from split_models.lateness import LATE_RATIO
from split_models.planner import Ranked

PRIOR_RATIOS = (0.8, 1.0, 1.4)
"""Actual over predicted seconds of a link nobody has measured twice; kept beside what was seen."""

TAIL_WEIGHT = 1.0
"""Weight of the holes that were not seen, in transfers: one of these beside the last thirty-two."""

TAIL_EXPONENT: float = 1.5
"""Holes are long in proportion to how long they have lasted already (Pareto); 1.5 expects twice as long again."""

_TAIL_STARTS = (1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 8.0)
"""Starts that are tried besides now and the moments seen, over the predicted seconds."""

RESERVE_RUNS = 1.0
"""With so many unspent device runs in hand a further device second costs half a second, with none left a whole one."""

MOST_RUNS = 16.0
"""Device runs that may be saved up: what ten thousand requests did not need is no leave to hedge each of the next.

Fewer than this are spent before a link has recovered, and then it is left instead of hedged."""


REGRET = 2.0
"""An answer that comes later than the device's would have come costs so much more per second that it is later."""

HOPED = 0.5
"""A link that failed and is back is taken to answer in this share of the device's time."""

AT_ONCE_S = 1e-3
"""A start that is nearer than this is made now."""


TIMELY_S = 0.04
"""How long the last moment of `parting` lasts: less than the time after which a waiting request asks again. A loop that
is later than this has missed it, and keeps to the link."""


@frozen
class Hedge:
    """Start the device after `start_in_s` more seconds without an answer: 0 now, infinite never.

    run_s: device seconds that the start counts at first. rest: it goes on with the tail from what the head computed;
    otherwise it runs the whole model. instead: the link is given up for it, so that it costs no allowance.
    """

    start_in_s: float
    reason: str
    run_s: float = 0.0
    rest: bool = False
    instead: bool = False


NEVER = Hedge(inf, "there is nothing to start")


@frozen
class HedgeBudget:
    """Device seconds: what a device-only run would have used so far, and what was started as hedges.

    saved_s: earned by requests and not spent, at most MOST_RUNS runs of the newest request; what is over lapses.
    """

    device_only_s: float = 0.0
    hedged_s: float = 0.0
    saved_s: float = 0.0

    def requested(self, device_s: float, policy: SplitPolicy) -> HedgeBudget:
        """One more request, which a device-only run would have answered in `device_s`; it earns the policy's share."""
        run_s = _seconds(device_s)
        saved_s = min(self.saved_s + policy.hedge_ratio * run_s, MOST_RUNS * run_s) if run_s > 0 else self.saved_s
        return evolve(self, device_only_s=self.device_only_s + run_s, saved_s=saved_s)

    def started(self, device_s: float) -> HedgeBudget:
        """A hedge of `device_s` was started; it counts whole, until it is known to have ended sooner."""
        run_s = _seconds(device_s)
        return evolve(self, hedged_s=self.hedged_s + run_s, saved_s=max(0.0, self.saved_s - run_s))

    def over(self, device_s: float, ran_s: float) -> HedgeBudget:
        """A hedge that was begun with `device_s` is over after `ran_s` device seconds: the rest comes back."""
        unused_s = max(0.0, _seconds(device_s) - _seconds(ran_s))
        return evolve(self, hedged_s=max(0.0, self.hedged_s - unused_s), saved_s=self.saved_s + unused_s)

    def allowance_s(self, policy: SplitPolicy) -> float:
        """Device seconds that hedges may still start: what was saved, within the policy's share of a device-only run.

        Never negative.
        """
        return max(0.0, min(self.saved_s, policy.hedge_ratio * self.device_only_s - self.hedged_s))


def hedge(
    entry: Ranked,
    device: Ranked,
    view: LinkView,
    elapsed_s: float,
    allowance_s: float,
    policy: SplitPolicy,
    run_s: float | None = None,
    *,
    answers_s: float | None = None,
    left_s: float | None = None,
    stoppable: bool = False,
    late_price_s: float = 0.0,
) -> Hedge:
    """When to start the device beside `entry`, which has run `elapsed_s` without an answer.

    May be asked again while the request runs. view: the slower way of the entry's link. allowance_s: HedgeBudget's.
    run_s: device seconds that a start uses, without the wait for the device; default: all that was predicted.
    answers_s: from a start to the device's answer, which a head that has run brings nearer; default: as predicted.
    left_s: what the transfer under way still needs, as far as it has come; None where nothing tells. stoppable: a run
    that loses uses the device only until then. late_price_s: what a late answer costs over its seconds (Lateness).
    """
    run_s = device.predicted_s if run_s is None else run_s
    refused = _refused(entry, device, run_s, allowance_s, policy)
    if refused:
        return Hedge(inf, refused)
    if not isfinite(entry.predicted_s) or left_s == inf or (view.residuals and min(view.residuals) == inf):
        return Hedge(0.0, "the link is not expected to answer", run_s)
    price = _price(allowance_s / run_s)
    other_s = _other_cost_s(device, policy)
    answers_s = device.predicted_s if answers_s is None else answers_s
    start = _Start(answers_s, run_s, price, other_s, stoppable, device.predicted_s, late_price_s)
    start_s = _best_start_s(_Remaining.of(entry, view.residuals, elapsed_s, left_s), start)
    if start_s == inf:
        return Hedge(inf, "the link is expected to be first")
    expected_ms = 1e3 * (entry.predicted_s - elapsed_s)
    start_in_s = start_s - elapsed_s
    return Hedge(
        start_in_s if start_in_s > AT_ONCE_S else 0.0,
        f"device after {start_s:.2f} s, link expected in {expected_ms:.0f} ms",
        run_s,
    )


def instead(left_s: float | None, answers_s: float, allowance_s: float, run_s: float, policy: SplitPolicy) -> bool:
    """Whether to give up a transfer under way for the device, since no hedge can be afforded beside it: at the pace so
    far it needs longer than the device would.
    """
    return allowance_s < run_s and seconds_alone(policy) and left_s is not None and left_s > answers_s


def parting(
    left_s: float | None,
    elapsed_s: float,
    answers_s: float,
    device: Ranked,
    allowance_s: float,
    run_s: float,
    policy: SplitPolicy,
) -> Hedge | None:
    """The last moment at which the device can still answer in time (LATE_RATIO), for a request beside whose link no
    hedge can be afforded; there the link is given up if, at its pace so far, it is the later one.

    None after that moment, or where there is none. Before it: when to ask again.
    """
    late_s = LATE_RATIO * device.predicted_s
    timely_s = late_s - answers_s
    if allowance_s >= run_s or device.excluded or not 0.0 < timely_s < inf or not seconds_alone(policy):
        return None
    if elapsed_s < timely_s - AT_ONCE_S:
        return Hedge(timely_s - elapsed_s, "the device can still be in time")
    late = left_s is not None and left_s > answers_s and elapsed_s + left_s > late_s
    if late and elapsed_s < timely_s + TIMELY_S:
        return Hedge(0.0, f"the link would be late, the device answers in {answers_s:.2f} s", instead=True)
    return None


def weighed_s(
    entry: Ranked, view: LinkView, device_s: float, late_price_s: float = 0.0, hedge_ends_s: float = inf
) -> float:
    """Expected seconds of an arm, later ones than the device's `device_s` with the regret of them, and the late ones
    with their price.

    By what the link's last transfers took over their predictions; without any, what is predicted is expected. The price
    also counts a hole that was not seen. hedge_ends_s: when a hedge beside it has answered.
    """
    moments_s = [min(hedge_ends_s, seconds) for seconds in _moments_s(entry, view, device_s)]
    late_s = sum(max(0.0, seconds - device_s) for seconds in moments_s)
    missed = sum(seconds > LATE_RATIO * device_s for seconds in moments_s) + _unseen(entry, LATE_RATIO * device_s)
    return (sum(moments_s) + REGRET * late_s + late_price_s * missed) / len(moments_s)


def _unseen(entry: Ranked, late_s: float) -> float:
    """Weight of the holes that were not seen and make this arm later than `late_s`."""
    if not 0.0 < entry.predicted_s < late_s or entry.link_s <= 0.0:
        return 0.0
    share: float = (entry.predicted_s / late_s) ** TAIL_EXPONENT
    return TAIL_WEIGHT * share


def timely(cost: ArmCost, device_s: float) -> bool:
    """Whether a hedge beside this arm can be in time: it begins when the head has run."""
    return hedge_ends_s(cost, device_s) <= LATE_RATIO * device_s


def hedge_ends_s(cost: ArmCost, device_s: float) -> float:
    """When a hedge that begins as soon as it can has answered, with the tail or with the whole model."""
    return cost.device_s + min(cost.goes_on_s, device_s)


def usual_s(entry: Ranked, view: LinkView) -> float:
    """Expected seconds of an arm that is waited for to the end, by what the link's last transfers took over their
    predictions.
    """
    seen = view.residuals if view.expected is None else view.expected
    ratios = (*seen, *PRIOR_RATIOS) if seen else (1.0,)
    return entry.predicted_s + entry.link_s * (sum(ratios) / len(ratios) - 1.0)


def worth_both(entry: Ranked, view: LinkView, device_s: float, allowance_s: float) -> bool:
    """Whether to begin on the link and the device at once, when the device alone would answer in `device_s`: what the
    sooner answer saves is worth more than the allowance that the device's run uses up.
    """
    if allowance_s < device_s or not isfinite(entry.predicted_s):
        return False
    moments_s = _moments_s(entry, view, device_s)
    first_s = sum(min(seconds, device_s) for seconds in moments_s) / len(moments_s)
    return device_s - first_s > _price(allowance_s / device_s) * first_s


def worth_trying(chance: float, runs: float) -> bool:
    """The same for a link that failed and is back with that chance, with `runs` device runs in hand. Nothing else is
    known of it: it is hoped to answer in HOPED of the device's time.
    """
    return chance * (1.0 - HOPED) >= _price(runs) * (1.0 - chance * (1.0 - HOPED))


def _moments_s(entry: Ranked, view: LinkView, device_s: float) -> Sequence[float]:
    """When the arm may answer, each as likely; one that is later than predicted by a run of the device is given up."""
    steady_s, most_s = max(0.0, entry.predicted_s - entry.link_s), entry.predicted_s + device_s
    seen = view.residuals if view.likely is None else view.likely
    ratios = (*seen, *PRIOR_RATIOS) if seen else (1.0,)
    return [min(steady_s + entry.link_s * ratio, most_s) for ratio in ratios]


def _refused(entry: Ranked, device: Ranked, run_s: float, allowance_s: float, policy: SplitPolicy) -> str:
    if entry.arm.link is None:
        return "the arm needs no link"
    if policy.hedge_ratio <= 0:
        return "hedging is off"
    if device.excluded or not isfinite(device.predicted_s) or run_s <= 0:
        return "the device cannot answer"
    if _seconds_weight(policy) <= 0:
        return "the objective does not weigh seconds"
    if allowance_s < run_s:
        return "the allowance is spent"
    return ""


@frozen
class _Start:
    """What a start of the device brings. device_s: until it answers, waiting included. run_s: what it uses at the most.
    price: seconds of waiting that must be saved per device second. other_s: what it costs besides, in seconds. alone_s:
    until the device would have answered had it been started with the request. late_price_s: of a late answer."""

    device_s: float
    run_s: float
    price: float
    other_s: float
    stoppable: bool
    alone_s: float
    late_price_s: float


@frozen
class _Remaining:
    """When the answer may come, in seconds since the request's start, given that it has not come by `elapsed_s`.

    Moments that were seen weigh one each; `sums_s` accumulates them. Holes follow a Pareto law from `from_s` on, with
    `tail` as their weight.
    """

    elapsed_s: float
    moments_s: Sequence[float]
    sums_s: Sequence[float]
    usual_s: float
    from_s: float
    tail: float

    @classmethod
    def of(cls, entry: Ranked, residuals: Sequence[float], elapsed_s: float, left_s: float | None = None) -> _Remaining:
        """The moments of `entry` by the link's residuals; those of a transfer under way by what is left of it."""
        steady_s = max(0.0, entry.predicted_s - entry.link_s)
        from_s, link_s = steady_s, entry.link_s
        if left_s is not None:
            from_s, link_s = elapsed_s, left_s
        seen = sorted(from_s + link_s * ratio for ratio in (*residuals, *PRIOR_RATIOS))
        moments = [at_s for at_s in seen if at_s > elapsed_s]
        usual_s = max(entry.predicted_s, from_s + link_s, 1e-6)
        tail_s = max(usual_s, elapsed_s)
        tail = TAIL_WEIGHT * (usual_s / tail_s) ** TAIL_EXPONENT
        return cls(elapsed_s, moments, [0.0, *accumulate(moments)], usual_s, tail_s, tail)

    def cost(self, start_s: float, start: _Start) -> float:
        """Seconds until the first answer and the price of a start at `start_s`, times the weight of all moments."""
        ends_s = start_s + start.device_s
        first_s = self.sooner(ends_s)
        late = self._later(start_s)
        used_s = late * start.run_s
        if start.stoppable:
            used_s = min(used_s, first_s - self.sooner(start_s))
        return self._regretted(first_s, start, ends_s) + start.price * used_s + start.other_s * late

    def alone(self, start: _Start) -> float:
        """The same without the device."""
        alone_s = self.sums_s[-1] + self.tail * self.from_s * TAIL_EXPONENT / (TAIL_EXPONENT - 1.0)
        return self._regretted(alone_s, start, inf)

    def sooner(self, at_s: float) -> float:
        """The lesser of `at_s` and the answer's moment, times the weight of all moments."""
        before = bisect_right(self.moments_s, at_s)
        return self.sums_s[before] + (len(self.moments_s) - before) * at_s + self.tail * self._tail_s(at_s)

    def _regretted(self, first_s: float, start: _Start, ends_s: float) -> float:
        """`first_s` with what is later than the device, had it been started with the request, and with the price of
        late answers, of which there are none where the device ends in time.
        """
        late_s = LATE_RATIO * start.alone_s
        price_s = start.late_price_s * self._later(late_s) if ends_s > late_s else 0.0
        return first_s + REGRET * max(0.0, first_s - self.sooner(start.alone_s)) + price_s

    def _later(self, at_s: float) -> float:
        """Weight of the moments after `at_s`."""
        waiting = len(self.moments_s) - bisect_right(self.moments_s, at_s)
        late: float = (self.from_s / max(at_s, self.from_s)) ** TAIL_EXPONENT
        return waiting + self.tail * late

    def _tail_s(self, ends_s: float) -> float:
        """Mean of the lesser of `ends_s` and a Pareto moment."""
        if ends_s <= self.from_s:
            return ends_s
        more: float = 1.0 - (self.from_s / ends_s) ** (TAIL_EXPONENT - 1.0)
        return self.from_s * (1.0 + more / (TAIL_EXPONENT - 1.0))


def _best_start_s(remaining: _Remaining, start: _Start) -> float:
    """The start, counted from the request's, with the least expected time and price; infinite when none pays.

    A later start saves the price of all answers that come before it, so among the moments seen only they themselves
    and now need be tried, and the last one from which the device ends in time.
    """
    tail_starts = (remaining.usual_s * times for times in _TAIL_STARTS)
    timely_s = max(remaining.elapsed_s, LATE_RATIO * start.alone_s - start.device_s)
    starts = sorted({remaining.elapsed_s, timely_s, *remaining.moments_s, *tail_starts})
    best_s, least = inf, remaining.alone(start)
    for start_s in starts:
        if start_s >= remaining.elapsed_s and start_s < inf:
            cost = remaining.cost(start_s, start)
            if cost < least:
                best_s, least = start_s, cost
    return best_s


def _price(runs: float) -> float:
    """Seconds of waiting that must be saved per device second, with `runs` device runs in hand."""
    return 1.0 / (1.0 + runs / RESERVE_RUNS)


def _other_cost_s(device: Ranked, policy: SplitPolicy) -> float:
    """What a start costs besides time (joules), in seconds of the objective."""
    weight = _seconds_weight(policy)
    return max(0.0, device.objective / weight - device.predicted_s) if isfinite(device.objective) else inf


def _seconds_weight(policy: SplitPolicy) -> float:
    """Weight of seconds in the policy's objective; 1 where it weighs nothing that is known."""
    weights = policy.objective
    named = any(weights.get(name, 0.0) > 0 for name in ("seconds", "joules", "server_seconds"))
    return weights.get("seconds", 0.0) if named else 1.0


def seconds_alone(policy: SplitPolicy) -> bool:
    """Whether nothing but seconds is weighed: where joules count too, a slower arm may well be the better one."""
    others = (policy.objective.get(name, 0.0) for name in ("joules", "server_seconds"))
    return _seconds_weight(policy) > 0 and not any(weight > 0 for weight in others)


def _seconds(value: float) -> float:
    return value if 0.0 <= value < inf else 0.0
