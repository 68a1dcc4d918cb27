"""One request on the device for a held arm whose link may well be later: when, and when not."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from attrs import evolve

from netprobe.view import LinkView
from protocol.events import TransferSample
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.decider import Decider, Decision
from split_models.detours import safer
from split_models.planner import propose

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


def fled(policy: SplitPolicy) -> Decider:
    """The cloud was held, and failed: requests are the device's now."""
    decider = held_on_the_cloud(policy)
    decider.failed("cloud", "link slow", 9.9)
    ask(decider, STEADY, evolve(policy, hedge_ratio=0.0), 10.0)
    assert decider.held().arm == DEVICE_ARM
    return decider


HEDGES = SplitPolicy(hedge_ratio=1.0)


def test_a_link_that_was_left_is_tried_beside_the_device_at_ever_longer_distances() -> None:
    decider, found = fled(HEDGES), []
    for number in range(30):
        decision = ask(decider, STEADY, HEDGES, 10.1 + number)
        found.append(decision.tries)
        assert decision.arm == (CLOUD if decision.tries else DEVICE_ARM)
        if decision.tries:
            assert decider.hedge(decision, {"cloud": STEADY}, 10.1 + number, HEDGES).start_in_s == 0.0
            assert decider.patience_s(decision, 7.0) == 7.0, "the device runs beside it: nothing is waited for"
            assert decider.held().arm == DEVICE_ARM
    places = [number for number, tried in enumerate(found) if tried]
    distances = [b - a for a, b in pairwise(places)]
    assert places[0] == 0
    assert distances == sorted(distances)
    assert 1 < distances[-1] <= HEDGES.explore_one_in


def test_a_link_that_was_left_is_tried_the_more_often_the_larger_the_allowance() -> None:
    counts = []
    for ratio in (0.2, 0.4, 1.0):
        policy = SplitPolicy(hedge_ratio=ratio)
        decider = fled(policy)
        counts.append(sum(ask(decider, STEADY, policy, 10.1 + number).tries for number in range(40)))
    assert counts[0] < counts[-1]
    assert counts == sorted(counts)


def test_what_the_allowance_does_not_pay_for_is_not_tried() -> None:
    assert not any(ask(fled(NO_HEDGES), STEADY, NO_HEDGES, 10.1 + number).tries for number in range(20))
    decider = fled(HEDGES)
    decider.close("cloud", 100.0, "busy")
    assert not any(ask(decider, STEADY, HEDGES, 10.1 + number).tries for number in range(20))
    never = evolve(HEDGES, explore_one_in=0)
    assert not ask(fled(HEDGES), STEADY, never, 10.1).tries


def test_an_arm_that_needs_the_device_too_is_not_tried_beside_it() -> None:
    cut = ArmCost(Arm("cut", "003", "int8", "cloud"), device_s=0.2, up_bytes=1_000, down_bytes=500, server_s=0.05)
    decider = fled(HEDGES)
    assert not any(
        decider.decide((COSTS[0], cut), {"cloud": STEADY}, 0.0, HEDGES, 10.1 + number).tries for number in range(20)
    )


def test_requests_return_to_a_link_that_answers_again_before_the_switch_does() -> None:
    decider = fled(HEDGES)
    decider.answered("cloud")
    found = ask(decider, STEADY, HEDGES, 10.1)
    assert (found.arm, found.left, decider.held().arm) == (CLOUD, None, DEVICE_ARM)
    assert "better now" in found.reason


def test_without_a_hedge_only_a_link_that_is_much_better_is_believed() -> None:
    decider = fled(NO_HEDGES)
    decider.answered("cloud")
    assert ask(decider, evolve(STEADY, bytes_per_s=5e5), NO_HEDGES, 10.1).arm == DEVICE_ARM
    assert ask(decider, STEADY, NO_HEDGES, 10.2).arm == CLOUD


def test_a_first_switch_to_a_link_waits_its_periods() -> None:
    decider = Decider(0.0)
    assert ask(decider, STEADY, HEDGES, 0.1).arm == DEVICE_ARM


def on_the_device(view: LinkView, policy: SplitPolicy) -> Decider:
    """The device is held while the link is slower by far; the allowance is saved."""
    decider = Decider(0.0)
    for number in range(8):
        decider.decide(COSTS, {"cloud": evolve(view, residuals=(1.0,) * 32)}, 0.0, policy, 0.5 * number)
        decider.finished()
    assert decider.held().arm == DEVICE_ARM
    return decider


MOODY = evolve(STEADY, bytes_per_s=2e5, residuals=(1.0,) * 16 + (0.2,) * 16)
"""Slower than the device as a rule, and often much faster."""


