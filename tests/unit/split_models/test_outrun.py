"""One request on the device for a held arm whose link may well be later: when, and when not."""

from __future__ import annotations

from attrs import evolve

from netprobe.view import LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.decider import Decider, Decision

CLOUD = Arm("cloud", link="cloud")
COSTS = (
    ArmCost(DEVICE_ARM, device_s=0.4, joules=2.0),
    ArmCost(CLOUD, device_s=0.0, up_bytes=100_000, down_bytes=500, server_s=0.05),
)
STEADY = LinkView(0.01, 1e6, None, 10, 0.1, residuals=(1.0,) * 32)
WILD = evolve(STEADY, bytes_per_s=4e5, residuals=(1.0,) * 20 + (6.0,) * 12)
NO_HEDGES = SplitPolicy(hedge_ratio=0.0)


def held_on_the_cloud(policy: SplitPolicy) -> Decider:
    decider, now_s = Decider(0.0), 0.0
    while decider.held().arm != CLOUD:
        ask(decider, STEADY, policy, now_s)
        decider.finished()
        now_s += policy.period_s
        assert now_s < 10.0
    return decider


def ask(decider: Decider, view: LinkView, policy: SplitPolicy, now_s: float) -> Decision:
    return decider.decide(COSTS, {"cloud": view}, 0.0, policy, now_s)


def test_without_an_allowance_a_wild_link_yields_to_the_device_and_stays_held() -> None:
    decider = held_on_the_cloud(NO_HEDGES)
    assert ask(decider, STEADY, NO_HEDGES, 10.0).arm == CLOUD
    found = ask(decider, WILD, NO_HEDGES, 10.1)
    assert (found.arm, found.left, decider.held().arm) == (DEVICE_ARM, None, CLOUD)
    assert "later than the device" in found.reason
    assert ask(decider, STEADY, NO_HEDGES, 10.2).arm == CLOUD


def test_a_hedge_that_can_be_afforded_bounds_the_risk() -> None:
    policy = SplitPolicy(hedge_ratio=1.0)
    assert ask(held_on_the_cloud(policy), WILD, policy, 10.0).arm == CLOUD


def test_where_joules_count_the_slower_arm_may_be_the_better_one() -> None:
    policy = SplitPolicy(hedge_ratio=0.0, objective={"seconds": 1.0, "joules": 1.0})
    assert ask(held_on_the_cloud(policy), WILD, policy, 10.0).arm == CLOUD


def test_a_link_nobody_has_measured_twice_is_taken_at_its_word() -> None:
    decider = held_on_the_cloud(NO_HEDGES)
    assert ask(decider, evolve(WILD, residuals=()), NO_HEDGES, 10.0).arm == CLOUD


def test_a_device_that_would_miss_the_deadline_is_no_way_out() -> None:
    decider = held_on_the_cloud(NO_HEDGES)
    hurried = evolve(NO_HEDGES, deadline_s=0.35)
    assert ask(decider, WILD, hurried, 10.0).arm == CLOUD
