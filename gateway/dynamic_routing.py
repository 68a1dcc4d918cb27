"""What moves the cloud threshold: budgets, latency, the state of the device, the health of the cloud. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from gateway.ports import Signals
from gateway.targets import TargetView
from protocol.policy_routing import BudgetLift, DynamicRouting

OUT_OF_REACH = 2.0
"""Above every complexity: with this threshold nothing goes to the cloud; its negative sends everything there."""

LEAST_REQUESTS = 4
"""Fewer recent requests say nothing of a target's health."""


@frozen
class Threshold:
    """From this complexity on the cloud answers. reasons: what moved it, with by how much."""

    value: float
    reasons: tuple[str, ...] = ()


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
    if not any(view.up for view in cloud):
        return Threshold(OUT_OF_REACH, ("no cloud target is up",))
    if not any(view.up for view in device):
        return Threshold(-OUT_OF_REACH, ("no target on the device is up",))
    shifts = (
        _budget(policy, signals),
        *_device(policy, signals, device),
        *_cloud(policy, cloud),
        _latency(policy, device, cloud, prompt_tokens),
    )
    moved = [(shift, why) for shift, why in shifts if shift]
    if not moved:
        return Threshold(base)
    value = base + sum(shift for shift, _ in moved)
    return Threshold(round(value, 6), tuple(f"{why} {shift:+.2f}" for shift, why in moved))


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


Shift = tuple[float, str]


def _budget(policy: DynamicRouting, signals: Signals) -> Shift:
    """The tighter of the two budgets counts."""
    lefts = [(signals.day_left_ratio, "day"), (signals.month_left_ratio, "month")]
    lifts = [(budget_lift(policy.budget_lifts, left), left, name) for left, name in lefts if left is not None]
    if not lifts:
        return 0.0, ""
    lift, left, name = max(lifts, key=lambda item: item[0])
    return lift, f"{left:.0%} of the {name}'s budget left"


def _device(policy: DynamicRouting, signals: Signals, device: Sequence[TargetView]) -> tuple[Shift, ...]:
    low = signals.battery_ratio is not None and signals.battery_ratio < policy.battery_low_ratio
    queue_s = min((view.queue_s for view in device if view.up), default=0.0)
    return (
        (-policy.battery_drop if low else 0.0, "low battery"),
        (-policy.hot_drop if signals.hot else 0.0, "hot device"),
        (-policy.queue_drop if queue_s >= policy.queue_s else 0.0, f"{queue_s:.0f} s of work wait on the device"),
    )


def _cloud(policy: DynamicRouting, cloud: Sequence[TargetView]) -> tuple[Shift, ...]:
    """The healthiest target speaks for the cloud, for that one will be asked first."""
    known = [view for view in cloud if view.up and view.seen >= LEAST_REQUESTS]
    if not known:
        return ()
    failing = min(view.ttft.failed_ratio for view in known)
    slow_s = min(view.ttft.quantile_s(0.5) for view in known)
    return (
        (policy.failing_lift if failing >= policy.failing_ratio else 0.0, f"{failing:.0%} of cloud requests failed"),
        (policy.slow_lift if slow_s > policy.slow_ttft_s else 0.0, "slow cloud"),
    )


def _latency(
    policy: DynamicRouting, device: Sequence[TargetView], cloud: Sequence[TargetView], prompt_tokens: int
) -> Shift:
    """Where a first token is wanted by a time and only one side keeps it, that side is preferred."""
    if policy.max_ttft_s is None:
        return 0.0, ""
    here = any(view.up and view.prefill_seconds(prompt_tokens) <= policy.max_ttft_s for view in device)
    there = any(view.up and (not view.ttft.samples or view.ttft.quantile_s(0.5) <= policy.max_ttft_s) for view in cloud)
    if here == there:
        return 0.0, ""
    shift = policy.latency_shift if here else -policy.latency_shift
    return shift, f"only the {'device' if here else 'cloud'} answers within {policy.max_ttft_s:g} s"
