"""Answers that come later than the device's: what is owed for them, when it counts, and what it changes."""

from __future__ import annotations

from math import inf

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from netprobe.view import LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.decider import Decider, Decision
from split_models.hedge import hedge, parting, usual_s, weighed_s
from split_models.lateness import LATE_RATIO, LATE_SHARE, MOST_OWED, OWED_RUNS, Alone, Lateness
from split_models.planner import Ranked

CLOUD = Arm("cloud", link="cloud")
CUT = Arm("cut", "003", "int8", "cloud")
COSTS = (
    ArmCost(DEVICE_ARM, device_s=0.4),
    ArmCost(CLOUD, device_s=0.0, up_bytes=100_000, down_bytes=500, server_s=0.05),
    ArmCost(CUT, device_s=0.1, up_bytes=20_000, down_bytes=500, server_s=0.05),
)
STEADY = LinkView(0.01, 1e6, None, 10, 0.1, residuals=(1.0,) * 32)
SLOW = evolve(STEADY, bytes_per_s=2e5)
"""So slow that the cut is the best arm."""

FADING = evolve(STEADY, residuals=(1.0,) * 31 + (9.0,))
"""Late once in thirty-two: the mean is still far better than the device."""

NO_HEDGES = SplitPolicy(hedge_ratio=0.0)
SHUNNED = Lateness(link=Alone(2.0, 2.0, 1), device=Alone(1.0, 1.0, 1))
"""The link alone would have been the worse choice."""

seconds = st.floats(0.001, 100.0)
ratios = st.lists(st.floats(0.05, 50.0), max_size=32).map(tuple)


@given(st.lists(st.floats(0.0, 5.0), max_size=300))
def test_what_is_owed_is_bounded_and_never_a_credit(took: list[float]) -> None:
    account = SHUNNED
    for seconds_ in took:
        before, account = account.owed, account.answered(seconds_, 1.0)
        assert 0.0 <= account.owed <= MOST_OWED
        assert (account.owed > before) == (seconds_ > LATE_RATIO and before < MOST_OWED)
    assert account.price_s(1.0) == account.owed * OWED_RUNS


def test_a_late_answer_is_forgiven_after_as_many_as_may_be_late_once() -> None:
    account = SHUNNED.answered(1.3, 1.0)
    for _ in range(round(1 / LATE_SHARE) - 2):
        account = account.answered(0.2, 1.0)
    assert account.owed > 0.0
    assert account.answered(0.2, 1.0).answered(0.2, 1.0).owed == pytest.approx(0.0)


def test_an_answer_without_a_device_to_compare_with_is_not_late() -> None:
    assert SHUNNED.answered(9.0, 0.0) == SHUNNED.answered(9.0, inf) == SHUNNED


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=50))
def test_a_run_that_never_was_waits_for_those_before_and_no_longer_than_is_told(
    asked: list[tuple[float, float]],
) -> None:
    run = Alone()
    for run_s, gap_s in asked:
        before, run = run, run.asked(run_s, gap_s, 50.0)
        assert run.wait_s == min(50.0, max(0.0, before.wait_s - gap_s) + run_s)
        assert min(before.mean_s, run.wait_s) - 1e-9 <= run.mean_s <= max(before.mean_s, run.wait_s) + 1e-9


def test_a_link_alone_takes_what_its_transfers_took_and_not_what_was_predicted() -> None:
    """Predicted at half of the device's time; one in five takes nine times as long."""
    entry = Ranked(CLOUD, 0.2, 0.2, link_s=0.15)
    assert usual_s(entry, evolve(STEADY, residuals=())) == pytest.approx(0.2)
    assert usual_s(entry, STEADY) == pytest.approx(0.2, rel=0.05)
    holes = evolve(STEADY, residuals=((1.0,) * 4 + (9.0,)) * 6)
    assert usual_s(entry, holes) > 0.4 > weighed_s(entry, STEADY, 0.4)
    slower_now = evolve(holes, expected=((1.0,) * 4 + (2.0,)) * 6)
    assert usual_s(entry, slower_now) < 0.25, "no later than it was, where less was expected then"


def test_a_hole_of_the_link_counts_by_all_requests_that_would_have_waited() -> None:
    """Half as long as the device as a rule; one hole, and the link alone is the worse choice, with its queue."""
    account = Lateness()
    for number in range(60):
        account = account.asked(0.5, 1.0, 2.0 * number)
    late = evolve(account, owed=1.0)
    assert late.price_s(1.0) == 0.0, "its own late answers are the measure"
    nearly = evolve(late, link=Alone(0.98, 0.98, 60), device=Alone(1.0, 1.0, 60))
    assert nearly.price_s(1.0) == OWED_RUNS, "a link that is as quick as the device is no excuse for a tail"
    for number in range(60, 75):
        late = late.asked(2.0 * (number - 59), 1.0, 2.0 * number)
    assert late.price_s(1.0) == OWED_RUNS


