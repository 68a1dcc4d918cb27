"""Pure: a single request that is better off on another arm than the held one, which stays held.

The switch waits for some periods, lest one lucky or unlucky transfer moves all requests that follow. One request may go
another way at once: to the device when the held link may well be late and no hedge bounds what that costs, away from
the device when a link is clearly better again, or a hedge bounds what it costs to believe that, and from one arm of a
link to another that takes half as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from netprobe.view import LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.hedge import hedge_ends_s, seconds_alone, timely, weighed_s, worth_both
from split_models.planner import Proposal, exploration, slower_way

SURE_RATIO = 0.5
"""Without a hedge an arm must be expected to answer, the regret of late answers included, within this share of the
held one's seconds."""

WORTH_IT_RATIO = 0.3
"""An arm that promises this share of the device's seconds is used whatever late answers are owed: holes come in rows,
and a link that was dead for long is believed again when it is as fast as before."""

TRIAL_RATIO = 0.1
"""A link is tried beside the device by arms that take no more of it than this, over its own run: both share it."""


def outrun(
    cost: ArmCost,
    proposal: Proposal,
    views: Mapping[str, LinkView],
    policy: SplitPolicy,
    late_price_s: float = 0.0,
    hedge_ends_s: float = inf,
) -> bool:
    """Whether this one request is better off on the device than on the held arm, beside which no hedge can be afforded,
    or none that is in time: one that has answered at `hedge_ends_s`.

    The link's own statistics say whether the gain is worth the risk, with `late_price_s` for a late answer.
    """
    held, device = proposal.of(cost.arm), proposal.of(DEVICE_ARM)
    if held is None or device is None or cost.arm.link is None or held.excluded or device.excluded:
        return False
    if not seconds_alone(policy) or (policy.deadline_s is not None and device.predicted_s > policy.deadline_s):
        return False
    if held.predicted_s - held.link_s >= device.predicted_s:
        return False  # however fast the link is: that is for the switch to see
    price_s = late_price_s if held.predicted_s > WORTH_IT_RATIO * device.predicted_s else 0.0
    weighed = weighed_s(held, slower_way(cost, views), device.predicted_s, price_s, hedge_ends_s)
    return weighed > device.predicted_s


def safer(
    cost: ArmCost,
    proposal: Proposal,
    costs: Sequence[ArmCost],
    views: Mapping[str, LinkView],
    device_s: float,
    allowance_s: float,
    policy: SplitPolicy,
    late_price_s: float,
) -> tuple[Arm, str] | None:
    """The arm that this one request takes instead, and why, since it may well be late on that of `cost`.

    Where a hedge is affordable and would only be too late, an arm beside which it is in time; else the device.
    """
    covered = _affordable(cost, device_s, allowance_s)
    if covered and timely(cost, device_s):
        return None
    ends_s = hedge_ends_s(cost, device_s) if covered else inf
    if not outrun(cost, proposal, views, policy, late_price_s, ends_s):
        return None
    other = _in_time(costs, proposal, device_s, allowance_s)
    if other is not None:
        return other, f"a hedge beside {other} is in time"
    return DEVICE_ARM, f"{cost.arm} may well be later than the device"


def _in_time(costs: Sequence[ArmCost], proposal: Proposal, device_s: float, allowance_s: float) -> Arm | None:
    """The best link arm that is expected before the device, and beside which a hedge is in time and can be afforded."""
    sooner = [entry.arm for entry in proposal.ranking if not entry.excluded and entry.predicted_s < device_s]
    fit = {one.arm for one in costs if timely(one, device_s) and _affordable(one, device_s, allowance_s)}
    return next((arm for arm in sooner if arm.link and arm in fit), None)


def _affordable(cost: ArmCost, device_s: float, allowance_s: float) -> bool:
    return 0.0 < min(device_s, cost.goes_on_s) <= allowance_s


def ahead(
    held: Arm,
    costs: Sequence[ArmCost],
    proposal: Proposal,
    views: Mapping[str, LinkView],
    policy: SplitPolicy,
    late_price_s: float = 0.0,
) -> tuple[ArmCost, bool] | None:
    """The arm of a link that is better now than the held one, and whether that is sure without a hedge.

    late_price_s: what a late answer costs over its seconds; a hedge sees to it that none is.
    """
    if not seconds_alone(policy) or held == proposal.arm:
        return None
    now, device, best = proposal.of(held), proposal.of(DEVICE_ARM), proposal.of(proposal.arm)
    cost = next((cost for cost in costs if cost.arm == proposal.arm), None)
    if now is None or device is None or best is None or cost is None or best.excluded or best.arm.link is None:
        return None
    view = slower_way(cost, views)
    expected_s = weighed_s(best, view, device.predicted_s)
    if expected_s >= now.predicted_s * (1.0 - policy.ratio):
        return None
    return cost, weighed_s(best, view, device.predicted_s, late_price_s) < SURE_RATIO * now.predicted_s


def trial(name: str, costs: Sequence[ArmCost], device_s: float, policy: SplitPolicy) -> ArmCost | None:
    """The arm by which a link that failed is tried while the device runs: nearly all of the device is left to that."""
    target = exploration([cost for cost in costs if cost.arm.link == name], policy)
    if target is None or not target.loaded or target.device_s > TRIAL_RATIO * device_s:
        return None
    return target


def beside(
    costs: Sequence[ArmCost],
    proposal: Proposal,
    views: Mapping[str, LinkView],
    allowance_s: float,
    policy: SplitPolicy,
) -> ArmCost | None:
    """The arm that a request of the device's also takes, since the link may well be sooner and the allowance is there.

    Only one that leaves nearly all of the device to the run beside it, and only while the device is expected to be the
    best: a better link is for the switch to see.
    """
    if proposal.arm != DEVICE_ARM:
        return None
    device, device_cost = proposal.of(DEVICE_ARM), next((cost for cost in costs if cost.arm == DEVICE_ARM), None)
    if device is None or device_cost is None or device.excluded or not seconds_alone(policy):
        return None
    light = {cost.arm: cost for cost in costs if cost.arm.link and cost.device_s <= TRIAL_RATIO * device_cost.device_s}
    best = next((entry for entry in proposal.ranking if entry.arm in light and not entry.excluded), None)
    if best is None:
        return None
    cost = light[best.arm]
    return cost if worth_both(best, slower_way(cost, views), device.predicted_s, allowance_s) else None
