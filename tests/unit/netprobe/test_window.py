"""The window's fit: exact without noise, bounded with it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netprobe.window import MANY, NOTHING, WINDOW, Pair, Window, fit, has_leverage

SIZES = st.lists(st.integers(2048, 50_000_000), min_size=2, max_size=WINDOW, unique=True)
PAIRS = st.lists(
    st.builds(
        Pair,
        size_bytes=st.integers(1, 1 << 40),
        seconds=st.floats(1e-9, 1e6, allow_nan=False),
        at_s=st.floats(0, 1e9, allow_nan=False),
    ),
    min_size=1,
    max_size=WINDOW,
)


def _on_line(sizes: list[int], floor_s: float, rate: float) -> list[Pair]:
    return [Pair(size, floor_s + size / rate, at_s=float(place)) for place, size in enumerate(sizes)]


@settings(max_examples=150)
@given(sizes=SIZES, floor_s=st.floats(0.001, 2.0), rate=st.floats(1e3, 1e8))
def test_floor_and_rate_are_recovered_exactly_without_noise(sizes: list[int], floor_s: float, rate: float) -> None:
    pairs = _on_line(sizes, floor_s, rate)
    line = fit(pairs)
    if has_leverage(pairs):
        for size in (2048, 1_000_000, 20_000_000):
            assert line.seconds_for(size) == pytest.approx(floor_s + size / rate, rel=1e-3, abs=1e-6)
    else:
        middle = sizes[0]
        assert line.seconds_for(middle) == pytest.approx(floor_s + middle / rate, rel=0.3)


@settings(max_examples=200)
@given(pairs=PAIRS, rtt_s=st.none() | st.floats(0, 100))
def test_fit_is_positive_finite_and_grows_with_size(pairs: list[Pair], rtt_s: float | None) -> None:
    line = fit(pairs, rtt_s)
    assert 0 <= line.floor_s <= sorted(pair.seconds for pair in pairs)[1 if len(pairs) >= MANY else 0]
    assert 0 < line.bytes_per_s < math.inf
    assert line.samples == len(pairs)
    assert line.seconds_for(10) <= line.seconds_for(10_000) <= line.seconds_for(10_000_000)


def test_equal_sizes_take_the_round_trip_as_floor() -> None:
    pairs = _on_line([100_000] * 5, 0.040, 1e6)
    assert fit(pairs, rtt_s=0.040).bytes_per_s == pytest.approx(1e6)
    assert fit(pairs).seconds_for(100_000) == pytest.approx(0.140)


def test_a_mean_of_rates_would_err_where_the_line_does_not() -> None:
    pairs = _on_line([10_000] * 9 + [1_000_000], 0.1, 1e6)
    mean_rate = sum(pair.size_bytes / pair.seconds for pair in pairs) / len(pairs)
    assert 1_000_000 / mean_rate > 4 * 1.1
    assert fit(pairs).seconds_for(1_000_000) == pytest.approx(1.1)


def test_one_stalled_transfer_among_ten_hardly_moves_the_line() -> None:
    pairs = _on_line([20_000, 60_000, 100_000, 140_000, 180_000, 220_000, 260_000, 300_000, 340_000], 0.02, 1e6)
    stalled = [*pairs[:4], Pair(160_000, 4.0, 9.0), *pairs[4:]]
    assert fit(stalled).seconds_for(200_000) == pytest.approx(0.22, rel=0.15)


def test_nothing_known_is_infinitely_slow() -> None:
    assert fit([]) is NOTHING
    assert NOTHING.seconds_for(1) == math.inf


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(20_000, 2_000_000), min_size=WINDOW, max_size=WINDOW, unique=True),
    floor_s=st.floats(0.0, 0.2),
    rate=st.floats(1e5, 1e7),
    place=st.integers(0, WINDOW - 2),
    factor=st.sampled_from([0.001, 0.01, 0.1, 10.0, 100.0, 1000.0]),
)
def test_one_outlier_moves_no_prediction_among_the_others_by_an_order_of_magnitude(
    sizes: list[int], floor_s: float, rate: float, place: int, factor: float
) -> None:
    pairs = _on_line(sizes, floor_s, rate)
    odd = pairs[place]
    pairs[place] = Pair(odd.size_bytes, odd.seconds * factor, odd.at_s)
    line = fit(pairs)
    others = sizes[:place] + sizes[place + 1 :]  # beyond them nothing contradicts the odd one
    for size in others:
        assert 0.1 < line.seconds_for(size) / (floor_s + size / rate) < 10


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(20_000, 2_000_000), min_size=WINDOW, max_size=WINDOW, unique=True),
    noise=st.lists(st.floats(0.8, 1.25), min_size=WINDOW, max_size=WINDOW),
)
def test_noise_leaves_the_predictions_inside_its_own_bounds(sizes: list[int], noise: list[float]) -> None:
    """Least squares may predict a negative floor or rate here; least relative errors cannot run away."""
    exact = _on_line(sizes, 0.05, 1e6)
    line = fit([Pair(p.size_bytes, p.seconds * n, p.at_s) for p, n in zip(exact, noise, strict=True)])
    ratios = [line.seconds_for(p.size_bytes) / p.seconds for p in exact]
    assert 0.8 / 1.25 <= sorted(ratios)[len(ratios) // 2] <= 1.25 / 0.8


def test_a_fade_shows_at_its_third_transfer() -> None:
    """Half of the speed is no change point; the newest pairs outweigh the seven before them all the same."""
    pairs = [*_on_line([100_000, 150_000, 200_000] * 3, 0.0, 1e6)[:7]]
    faded = [Pair(size, size / 5e5, 7.0 + n) for n, size in enumerate((120_000, 180_000, 90_000))]
    assert fit([*pairs, *faded]).seconds_for(100_000) == pytest.approx(0.2, rel=0.3)


def test_old_pairs_still_tell_the_floor_from_the_rate() -> None:
    """One fresh transfer after an hour sets the level; alone it could not say how much of its time is floor."""
    old = _on_line([20_000, 100_000, 400_000], 0.1, 1e6)
    line = fit([*old, Pair(200_000, 0.3, 3600.0)])
    assert line.seconds_for(20_000) == pytest.approx(0.12, rel=0.01)
    slower = fit([*old, Pair(200_000, 0.5, 3600.0)])
    assert slower.seconds_for(200_000) == pytest.approx(0.5, rel=0.01)
    assert slower.floor_s > 0.05


def test_window_keeps_the_last_ten_and_one_line_for_them() -> None:
    window = Window()
    assert window.line() is NOTHING
    for place in range(25):
        window.add(Pair(place + 1, 1.0, at_s=float(place)))
    assert [pair.size_bytes for pair in window.pairs] == list(range(16, 26))
    line = window.line(0.1)
    assert window.line(0.1) is line
    window.restart([Pair(99, 1.0, at_s=200.0)])
    assert window.line(0.1).samples == 1
