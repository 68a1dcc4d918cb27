"""How fast a slow-down is learnt, and what tells nothing of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.rates import LEAST_FACTOR, MOST_FACTOR, Slowdown, Slowdowns


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_a_lasting_change_is_seen_within_five_requests(factor: float) -> None:
    state = Slowdown()
    for _ in range(20):
        state = state.observed(1.0, 1.0)
    for _ in range(5):
        state = state.observed(1.0, factor)
    assert state.factor == factor


def test_one_outlier_changes_nothing() -> None:
    state = Slowdown()
    for seconds in (1.0, 1.0, 1.0, 50.0):
        state = state.observed(1.0, seconds)
    assert state.factor == 1.0


def test_at_first_nothing_is_known() -> None:
    assert Slowdown().factor == 1.0
    assert Slowdowns().factor("onnx") == 1.0


@pytest.mark.parametrize(
    "pair", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (1.0, float("nan"))]
)
def test_runs_that_tell_nothing(pair: tuple[float, float]) -> None:
    assert Slowdown().observed(*pair) == Slowdown()


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=12))
def test_the_factor_stays_in_its_bounds(pairs: list[tuple[float, float]]) -> None:
    state = Slowdown()
    for predicted, measured in pairs:
        state = state.observed(predicted, measured)
    assert LEAST_FACTOR <= state.factor <= MOST_FACTOR
    assert len(state.ratios) <= 5


def test_engines_are_kept_apart() -> None:
    table = Slowdowns()
    table.observe("onnx", 1.0, 3.0)
    table.observe("llama", 1.0, 2.0)
    assert (table.factor("onnx"), table.factor("llama"), table.factor("tflite")) == (3.0, 2.0, 1.0)
