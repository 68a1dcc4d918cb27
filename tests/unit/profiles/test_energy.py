"""Energy: the FLOPs model finds the rates of a device whose power can be read; lambda follows battery and heat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.energy import (
    MOST_RATIO,
    EnergyModel,
    EnergyRates,
    PowerState,
    Span,
    flops_per_token,
    money_per_joule,
)
from protocol.policy import DispatchPolicy

TRUE = EnergyRates(2e-10, 9e-11, 5.0)


def spans(rates: EnergyRates, work: list[tuple[float, float, float]]) -> list[Span]:
    return [Span(p * rates.prefill_j + d * rates.decode_j + s * rates.idle_w, s, p, d) for s, p, d in work]


def test_rates_are_found_from_what_was_used() -> None:
    model = EnergyModel()
    assert not model.calibrated
    for span in spans(TRUE, [(5.0, 0, 0), (3.0, 4e11, 1e9), (9.0, 1e10, 3e11), (5.0, 0, 0), (4.0, 2e11, 1e11)] * 6):
        model = model.observed(span)
    assert model.calibrated
    assert model.rates.prefill_j == pytest.approx(TRUE.prefill_j, rel=0.1)
    assert model.rates.decode_j == pytest.approx(TRUE.decode_j, rel=0.25)
    assert model.rates.idle_w == pytest.approx(TRUE.idle_w, rel=0.1)
    # 1 B parameters, 100 prompt tokens, 50 answer tokens.
    true = flops_per_token(1e9) * (100 * TRUE.prefill_j + 50 * TRUE.decode_j)
    assert model.joules(flops_per_token(1e9), 100, 50) == pytest.approx(true, rel=0.2)


def test_a_phase_that_was_never_seen_keeps_its_prior() -> None:
    model = EnergyModel()
    for span in spans(TRUE, [(5.0, 0, 0), (4.0, 3e11, 0)] * 10):
        model = model.observed(span)
    assert model.rates.decode_j == pytest.approx(EnergyRates().decode_j)


@given(st.lists(st.tuples(*[st.floats(0, 1e13)] * 4), max_size=80))
def test_any_reading_leaves_rates_within_their_bounds(found: list[tuple[float, float, float, float]]) -> None:
    model = EnergyModel()
    for joules, seconds, prefill, decode in found:
        model = model.observed(Span(joules, seconds, prefill, decode))
    prior = EnergyRates()
    assert 0 < model.rates.prefill_j <= MOST_RATIO * prior.prefill_j
    assert 0 < model.rates.decode_j <= MOST_RATIO * prior.decode_j
    assert len(model.spans) <= 64


def test_a_counter_that_went_back_tells_nothing() -> None:
    model = EnergyModel()
    assert model.observed(Span(-1.0, 5.0, 1e9, 1e9)) is model
    assert model.observed(Span(1.0, 0.0, 1e9, 1e9)) is model


@pytest.mark.parametrize(
    ("state", "factor"),
    [
        (PowerState(), 1.0),
        (PowerState("mains", 0.1, 40.0), 1.0),
        (PowerState("battery"), 4.0),
        (PowerState("battery", 1.0), 4.0),
        (PowerState("battery", 0.0), 40.0),
        (PowerState("battery", 0.5), 22.0),
        (PowerState("mains", None, 0.0), 3.0),
        (PowerState("mains", None, -5.0), 3.0),
        (PowerState("mains", None, 7.5), 2.0),
    ],
)
def test_a_joule_is_dearer_on_battery_and_when_hot(state: PowerState, factor: float) -> None:
    policy = DispatchPolicy(money_per_joule=2.0, battery_factor=4.0, empty_factor=10.0, hot_factor=3.0)
    assert money_per_joule(policy, state) == pytest.approx(2.0 * factor)
    assert money_per_joule(DispatchPolicy(money_per_joule=2.0), state) == 2.0
