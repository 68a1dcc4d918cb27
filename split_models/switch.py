"""Pure: keep the held arm until another one has been better by the policy's ratio for the policy's periods."""

from __future__ import annotations

from attrs import evolve, frozen

from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm
from split_models.planner import Proposal, Ranked

FAR_WORSE_RATIO = 2.0
FAR_WORSE_S = 0.5
"""An arm behind a link that the device beats by both is left at once: no noise explains that much, and each further
period would cost a request as long."""


@frozen
class Held:
    """The arm in use; `better` has beaten it for `periods` sampling periods in a row. `reason`: of the last switch."""

    arm: Arm = DEVICE_ARM
    better: Arm | None = None
    periods: int = 0
    reason: str = ""


def hold(held: Held, proposal: Proposal, policy: SplitPolicy, *, covered: bool = False) -> Held:
    """One call per sampling period. covered: a hedge can answer in time if the held arm's link does not.

    An arm that may not be used any more (forbidden, its link dead, unloaded) or whose link became very slow is left at
    once. An arm that began to be
    better stays the candidate while it is better, so that two near-equal candidates cannot starve each other.
    """
    current = proposal.of(held.arm)
    if current is None or current.excluded:
        why = current.excluded if current else "no longer on offer"
        return _switched(held, proposal.arm, f"{held.arm}: {why}")
    device = proposal.of(DEVICE_ARM)
    if device is not None and not covered and _far_worse(current, device):
        why = f"slow: {current.predicted_s:.2f} s, device {device.predicted_s:.2f} s"
        return _switched(held, proposal.arm, f"{held.arm}: {why}")
    candidate = _candidate(held, current, proposal, policy)
    if candidate is None:
        return evolve(held, better=None, periods=0)
    periods = held.periods + 1 if candidate.arm == held.better else 1
    if periods < policy.periods:
        return evolve(held, better=candidate.arm, periods=periods)
    gain = 1.0 - candidate.objective / current.objective
    return _switched(held, candidate.arm, f"{candidate.arm} better by {gain:.0%} for {periods} periods")


def _candidate(held: Held, current: Ranked, proposal: Proposal, policy: SplitPolicy) -> Ranked | None:
    for arm in (held.better, proposal.arm):
        entry = proposal.of(arm) if arm is not None else None
        if entry is not None and not entry.excluded and _beats(entry, current, policy):
            return entry
    return None


def _beats(entry: Ranked, current: Ranked, policy: SplitPolicy) -> bool:
    late = policy.deadline_s is not None and entry.predicted_s > policy.deadline_s >= current.predicted_s
    return entry.arm != current.arm and not late and entry.objective < current.objective * (1.0 - policy.ratio)


def _far_worse(current: Ranked, device: Ranked) -> bool:
    if current.arm.link is None or device.excluded or device.objective >= current.objective:
        return False
    margin_s = current.predicted_s - device.predicted_s
    return margin_s > FAR_WORSE_S and current.predicted_s > FAR_WORSE_RATIO * device.predicted_s


def _switched(held: Held, arm: Arm, reason: str) -> Held:
    return Held(arm=arm, reason=reason if arm != held.arm else held.reason)
