"""Laws of dispatch plans: the budget is met and never passed, phases in order, two paths with the same result."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch_arrays import table_of_arrays
from gateway.dispatch_lengths import MAX_TOKENS, PROMPT_PRIOR_TOKENS, LengthHistory
from gateway.dispatch_table import EVERY_LENGTH, Regime, device_table, make_table, server_table, spent_ratio
from gateway.ttft import Ecdf, ecdf

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=60)
TTFTS = st.lists(st.floats(0.001, 80) | st.sampled_from([0.5, 0.5, inf]), min_size=1, max_size=60)
RATIO = st.floats(0, 1)
REGIMES = st.sampled_from(["device_constrained", "server_constrained"])


def history(lengths: list[int], limit: int = 1000) -> LengthHistory:
    found = LengthHistory(limit, ())
    for length in lengths:
        found.add(length)
    return found


def to_come(server: Ecdf) -> Ecdf:
    """The distribution of the next sample: every gap between n samples is as likely, and the one beyond the last."""
    unseen = server.samples / (server.samples + 1)
    return Ecdf(server.values_s, tuple(share * unseen for share in server.at_most), server.samples)


@given(st.lists(st.integers(-5, 300), max_size=120), st.integers(1, 40))
def test_a_history_sums_the_tokens_of_its_last_prompts(lengths: list[int], limit: int) -> None:
    found = history(lengths, limit)
    kept = [max(0, length) for length in lengths[-limit:]]
    assert (len(found), found.total_tokens) == (len(kept), sum(kept))
    assert dict(found.counts()) == dict(sorted(Counter(kept).items()))
    for tokens in range(0, sum(kept), max(1, sum(kept) // 7)):
        length, below, at = found.upto(tokens)
        assert below == sum(one for one in kept if one < length) <= tokens < below + at
        assert at == length * kept.count(length)


def test_a_history_starts_from_a_prior_and_bounds_lengths() -> None:
    found = LengthHistory()
    assert found.mean_tokens == sum(PROMPT_PRIOR_TOKENS) / len(PROMPT_PRIOR_TOKENS)
    for _ in PROMPT_PRIOR_TOKENS:
        found.add(1 << 40)
    assert dict(found.counts()) == {MAX_TOKENS: len(PROMPT_PRIOR_TOKENS)}
    with pytest.raises(ValueError, match="not within"):
        found.upto(found.total_tokens)


@given(LENGTHS, TTFTS, RATIO, RATIO, REGIMES)
def test_expected_spending_is_within_the_budget(
    lengths: list[int], ttfts: list[float], budget: float, tail: float, regime: Regime
) -> None:
    known, server = history(lengths), ecdf(ttfts)
    table = make_table(regime, known, server, budget, tail)
    assert spent_ratio(table, known.counts(), server) <= budget + 1e-9
    if sum(lengths):
        # For the request to come: nothing that could still buy a sooner token is left over.
        assert spent_ratio(table, known.counts(), to_come(server)) == pytest.approx(budget, abs=1e-9)


@given(LENGTHS, TTFTS, RATIO, RATIO, REGIMES)
def test_arrays_give_the_same_plan_to_the_bit(
    lengths: list[int], ttfts: list[float], budget: float, tail: float, regime: Regime
) -> None:
    numpy = pytest.importorskip("numpy")
    pure = make_table(regime, history(lengths), ecdf(ttfts), budget, tail)
    table, server = table_of_arrays(regime, numpy.array(lengths), numpy.array(ttfts), budget, tail)
    assert table == pure
    assert [server.at(one) for one in ttfts] == [ecdf(ttfts).at(one) for one in ttfts]


@given(LENGTHS, TTFTS, RATIO, RATIO)
def test_waits_grow_with_the_length_and_shrink_with_the_budget(
    lengths: list[int], ttfts: list[float], budget: float, tail_share: float
) -> None:
    known, server, tail = history(lengths), ecdf(ttfts), budget * tail_share
    table = device_table(known, server, budget, tail)
    waits = [table.device_wait_s(length, 0.5) for length in range(0, 501, 10)]
    assert waits == sorted(waits)
    richer = device_table(known, server, min(1.0, budget + 0.2), tail)
    assert all(richer.short(n, 0.5) or not table.short(n, 0.5) for n in range(0, 501, 10))


def test_the_tail_is_protected_first_and_the_rest_goes_to_short_prompts() -> None:
    known = history([10] * 10 + [90] * 10)
    server = ecdf([0.1 * k for k in range(1, 11)])
    only_tail = device_table(known, server, 2 / 11, 0.9)
    assert (only_tail.boundary_tokens, only_tail.protected_ratio) == (10, pytest.approx(1.0))
    assert only_tail.boundary_ratio == pytest.approx(0.0, abs=1e-9)
    # Of eleven gaps, two lie beyond the ninth of ten values.
    assert only_tail.tail_wait_s == pytest.approx(0.9)
    more = device_table(known, server, 2 / 11 + 0.1 * 9 / 11, 2 / 11)
    # 2/11 of all tokens at the tail; what is left buys a tenth of 1,000 tokens: the ten short prompts.
    assert (more.boundary_tokens, more.boundary_ratio) in ((90, pytest.approx(0.0, abs=1e-9)), (10, pytest.approx(1.0)))
    assert more.device_wait_s(9, 0.5) == 0.0
    assert more.device_wait_s(91, 0.5) == pytest.approx(0.9)


def test_ties_at_the_boundary_are_divided_by_chance_and_not_all_taken() -> None:
    known = history([40] * 100)
    table = server_table(known, 0.3)
    assert (table.boundary_tokens, table.boundary_ratio) == (40, pytest.approx(0.7))
    asked = sum(table.server_starts(40, draw / 1000) for draw in range(1000))
    assert asked == 300


@pytest.mark.parametrize(("budget", "waits"), [(0.0, inf), (1.0, 0.0)])
def test_no_budget_never_starts_the_device_and_a_full_one_always_does(budget: float, waits: float) -> None:
    table = device_table(history([10, 20, 30]), ecdf([0.1, 0.2, 3.0]), budget, 0.05)
    assert [table.device_wait_s(n, 0.3) for n in (1, 20, 900)] == [waits] * 3
    assert server_table(history([10, 20]), 0.0).boundary_tokens == EVERY_LENGTH
    assert server_table(history([10, 20]), 1.0).server_starts(10, 0.0)


def test_a_server_that_fails_more_than_the_budget_covers_is_backed_up_by_chance() -> None:
    known, server = history([10, 20, 30]), ecdf([0.2, 0.4] + [inf] * 8)
    table = device_table(known, server, 0.2, 0.05)
    assert (table.tail_wait_s, table.protected_ratio) == (0.4, pytest.approx(0.2 / (1 - 0.2 * 10 / 11)))
    assert spent_ratio(table, known.counts(), to_come(server)) == pytest.approx(0.2)
    # With enough budget every failure is covered, and what is left goes to short prompts.
    richer = device_table(known, server, 0.9, 0.05)
    assert richer.protected_ratio == 1.0
    assert richer.device_wait_s(10, 0.0) == 0.0


def test_without_any_sample_the_device_starts_at_once_within_the_budget() -> None:
    known = history([10] * 10)
    table = device_table(known, ecdf([]), 0.4, 0.05)
    assert sum(table.device_wait_s(10, draw / 100) == 0.0 for draw in range(100)) == 40
