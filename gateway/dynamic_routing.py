"""What moves the cloud threshold: budgets, latency, the state of the device, the health of the cloud. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from attrs import define

from gateway.ports import Signals
from gateway.targets import TargetView
from protocol.policy_routing import BudgetLift, DynamicRouting

OUT_OF_REACH = 2.0
"""Above every complexity: with this threshold nothing goes to the cloud; its negative sends everything there."""

STEPS = 1e6
"""Thresholds are rounded to so many steps from 0 to 1."""

Shift = tuple[float, str]
"""By how much, and why; 0 where that is no matter of degree."""

LEAST_REQUESTS = 4
"""Fewer recent requests say nothing of a target's health."""


@define
class Threshold:
    """From this complexity on the cloud answers. moved: by what; nothing where a side is down."""

    value: float
    moved: tuple[Shift, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """What moved it, with by how much."""
        return tuple([f"{why} {shift:+.2f}" if shift else why for shift, why in self.moved])


@define
class Reach:
    """The threshold lies between these whatever moves it, while both sides are up."""

    least: float
    most: float


def reach_of(base: float, policy: DynamicRouting) -> Reach:
    """As far as `threshold` can move `base` by a policy."""
    if not policy.enable:
        return Reach(base, base)
    lifts = [point.lift for point in policy.budget_lifts]
    shifts = [max(0.0, *lifts), min(0.0, *lifts), -policy.battery_drop, -policy.hot_drop, -policy.queue_drop]
    shifts += [policy.failing_lift, policy.slow_lift]
    if policy.max_ttft_s is not None:
        shifts += [policy.latency_shift, -policy.latency_shift]
    least, most = sum(shift for shift in shifts if shift < 0), sum(shift for shift in shifts if shift > 0)
    return Reach(base + least - 1 / STEPS, base + most + 1 / STEPS)


def threshold(
    base: float,
    policy: DynamicRouting,
    signals: Signals,
    device: Sequence[TargetView],
    cloud: Sequence[TargetView],
    prompt_tokens: int,
) -> Threshold:
    """`base`, moved. A side that is down or missing leaves no choice, whatever else holds."""
    if not policy.enable:
        return Threshold(base)
    here, there = [view for view in device if view.up], [view for view in cloud if view.up]
    if not there:
        return Threshold(OUT_OF_REACH, ((0.0, "no cloud target is up"),))
    if not here:
        return Threshold(-OUT_OF_REACH, ((0.0, "no target on the device is up"),))
    moved: list[Shift] = []
    _budget(moved, policy, signals)
    _device(moved, policy, signals, here)
    _cloud(moved, policy, there)
    if policy.max_ttft_s is not None:
        _latency(moved, policy, policy.max_ttft_s, here, there, prompt_tokens)
    if not moved:
        return Threshold(base)
    value = base + sum([shift for shift, _ in moved])
    return Threshold(floor(value * STEPS + 0.5) / STEPS, tuple(moved))


def budget_lift(points: Sequence[BudgetLift], left_ratio: float) -> float:
    """On the straight line between the points around `left_ratio`; the outer points hold beyond them."""
    above = points[0]
    if left_ratio >= above.left_ratio:
        return above.lift
    for below in points[1:]:
        if left_ratio >= below.left_ratio:
            part = (left_ratio - below.left_ratio) / (above.left_ratio - below.left_ratio)
            return below.lift + part * (above.lift - below.lift)
        above = below
    return above.lift


def _budget(moved: list[Shift], policy: DynamicRouting, signals: Signals) -> None:
    """The tighter of the two budgets counts."""
    tightest: tuple[float, float, str] | None = None
    for left, name in ((signals.day_left_ratio, "day"), (signals.month_left_ratio, "month")):
        if left is not None:
            lift = budget_lift(policy.budget_lifts, left)
            if tightest is None or lift > tightest[0]:
                tightest = lift, left, name
    if tightest is not None and tightest[0]:
        lift, left, name = tightest
        moved.append((lift, f"{left:.0%} of the {name}'s budget left"))


def _device(moved: list[Shift], policy: DynamicRouting, signals: Signals, device: Sequence[TargetView]) -> None:
    """`device` and what follows: the targets that are up."""
    if signals.battery_ratio is not None and signals.battery_ratio < policy.battery_low_ratio:
        moved.append((-policy.battery_drop, "low battery"))
    if signals.hot:
        moved.append((-policy.hot_drop, "hot device"))
    queue_s = min([view.queue_s for view in device])
    if queue_s >= policy.queue_s:
        moved.append((-policy.queue_drop, f"{queue_s:.0f} s of work wait on the device"))


def _cloud(moved: list[Shift], policy: DynamicRouting, cloud: Sequence[TargetView]) -> None:
    """The healthiest target speaks for the cloud, for that one will be asked first."""
    known = [view for view in cloud if view.seen >= LEAST_REQUESTS]
    if not known:
        return
    failing = min([view.failed_ratio for view in known])
    if failing >= policy.failing_ratio:
        moved.append((policy.failing_lift, f"{failing:.0%} of cloud requests failed"))
    if min([view.ttft_within_s(0.5) for view in known]) > policy.slow_ttft_s:
        moved.append((policy.slow_lift, "slow cloud"))


def _latency(
    moved: list[Shift],
    policy: DynamicRouting,
    most_s: float,
    device: Sequence[TargetView],
    cloud: Sequence[TargetView],
    prompt_tokens: int,
) -> None:
    """Where a first token is wanted by a time and only one side keeps it, that side is preferred."""
    here = any(view.prefill_seconds(prompt_tokens) <= most_s for view in device)
    there = any(not view.ttft.samples or view.ttft.quantile_s(0.5) <= most_s for view in cloud)
    if here != there:
        shift = policy.latency_shift if here else -policy.latency_shift
        moved.append((shift, f"only the {'device' if here else 'cloud'} answers within {most_s:g} s"))
