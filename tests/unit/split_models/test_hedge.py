"""The laws of hedging: what it never does, when it starts at once, and that it keeps to its allowance."""

from __future__ import annotations

from math import inf, isfinite

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from netprobe.view import LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm
from split_models.hedge import MOST_RUNS, PRIOR_RATIOS, Hedge, HedgeBudget, hedge, instead, weighed_s, worth_both
from split_models.planner import Ranked

CLOUD = Arm("cloud", link="cloud")
POLICY = SplitPolicy(hedge_ratio=0.25)
RICH_S = 1e6

seconds = st.floats(0.001, 100.0)
ratios = st.lists(st.floats(0.05, 50.0), max_size=32).map(tuple)


def link_arm(link_s: float, steady_s: float = 0.02) -> Ranked:
    return Ranked(CLOUD, link_s + steady_s, link_s + steady_s, link_s=link_s)


def device_arm(device_s: float) -> Ranked:
    return Ranked(DEVICE_ARM, device_s, device_s)


def view(residuals: tuple[float, ...] = ()) -> LinkView:
    return LinkView(0.01, 1e6, None, len(residuals), 0.1, residuals=residuals)


def ask(
    link_s: float, device_s: float, residuals: tuple[float, ...], elapsed_s: float, allowance_s: float = RICH_S
) -> Hedge:
    return hedge(link_arm(link_s), device_arm(device_s), view(residuals), elapsed_s, allowance_s, POLICY)


@given(seconds, seconds, ratios, st.floats(0.0, 100.0), st.floats(0.0, 1e4))
def test_the_device_arm_is_never_hedged(
    one_s: float, other_s: float, residuals: tuple[float, ...], elapsed_s: float, allowance_s: float
) -> None:
    found = hedge(device_arm(one_s), device_arm(other_s), view(residuals), elapsed_s, allowance_s, POLICY)
    assert found.start_in_s == inf


@given(seconds, seconds, ratios, st.floats(0.0, 100.0), st.floats(0.0, 1e4))
def test_without_a_budget_nothing_is_hedged(
    link_s: float, device_s: float, residuals: tuple[float, ...], elapsed_s: float, allowance_s: float
) -> None:
    off = evolve(POLICY, hedge_ratio=0.0)
    asked = hedge(link_arm(link_s), device_arm(device_s), view(residuals), elapsed_s, allowance_s, off)
    assert asked.start_in_s == inf
    assert HedgeBudget().requested(device_s, off).allowance_s(off) == 0.0


@given(seconds, seconds, ratios, st.floats(0.0, 100.0), st.floats(0.0, 0.999))
def test_a_start_must_fit_into_the_allowance(
    link_s: float, device_s: float, residuals: tuple[float, ...], elapsed_s: float, share: float
) -> None:
    assert ask(link_s, device_s, residuals, elapsed_s, share * device_s).start_in_s == inf


@given(
    st.floats(0.0, 1.0),
    st.lists(st.tuples(seconds, seconds, ratios, st.floats(0.0, 10.0)), min_size=1, max_size=60),
)
def test_started_seconds_never_pass_the_share_of_a_device_only_run(
    share: float, requests: list[tuple[float, float, tuple[float, ...], float]]
) -> None:
    policy = evolve(POLICY, hedge_ratio=share)
    budget = HedgeBudget()
    for link_s, device_s, residuals, elapsed_s in requests:
        budget = budget.requested(device_s, policy)
        allowance_s = budget.allowance_s(policy)
        found = hedge(link_arm(link_s), device_arm(device_s), view(residuals), elapsed_s, allowance_s, policy)
        if isfinite(found.start_in_s):
            budget = budget.started(device_s)
        assert budget.hedged_s <= share * budget.device_only_s + 1e-9


def test_what_was_not_spent_lapses_but_for_a_few_runs() -> None:
    """Ten thousand requests that the device answered leave no two and a half thousand hedges for a steady link."""
    budget = HedgeBudget()
    for _ in range(10_000):
        budget = budget.requested(0.1, POLICY)
    assert budget.allowance_s(POLICY) == pytest.approx(MOST_RUNS * 0.1)
    hedges, later = 0, 1000
    for _ in range(later):
        budget = budget.requested(0.1, POLICY)
        if budget.allowance_s(POLICY) >= 0.1:
            hedges, budget = hedges + 1, budget.started(0.1)
    assert 0.9 * POLICY.hedge_ratio * later <= hedges <= POLICY.hedge_ratio * later + MOST_RUNS
    assert budget.requested(0.0, POLICY).saved_s == budget.saved_s, "a request without a device arm takes nothing away"


def test_a_smaller_share_bounds_what_was_saved_under_a_larger_one() -> None:
    budget = HedgeBudget()
    for _ in range(8):
        budget = budget.requested(0.1, evolve(POLICY, hedge_ratio=1.0))
    assert budget.allowance_s(evolve(POLICY, hedge_ratio=0.1)) == pytest.approx(0.08)


