"""Confidence from raw logits: what counts as low, what a curve makes of a score, and that curves are what they say."""

from __future__ import annotations

import random
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.calibration import (
    LEAST_PAIRS,
    Calibration,
    Scope,
    auroc,
    best_for,
    calibration_error,
    fit,
    isotonic,
    threshold_for,
)
from gateway.confidence import FEATURES, features, judge, looping
from protocol.text import Token

SCOPE = Scope("m", "weights")
CURVE = Calibration(SCOPE, "mean", (0.2, 0.6, 1.0), (0.1, 0.5, 0.9), 0.8, 0.02, 0.2, 400)


def tokens(*logprobs: float | None, margin: float | None = 1.0) -> list[Token]:
    return [
        Token(index, index, f"w{index} ".encode(), logprob, margin if logprob is not None else None)
        for index, logprob in enumerate(logprobs)
    ]


def test_features_of_a_few_tokens() -> None:
    found = features(tokens(-0.1, -0.2, -0.3, -2.0))
    assert found is not None
    assert found.mean == pytest.approx(-0.65) and found.least == -2.0 and found.tokens == 4
    assert all(0.0 <= found.value(name) <= 1.0 for name in FEATURES)


@pytest.mark.parametrize("missing", [None, nan, -inf])
def test_a_missing_logprob_is_not_certainty(missing: float | None) -> None:
    assert features(tokens(-0.1, missing, -0.1)) is None
    judged = judge(tokens(-0.1, missing, -0.1), 3, False, CURVE, 0.6)
    assert judged.act == "upgrade" and "logprobs" in judged.reason


def test_the_decision_waits_for_its_tokens_and_falls_at_the_end_of_a_short_answer() -> None:
    sure = tokens(-0.01, -0.02)
    assert judge(sure, 8, False, CURVE, 0.6).act == "wait"
    kept = judge(sure, 8, True, CURVE, 0.6)
    assert kept.act == "keep" and kept.confidence is not None and kept.confidence > 0.8


def test_low_confidence_hands_over_and_says_what_was_wanted() -> None:
    judged = judge(tokens(-1.5, -1.0, -2.0), 3, False, CURVE, 0.6)
    assert judged.act == "upgrade" and "0.60 wanted" in judged.reason


def test_without_a_curve_only_plain_signs_count() -> None:
    assert judge(tokens(-3.0, -3.0), 2, False, None, 0.9).act == "keep"
    refusal = [Token(0, 1, b"I'm sorry, but I can't", -0.1, 1.0)]
    assert judge(refusal, 1, False, None, 0.9).act == "upgrade"
    assert judge([Token(0, 1, b"  ", -0.1, 1.0)], 4, True, None, 0.9).act == "upgrade"


def test_a_loop_is_seen_before_the_decision_is_due() -> None:
    again = [Token(n, n % 3, [b"the ", b"same ", b"thing "][n % 3], -0.01, 5.0) for n in range(12)]
    assert judge(again, 100, False, CURVE, 0.1).reason == "it repeats itself"
    assert not looping([token.data for token in again[:11]])
    assert not looping([b" "] * 40)
    assert not looping([f"{n} ".encode() for n in range(100)])


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_an_isotonic_curve_rises_and_keeps_the_mean(pairs: list[tuple[float, bool]]) -> None:
    scores, right = [p[0] for p in pairs], [p[1] for p in pairs]
    xs, ys = isotonic(scores, right)
    assert list(ys) == sorted(ys) and list(xs) == sorted(xs) and len(xs) == len(set(xs))
    assert all(0.0 <= y <= 1.0 for y in ys)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=2, max_size=60), st.floats(0, 1))
def test_a_higher_score_is_never_less_sure(pairs: list[tuple[float, bool]], score: float) -> None:
    curve = Calibration(SCOPE, "mean", *isotonic([p[0] for p in pairs], [p[1] for p in pairs]), 0, 0, 0, 0)
    assert curve.probability(score) <= curve.probability(min(1.0, score + 0.1)) + 1e-12


def test_auroc_is_the_chance_to_be_ranked_right() -> None:
    assert auroc([0.1, 0.2, 0.8, 0.9], [False, False, True, True]) == 1.0
    assert auroc([0.1, 0.2, 0.8, 0.9], [True, True, False, False]) == 0.0
    assert auroc([0.5, 0.5, 0.5, 0.5], [True, False, True, False]) == 0.5
    assert auroc([0.1, 0.9], [True, True]) == 0.5


def test_a_fitted_curve_is_better_calibrated_than_the_score() -> None:
    draw = random.Random(3)
    scores = [draw.uniform(0.6, 1.0) for _ in range(2000)]
    right = [draw.random() < (score - 0.6) ** 2 / 0.16 for score in scores]
    curve = fit(SCOPE, "mean", scores, right)
    assert curve.raw_ece > 0.3 and curve.ece < 0.05 and curve.auroc > 0.7
    cut = threshold_for(curve, scores, 0.3)
    handed = sum(curve.probability(score) < cut for score in scores) / len(scores)
    assert handed == pytest.approx(0.3, abs=0.1)


def test_too_few_pairs_make_no_curve() -> None:
    with pytest.raises(ValueError, match="at least 200"):
        fit(SCOPE, "mean", [0.5] * (LEAST_PAIRS - 1), [True] * (LEAST_PAIRS - 1))


def test_calibration_error_of_a_perfect_and_of_a_boastful_score() -> None:
    assert calibration_error([0.0, 1.0, 1.0], [False, True, True]) == 0.0
    assert calibration_error([0.99] * 10, [False] * 10) == pytest.approx(0.99)


def test_a_curve_of_another_model_or_of_other_weights_is_not_used() -> None:
    own = Calibration(Scope("m", "w", "math"), "mean", (0.5,), (0.5,), 0, 0, 0, 0)
    every = Calibration(Scope("m", "w"), "mean", (0.5,), (0.5,), 0, 0, 0, 0)
    assert best_for([own, every], "m", "w", "math") is own
    assert best_for([own, every], "m", "w", "chat") is every
    for scope in (("x", "w"), ("m", "x")):
        assert best_for([own, every], *scope, "math") is None
