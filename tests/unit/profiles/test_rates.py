"""Predictions from measurements, and how fast a slow-down is learnt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.rates import LEAST_FACTOR, MOST_FACTOR, Rates, Slowdown, Slowdowns, rates
from protocol.device import Measured

RATES = rates(
    [
        Measured("det", "onnx", 1, "whole", 0.4, 0.01),
        Measured("det", "onnx", 4, "whole", 0.2, 0.01),
        Measured("det", "onnx", 4, "head:007:int8", 0.05, 0.01),
        Measured("smol", "llama", 2, "prefill", 0.64, 0.01, 0.01),
        Measured("smol", "llama", 2, "decode", 1.6, 0.01, 0.05),
        Measured("smol", "llama", 2, "load", 0.3, 0.0),
    ]
)


def test_predictions() -> None:
    assert RATES.whole_s("det", "onnx") == 0.2
    assert RATES.whole_s("det", "onnx", threads=1) == 0.4
    assert RATES.head_s("det", "onnx", "007", "int8") == 0.05
    assert RATES.prefill_s("smol", "llama", 100) == 1.0
    assert RATES.decode_tokens_per_s("smol", "llama") == 20.0
    assert RATES.load_s("smol", "llama") == 0.3


def test_what_was_not_measured_is_not_predicted() -> None:
    assert RATES.whole_s("cls", "onnx") is None
    assert RATES.whole_s("det", "tflite") is None
    assert RATES.prefill_s("smol", "llama", 9, threads=3) is None
    assert Rates().decode_tokens_per_s("smol", "llama") is None
    assert RATES.ttft_s("cls", "onnx", 5, 0.0) is None


def test_time_to_the_first_token() -> None:
    assert RATES.ttft_s("smol", "llama", 100, queue_s=0.5, slowdown=3.0) == 3.5


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
    table = Slowdowns().observed("onnx", 1.0, 3.0).observed("llama", 1.0, 2.0)
    assert (table.factor("onnx"), table.factor("llama"), table.factor("tflite")) == (3.0, 2.0, 1.0)