@given(seconds, seconds, ratios, st.floats(0.0, 10.0), st.floats(0.01, 1.0))
def test_a_shorter_run_never_starts_later(
    link_s: float, device_s: float, residuals: tuple[float, ...], elapsed_s: float, share: float
) -> None:
    """A tail that goes on from a head needs less of the device, and answers sooner, than the whole model would."""
    entry, device, seen = link_arm(link_s), device_arm(device_s), view(residuals)
    whole = hedge(entry, device, seen, elapsed_s, RICH_S, POLICY)
    run_s = share * device_s
    rest = hedge(entry, device, seen, elapsed_s, RICH_S, POLICY, run_s, answers_s=run_s)
    assert rest.start_in_s <= whole.start_in_s + 1e-9 or rest.start_in_s < device_s
    assert isfinite(rest.start_in_s) or not isfinite(whole.start_in_s)
    assert not isfinite(rest.start_in_s) or rest.run_s == run_s


def test_a_tail_fits_into_an_allowance_that_the_whole_model_does_not() -> None:
    entry, device = link_arm(5.0), device_arm(0.4)
    assert hedge(entry, device, view((9.0,) * 8), 0.1, 0.2, POLICY).start_in_s == inf
    assert hedge(entry, device, view((9.0,) * 8), 0.1, 0.2, POLICY, 0.15, answers_s=0.15).start_in_s < 1.0


@given(seconds, seconds, st.integers(1, 32), st.floats(0.0, 10.0))
def test_a_link_that_never_answered_is_hedged_at_once(
    link_s: float, device_s: float, count: int, elapsed_s: float
) -> None:
    assert ask(link_s, device_s, (inf,) * count, elapsed_s).start_in_s == 0.0
    assert ask(inf, device_s, (), elapsed_s).start_in_s == 0.0


@given(seconds, seconds, ratios, st.floats(0.0, 100.0), st.floats(0.0, 20.0), st.floats(0.1, 20.0))
def test_more_allowance_never_starts_the_device_later(
    link_s: float, device_s: float, residuals: tuple[float, ...], elapsed_s: float, runs: float, more: float
) -> None:
    poor = ask(link_s, device_s, residuals, elapsed_s, runs * device_s)
    rich = ask(link_s, device_s, residuals, elapsed_s, (runs + more) * device_s)
    assert rich.start_in_s <= poor.start_in_s


@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0), ratios)
def test_a_free_start_is_made_at_once(link_s: float, device_s: float, residuals: tuple[float, ...]) -> None:
    """With very much in hand a device run costs nothing, and two chances are never worse than one."""
    assert ask(link_s, device_s, residuals, 0.0, 1e9 * device_s).start_in_s == 0.0


def test_a_slow_device_waits_until_the_link_is_late() -> None:
    """A hole is noticed by what has not come: at first the link is waited for, then it no longer is."""
    steady = (0.9, 1.0, 1.1, 1.2) * 8
    early = ask(0.1, 1.0, steady, 0.0, 4.0)
    late = ask(0.1, 1.0, steady, 2.0, 4.0)
    assert early.start_in_s > 0.2
    assert late.start_in_s == 0.0


def test_a_link_with_a_long_tail_is_hedged_sooner() -> None:
    steady = ask(0.2, 0.4, (0.9, 1.0, 1.1, 1.2) * 8, 0.0, 2.0)
    wild = ask(0.2, 0.4, (0.5, 0.8, 1.0, 9.0) * 8, 0.0, 2.0)
    assert wild.start_in_s < steady.start_in_s


def test_the_wait_for_the_device_delays_its_answer_and_costs_no_allowance() -> None:
    waiting = hedge(link_arm(5.0), device_arm(1.5), view(), 4.0, 0.6, POLICY, 0.5)
    assert waiting.start_in_s < 0.1
    assert hedge(link_arm(5.0), device_arm(1.5), view(), 4.0, 0.4, POLICY, 0.5).start_in_s == inf


def test_joules_are_part_of_the_price() -> None:
    by_energy = evolve(POLICY, objective={"joules": 1.0})
    assert hedge(link_arm(1.0), device_arm(0.1), view(), 0.0, RICH_S, by_energy).start_in_s == inf
    mixed = evolve(POLICY, objective={"seconds": 1.0, "joules": 1.0})
    hungry = Ranked(DEVICE_ARM, 0.1, 0.1 + 500.0)
    assert hedge(link_arm(1.0), hungry, view((1.0,) * 32), 0.0, RICH_S, mixed).start_in_s == inf


@pytest.mark.parametrize("reason", ["not loaded", "link unknown: no transfer seen"])
def test_a_device_arm_that_may_not_be_used_is_not_started(reason: str) -> None:
    shut = evolve(device_arm(0.1), excluded=reason)
    assert hedge(link_arm(5.0), shut, view(), 0.0, RICH_S, POLICY).start_in_s == inf