def test_the_devices_requests_also_take_a_link_that_may_well_be_sooner() -> None:
    decider = on_the_device(MOODY, HEDGES)
    found = ask(decider, MOODY, HEDGES, 10.0)
    assert (found.arm, found.tries, decider.held().arm) == (CLOUD, True, DEVICE_ARM)
    assert decider.hedge(found, {"cloud": MOODY}, 10.0, HEDGES).start_in_s == 0.0, "the device loses no time by it"
    assert ask(decider, evolve(MOODY, residuals=(1.0,) * 32), HEDGES, 10.1).arm == DEVICE_ARM


def test_both_at_once_keeps_to_the_allowance_and_to_seconds() -> None:
    assert ask(on_the_device(MOODY, NO_HEDGES), MOODY, NO_HEDGES, 10.0).arm == DEVICE_ARM
    joules = SplitPolicy(hedge_ratio=1.0, objective={"seconds": 1.0, "joules": 0.01})
    assert ask(on_the_device(MOODY, joules), MOODY, joules, 10.0).arm == DEVICE_ARM
    busy = on_the_device(MOODY, HEDGES)
    looked = busy.decide(COSTS, {"cloud": MOODY}, 0.0, HEDGES, 10.0, looking=("cloud",))
    assert looked.arm == DEVICE_ARM, "it would stand in line behind the look"


def moving(began_s: float, now_s: float, moved_bytes: int, rate: float) -> LinkView:
    sample = TransferSample(
        at_s=now_s, link="cloud", direction="up", size_bytes=100_000, seconds=now_s - began_s, complete=False,
        moved_bytes=moved_bytes,
    )  # fmt: skip
    return evolve(STEADY, bytes_per_s=rate, under_way=sample)


def test_without_an_allowance_a_transfer_that_needs_longer_than_the_device_is_given_up() -> None:
    decider = held_on_the_cloud(NO_HEDGES)
    decision = ask(decider, STEADY, NO_HEDGES, 10.0)
    good = decider.hedge(decision, {"cloud": moving(10.0, 10.05, 50_000, 1e6)}, 10.05, NO_HEDGES)
    assert not good.instead
    assert good.start_in_s == pytest.approx(0.03), "asked again when the device is about to be late too"
    kept = decider.hedge(decision, {"cloud": moving(10.0, 10.08, 70_000, 1e6)}, 10.08, NO_HEDGES)
    assert (kept.instead, kept.start_in_s) == (False, inf)
    young = decider.hedge(decision, {"cloud": moving(10.0, 10.02, 0, 1e4)}, 10.02, NO_HEDGES)
    assert not young.instead, "a start says little"
    last = decider.hedge(decision, {"cloud": moving(10.0, 10.08, 0, 1e5)}, 10.08, NO_HEDGES)
    assert (last.instead, last.start_in_s) == (True, 0.0), "the last moment for a device that is to be in time"
    stalled = decider.hedge(decision, {"cloud": moving(10.0, 10.3, 20_000, 1e5)}, 10.3, NO_HEDGES)
    assert (stalled.instead, stalled.start_in_s, stalled.run_s) == (True, 0.0, 0.0)
    rich = held_on_the_cloud(HEDGES)
    decision = ask(rich, STEADY, HEDGES, 10.0)
    hedged = rich.hedge(decision, {"cloud": moving(10.0, 10.3, 20_000, 1e5)}, 10.3, HEDGES)
    assert not hedged.instead, "both run where that can be paid for"


def test_an_arm_is_waited_for_longer_where_the_device_is_slow() -> None:
    decider = held_on_the_cloud(NO_HEDGES)
    slow = (evolve(COSTS[0], device_s=3.0), COSTS[1])
    decision = decider.decide(slow, {"cloud": STEADY}, 0.0, NO_HEDGES, 10.0)
    predicted = decision.proposal.of(CLOUD)
    assert predicted is not None
    assert decider.patience_s(decision, 30.0) == pytest.approx(predicted.predicted_s + 6.0)


def test_an_arm_beside_which_a_hedge_would_be_late_yields_to_one_beside_which_it_is_in_time() -> None:
    heavy = ArmCost(
        Arm("cut", "003", "int8", "cloud"), 0.2, up_bytes=30_000, down_bytes=500, server_s=0.02, rest_s=0.35
    )
    costs, allowance_s, device_s = (*COSTS, heavy), 1.0, 0.4
    wild = evolve(STEADY, residuals=(1.0,) * 28 + (12.0,) * 4)
    views, policy = {"cloud": wild}, SplitPolicy(hedge_ratio=1.0)
    proposal = propose(costs, views, 0.0, policy)
    found = safer(heavy, proposal, costs, views, device_s, allowance_s, policy, 4.0)
    assert found is not None
    assert found[0] == CLOUD
    assert safer(COSTS[1], proposal, costs, views, device_s, allowance_s, policy, 4.0) is None
    alone = safer(heavy, proposal, (COSTS[0], heavy), views, device_s, allowance_s, policy, 4.0)
    assert alone is not None
    assert alone[0] == DEVICE_ARM
    assert safer(heavy, proposal, costs, views, device_s, allowance_s, policy, 0.0) is None, "late answers cost nothing"