@given(seconds, seconds, ratios, st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_a_price_never_makes_an_arm_dearer_than_its_late_answers(
    link_s: float, device_s: float, seen: tuple[float, ...], price_s: float, more_s: float
) -> None:
    entry, view = Ranked(CLOUD, link_s, link_s, link_s=link_s), evolve(STEADY, residuals=seen)
    free, dear = weighed_s(entry, view, device_s), weighed_s(entry, view, device_s, price_s)
    assert free <= dear <= free + price_s + 1e-9
    assert dear <= weighed_s(entry, view, device_s, price_s + more_s) + 1e-9


@given(seconds, seconds, ratios, st.floats(0.0, 10.0), st.floats(0.0, 1e3))
def test_a_price_never_makes_a_hedge_later(
    link_s: float, device_s: float, seen: tuple[float, ...], elapsed_s: float, price_s: float
) -> None:
    entry, device = Ranked(CLOUD, link_s, link_s, link_s=link_s), Ranked(DEVICE_ARM, device_s, device_s)
    view, policy = evolve(STEADY, residuals=seen), SplitPolicy()
    free = hedge(entry, device, view, elapsed_s, 2.0 * device_s, policy)
    dear = hedge(entry, device, view, elapsed_s, 2.0 * device_s, policy, late_price_s=price_s)
    assert dear.start_in_s <= free.start_in_s


def test_a_high_price_starts_the_device_in_time() -> None:
    entry, device = Ranked(CLOUD, 0.5, 0.5, link_s=0.5), Ranked(DEVICE_ARM, 1.0, 1.0)
    free = hedge(entry, device, FADING, 0.0, 2.0, SplitPolicy())
    dear = hedge(entry, device, FADING, 0.0, 2.0, SplitPolicy(), late_price_s=8.0)
    assert dear.start_in_s <= LATE_RATIO - 1.0 + 1e-9 < free.start_in_s


@given(st.none() | seconds, st.floats(0.0, 10.0), st.floats(0.01, 10.0), st.floats(0.0, 2.0))
def test_a_link_is_given_up_for_a_device_that_is_sooner_and_in_time(
    left_s: float | None, elapsed_s: float, device_s: float, allowance_s: float
) -> None:
    device = Ranked(DEVICE_ARM, device_s, device_s)
    found = parting(left_s, elapsed_s, device_s, device, allowance_s, 1.0, SplitPolicy())
    assert found is None or allowance_s < 1.0
    if found is not None and found.instead:
        assert left_s is not None
        assert left_s > device_s
        assert elapsed_s + left_s > LATE_RATIO * device_s
    if found is not None and not found.instead:
        assert elapsed_s + found.start_in_s + device_s == pytest.approx(LATE_RATIO * device_s)
    joules = SplitPolicy(objective={"seconds": 1.0, "joules": 1.0})
    assert parting(left_s, elapsed_s, device_s, device, 0.0, 1.0, joules) is None


def ask(decider: Decider, view: LinkView, now_s: float) -> Decision:
    return decider.decide(COSTS, {"cloud": view}, 0.0, NO_HEDGES, now_s)


def held_on_the_cut(lead_s: float = 0.0) -> Decider:
    """lead_s: for so long the link was slow at first, and would have been the worse choice."""
    decider, now_s = Decider(0.0), 0.0
    while now_s < lead_s:
        ask(decider, evolve(STEADY, bytes_per_s=1e3), now_s)
        decider.finished()
        now_s += 0.5
    while decider.held().arm != CUT:
        ask(decider, SLOW, now_s)
        decider.finished()
        now_s += 0.5
        assert now_s < lead_s + 10.0
    return decider


def test_after_late_answers_an_arm_must_promise_more_where_the_device_alone_is_the_better_choice() -> None:
    decider = held_on_the_cut(20.0)
    risky = evolve(FADING, bytes_per_s=1.5e5)
    decision = ask(decider, risky, 40.0)
    assert decision.arm == CUT, "one late transfer in thirty-two is worth its risk"
    for _ in range(int(MOST_OWED)):
        decider.took(decision, 41.0)
    found = ask(decider, risky, 41.0)
    assert (found.arm, decider.held().arm) == (DEVICE_ARM, CUT)
    assert "later than the device" in found.reason
    assert ask(decider, SLOW, 41.5).arm == CUT, "nothing speaks for a late answer"


def test_after_late_answers_nothing_changes_where_the_link_alone_is_the_better_choice() -> None:
    decider = held_on_the_cut()
    risky = evolve(FADING, bytes_per_s=1.5e5)
    decision = ask(decider, risky, 40.0)
    for _ in range(int(MOST_OWED)):
        decider.took(decision, 41.0)
    assert ask(decider, risky, 41.0).arm == CUT


def test_a_request_takes_another_arm_of_the_link_that_is_twice_as_fast_and_the_held_one_stays() -> None:
    decider = held_on_the_cut()
    assert ask(decider, evolve(STEADY, bytes_per_s=1e6), 40.0).arm == CUT
    found = ask(decider, evolve(STEADY, floor_s=0.0, bytes_per_s=1e8), 40.1)
    assert (found.arm, found.left, decider.held().arm) == (CLOUD, None, CUT)
    assert "better now" in found.reason