@given(st.floats(0.0, 1.0), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=60))
def test_what_a_stopped_hedge_gives_back_never_breaks_the_share(
    share: float, requests: list[tuple[float, float]]
) -> None:
    policy, budget, used_s = evolve(POLICY, hedge_ratio=share), HedgeBudget(), 0.0
    for device_s, ran_s in requests:
        budget = budget.requested(device_s, policy)
        if budget.allowance_s(policy) >= device_s:
            budget = budget.started(device_s)
            assert budget.hedged_s <= share * budget.device_only_s + 1e-9
            budget = budget.over(device_s, ran_s)
            used_s += min(ran_s, device_s)
    assert budget.hedged_s == pytest.approx(used_s)
    assert budget.hedged_s <= share * budget.device_only_s + 1e-9


@given(seconds, seconds, ratios, st.floats(0.0, 100.0), st.floats(1.0, 20.0))
def test_runs_that_can_be_stopped_are_never_started_later(
    link_s: float, device_s: float, residuals: tuple[float, ...], elapsed_s: float, runs: float
) -> None:
    def found(stoppable: bool) -> Hedge:
        device, allowance_s = device_arm(device_s), runs * device_s
        return hedge(link_arm(link_s), device, view(residuals), elapsed_s, allowance_s, POLICY, stoppable=stoppable)

    assert found(True).start_in_s <= found(False).start_in_s


def test_what_is_seen_of_the_transfer_under_way_moves_the_start() -> None:
    steady = (0.9, 1.0, 1.1, 1.2) * 8
    entry, device = link_arm(0.5), device_arm(0.3)

    def start_s(elapsed_s: float, left_s: float | None) -> float:
        found = hedge(entry, device, view(steady), elapsed_s, 1.0, POLICY, left_s=left_s, stoppable=True)
        return found.start_in_s

    assert start_s(0.3, None) > start_s(0.3, 5.0) == start_s(0.3, inf) == 0.0
    assert start_s(0.9, None) == 0.0 < start_s(0.9, 0.05), "late, and all but here"


def test_an_arm_is_weighed_by_what_its_link_does_and_by_what_is_later_than_the_device() -> None:
    entry = link_arm(0.5, 0.0)
    assert weighed_s(entry, view(), 0.6) == pytest.approx(0.5)
    steady, wild = view((1.0,) * 32), view((1.0,) * 24 + (8.0,) * 8)
    assert weighed_s(entry, steady, 0.6) < 0.6 < weighed_s(entry, wild, 0.6)
    assert weighed_s(entry, wild, 4.0) == pytest.approx(0.5 * (24 + 8 * 8 + sum(PRIOR_RATIOS)) / 35), "no regret"


@given(seconds, seconds, ratios)
def test_what_is_very_late_costs_a_run_of_the_device_more_than_predicted(
    link_s: float, device_s: float, seen: tuple[float, ...]
) -> None:
    entry = link_arm(link_s)
    found = weighed_s(entry, view((*seen, inf)), device_s)
    most_s = entry.predicted_s + device_s
    assert isfinite(found)
    assert found <= most_s + 2.0 * max(0.0, most_s - device_s) + 1e-9


@given(seconds, seconds, ratios)
def test_what_the_link_is_likely_to_do_now_goes_before_what_it_did(
    link_s: float, device_s: float, seen: tuple[float, ...]
) -> None:
    entry = link_arm(link_s)
    now = evolve(view((*seen, 50.0)), likely=(*seen, 1.0))
    assert weighed_s(entry, now, device_s) == weighed_s(entry, view((*seen, 1.0)), device_s)


@given(seconds, seconds, ratios, st.floats(0.0, 16.0))
def test_both_at_once_never_costs_more_than_the_allowance_and_pays_the_more_the_more_there_is(
    link_s: float, device_s: float, seen: tuple[float, ...], runs: float
) -> None:
    entry = link_arm(link_s)
    worth = worth_both(entry, view(seen), device_s, runs * device_s)
    assert not (worth and runs < 1.0)
    assert not worth or worth_both(entry, view(seen), device_s, 2.0 * runs * device_s)


def test_both_at_once_are_worth_it_where_the_link_may_well_be_much_sooner() -> None:
    slow, wild = (1.0,) * 32, (1.0,) * 16 + (0.1,) * 16
    assert worth_both(link_arm(0.5), view(wild), 0.4, 4.0)
    assert not worth_both(link_arm(0.5), view(slow), 0.4, 4.0)
    assert not worth_both(link_arm(inf), view(wild), 0.4, 4.0)


@given(seconds, seconds, st.floats(0.0, 10.0))
def test_a_transfer_is_given_up_only_for_a_sooner_device_and_where_no_hedge_can_be_afforded(
    left_s: float, answers_s: float, allowance_s: float
) -> None:
    assert instead(left_s, answers_s, allowance_s, 1.0, POLICY) == (allowance_s < 1.0 and left_s > answers_s)
    assert not instead(None, answers_s, 0.0, 1.0, POLICY), "nothing tells how far it is"
    joules = evolve(POLICY, objective={"seconds": 1.0, "joules": 1.0})
    assert not instead(left_s, answers_s, 0.0, 1.0, joules)
