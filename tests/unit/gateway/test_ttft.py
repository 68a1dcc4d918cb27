"""Laws of TTFT distributions: windows, failures, censored races."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ttft import SERVER_PRIOR_S, Ecdf, TtftWindow, ecdf, rank

SECONDS = st.floats(0, 100, allow_nan=False) | st.just(inf)


@given(st.lists(SECONDS, min_size=1, max_size=60), st.floats(0, 1))
def test_a_quantile_is_the_least_value_that_keeps_its_share(values: list[float], ratio: float) -> None:
    found = ecdf(values)
    kept = sorted(values)[rank(ratio, len(values)) - 1]
    assert found.quantile_s(ratio) == kept
    if isfinite(kept):
        assert found.at(kept) >= ratio
    assert found.failed_ratio == pytest.approx(sum(not isfinite(v) for v in values) / len(values))


@given(st.lists(SECONDS, max_size=80), st.integers(1, 20), st.floats(0, 1), st.floats(0, 100))
def test_a_window_is_the_distribution_of_its_last_samples(
    values: list[float], limit: int, ratio: float, at_s: float
) -> None:
    window = TtftWindow(limit)
    for value in values:
        window.add(value)
    kept = values[-limit:]
    assert window.samples == len(kept) == window.observed
    if kept:
        assert window.ecdf() == ecdf(kept)
        assert (window.at(at_s), window.quantile_s(ratio)) == (ecdf(kept).at(at_s), ecdf(kept).quantile_s(ratio))
        assert window.failed_ratio == ecdf(kept).failed_ratio


def test_each_real_sample_displaces_one_of_the_prior() -> None:
    window = TtftWindow(100, SERVER_PRIOR_S)
    assert (window.samples, window.observed, window.quantile_s(0.5)) == (8, 0, 0.7)
    for count in range(1, 9):
        window.add(20.0)
        assert (window.samples, window.observed) == (8, count)
    assert window.ecdf() == Ecdf((20.0,), (1.0,), 8)
    window.add(20.0)
    assert window.samples == 9


def test_a_race_that_the_device_won_says_only_that_the_server_took_longer() -> None:
    window = TtftWindow()
    for _ in range(50):
        window.outlasted(0.2)
        window.add(5.0)
    # All that is known of the first half is S > 0.2, and everything seen beyond that is 5 s.
    assert window.at(0.3) == 0.0
    assert window.ecdf().values_s == (5.0,)
    # As if the cancelled ones were plain samples, half of the mass would lie at 0.2 s.
    plain = ecdf([0.2] * 50 + [5.0] * 50)
    assert plain.at(0.3) == 0.5


def test_censored_samples_give_their_mass_to_what_came_later() -> None:
    window = TtftWindow()
    for value in (1.0, 2.0, 4.0):
        window.add(value)
    window.outlasted(3.0)
    # Kaplan-Meier by hand: 1 - 3/4, 1 - 3/4 * 2/3; the one at 3 leaves one at risk at 4.
    assert window.ecdf().at_most == pytest.approx((0.25, 0.5, 1.0))
    window.add(inf)
    assert window.ecdf().at_most == pytest.approx((0.2, 0.4, 0.7))
    assert window.ecdf().failed_ratio == pytest.approx(0.3)


@given(st.lists(st.tuples(SECONDS, st.booleans()), min_size=1, max_size=40))
def test_censoring_never_makes_a_server_look_quicker(samples: list[tuple[float, bool]]) -> None:
    window, plain = TtftWindow(), []
    for value, censored in samples:
        if censored and isfinite(value):
            window.outlasted(value)
        else:
            window.add(value)
        plain.append(value)
    shares = window.ecdf().at_most
    assert all(0 <= a <= b <= 1 + 1e-9 for a, b in pairwise(shares))
    taken = ecdf(plain)
    assert all(window.at(value) <= taken.at(value) + 1e-9 for value in plain if isfinite(value))


@given(st.lists(SECONDS, min_size=1, max_size=30), st.floats(0, 120))
def test_the_mean_within_a_bound_is_that_of_the_samples(values: list[float], bound_s: float) -> None:
    expected = sum(min(value, bound_s) for value in values) / len(values)
    assert ecdf(values).mean_within_s(bound_s) == pytest.approx(expected, abs=1e-9)
