"""The estimator benchmark without traces: its data, its rivals, and what it must show."""

from __future__ import annotations

import random

import pytest

from benchmarks.estimator import Errors, late, least_squares, mean_rate, mixed, offset
from benchmarks.transfers import Transfer, interleaved, moving_s, sent_over, sessions

EXACT = [Transfer(size, 0.1 + size / 1e6, 0.0) for size in (10_000, 200_000, 50_000)]


def test_the_rivals_are_what_their_names_say() -> None:
    assert least_squares(EXACT, 400_000) == pytest.approx(0.5)
    assert offset(EXACT, 10_000) >= 0.11
    flat = [Transfer(100, 1.0, 0.0), Transfer(300, 1.0, 0.0)]
    assert mean_rate(flat, 400) == pytest.approx(2.0)


def test_interleaving_keeps_the_order_of_both_sessions() -> None:
    pairs, real = sessions(None)
    small, large = pairs["wifi-weak"][0]
    assert not real
    for chance in (None, random.Random(3)):
        sizes = [t.size_bytes for t in interleaved(small, large, chance)]
        left = iter(sizes)
        assert all(t.size_bytes in left for t in small[:100])
    assert len(interleaved(small, large, random.Random(3))) == len(small) + len(large)


def test_a_transfer_over_a_trace_waits_through_its_holes() -> None:
    rates = [100.0, 0.0, 50.0]
    assert moving_s(rates, 0.5, 50) == pytest.approx(0.5)
    assert moving_s(rates, 0.5, 75) == pytest.approx(2.0)
    begun = [t.at_s - t.seconds for t in sent_over(rates, 1.0, (10,), 0.05)]
    assert begun == pytest.approx([0.0, 1.0, 2.2])


def test_where_sizes_change_ours_beats_the_mean_of_rates() -> None:
    pairs, _ = sessions(None)
    errors: Errors = mixed(pairs["wifi-strong"][:1])
    assert len(errors.jumps["ours"]) >= 200
    assert errors.median_of("ours") < 0.5 * errors.median_of("plain_mean")


def test_bytes_that_moved_tell_the_end_of_a_late_transfer_better_than_its_age() -> None:
    keys = late(None, quick=True)
    assert 0 < keys["lte_late_error_ratio_moved"] < 0.5 * keys["lte_late_error_ratio_age"]
    assert keys["lte_late_p90_error_ratio_moved"] < keys["lte_late_p90_error_ratio_age"]
