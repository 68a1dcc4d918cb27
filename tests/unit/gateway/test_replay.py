"""Replays in virtual time: races, queues, cancels, and bounds that hold for every dispatch."""

from __future__ import annotations

import random
from math import inf

import pytest

from gateway.dispatch_table import Regime
from gateway.replay import (
    Asked,
    Recording,
    Speed,
    learnt,
    least_quantile_s,
    only,
    oracle_mean_s,
    quantile_s,
    replay,
    routed,
)
from protocol.policy import DispatchPolicy

DEVICE = Speed(100.0, 10.0, slots=1)


def recording(ttfts_s: list[float], gap_s: float = 1000.0, tokens: int = 100, device: Speed = DEVICE) -> Recording:
    return Recording([Asked(n * gap_s, tokens, 50) for n in range(len(ttfts_s))], ttfts_s, device)


def test_the_first_to_speak_wins_and_both_are_spent() -> None:
    seen: list[tuple[float, bool]] = []
    outcome = replay(
        recording([0.4, 3.0, inf]), lambda *_: (0.5, 0.0), lambda seconds, spoke: seen.append((seconds, spoke))
    )
    # Device: half a second of waiting and a second of prefill; it is not asked if the server spoke before.
    assert outcome.ttfts_s == [0.4, 1.5, 1.5]
    assert (outcome.device_asked, outcome.server_asked) == ([False, True, True], [True, True, True])
    assert outcome.device_won == [False, True, True]
    assert seen == [(0.4, True), (1.5, False), (1.5, False)]


def test_a_device_that_won_is_busy_and_one_that_lost_is_free_again() -> None:
    found = Recording([Asked(0.0, 100, 50), Asked(1.0, 100, 50), Asked(2.0, 100, 50)], [9.0, 9.0, 9.0], DEVICE)
    # 1 s of prefill, 5 s of decoding: the second begins at 6, the third at 12.
    assert only(found, device=True).ttfts_s == pytest.approx([1.0, 6.0, 11.0])
    quick = Recording(found.requests, [0.5, 9.0, 9.0], DEVICE)
    assert replay(quick, lambda number, *_: (0.0, 0.0 if number == 0 else inf)).ttfts_s == [0.5, 1.0, 6.0]
    two = Recording(found.requests, found.ttfts_s, Speed(100.0, 10.0, slots=2))
    assert only(two, device=True).ttfts_s == pytest.approx([1.0, 1.0, 5.0])


def test_a_server_that_is_asked_later_counts_from_then() -> None:
    outcome = replay(recording([0.2]), lambda *_: (inf, 3.0))
    assert outcome.ttfts_s == pytest.approx([3.2])
    slow = replay(recording([0.2], tokens=1000), lambda *_: (0.0, 3.0))
    assert (slow.ttfts_s, slow.device_won) == ([pytest.approx(3.2)], [False])


def test_one_side_alone_and_failures_that_are_given_up() -> None:
    found = recording([0.2, inf])
    assert only(found, device=False).ttfts_s == [0.2, 60.0]
    assert only(found, device=True).ttfts_s == [1.0, 1.0]


@pytest.mark.parametrize("regime", ["device_constrained", "server_constrained"])
@pytest.mark.parametrize("gap_s", [200.0, 12.0])
def test_ours_is_between_the_oracle_and_random_routing(regime: Regime, gap_s: float) -> None:
    draw = random.Random(7)
    lengths = [max(1, round(draw.lognormvariate(4.5, 1.0))) for _ in range(800)]
    ttfts_s = [draw.lognormvariate(-0.3, 0.9) if draw.random() > 0.01 else inf for _ in lengths]
    found = Recording([Asked(n * gap_s, tokens, 60) for n, tokens in enumerate(lengths)], ttfts_s, Speed(80.0, 15.0))
    for budget in (0.2, 0.6):
        draws = [draw.random() for _ in lengths]
        outcome, over = learnt(found, regime, DispatchPolicy(budget_ratio=budget), draws)
        assert over <= 1e-9
        spent = outcome.spent_ratio(found.requests, device=regime == "device_constrained")
        assert spent <= budget + 0.05
        other = routed(found, regime, max(budget, spent), [draw.random() for _ in lengths])
        mean_s = sum(outcome.ttfts_s) / len(lengths)
        assert oracle_mean_s(found, regime, max(budget, spent)) <= mean_s < sum(other.ttfts_s) / len(lengths)
        tail_s, random_tail_s = (quantile_s(sorted(one.ttfts_s), 0.99) for one in (outcome, other))
        assert least_quantile_s(found, 0.99, regime, max(budget, spent)) <= tail_s < random_tail_s


def test_no_budget_and_a_full_one() -> None:
    found = recording([5.0, 0.3, 2.0, 0.4], tokens=100)
    draws = [0.5] * 4
    for regime in ("device_constrained", "server_constrained"):
        none, _ = learnt(found, regime, DispatchPolicy(budget_ratio=0.0), draws)  # type: ignore[arg-type]
        device = regime == "device_constrained"
        assert none.spent_ratio(found.requests, device=device) == 0.0
        assert none.ttfts_s == only(found, device=not device).ttfts_s


def test_the_bound_on_a_quantile_pays_for_what_it_needs() -> None:
    # Device: 1 s each; the server is at once for all but one.
    found = recording([0.1] * 9 + [50.0], tokens=100)
    assert least_quantile_s(found, 1.0, "device_constrained", 0.0) == 50.0
    assert least_quantile_s(found, 1.0, "device_constrained", 0.1) == 1.0
    assert least_quantile_s(found, 0.8, "device_constrained", 0.0) == 0.1
    assert least_quantile_s(found, 1.0, "server_constrained", 0.5) == 1.0
    # One request in ten may be late: eight of nine others are paid for.
    assert least_quantile_s(found, 0.9, "server_constrained", 0.9) == 0.1
    assert least_quantile_s(found, 0.9, "server_constrained", 0.5) == 1.0
