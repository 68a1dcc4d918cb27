"""Choosing from logits."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from engines.sampling import Sampler
from protocol.text import Sampling

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def draws(sampling: Sampling, count: int = 2000) -> Counter[int]:
    sampler = Sampler(sampling)
    return Counter(sampler.choose(LOGITS).id for _ in range(count))


def test_greedy_takes_the_best_and_bias_moves_it() -> None:
    assert draws(Sampling(), 5) == {0: 5}
    assert draws(Sampling(logit_bias={2: 5.0}), 5) == {2: 5}
    assert draws(Sampling(logit_bias={99: 5.0}), 5) == {0: 5}


def test_temperature_one_draws_by_probability() -> None:
    seen = draws(Sampling(temperature=1.0, seed=1), 8000)
    assert [seen[i] / 8000 for i in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)


def test_the_nucleus_keeps_the_smallest_set_that_reaches_top_p() -> None:
    assert set(draws(Sampling(temperature=1.0, top_p=0.7, seed=1))) == {0, 1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.01, seed=1))) == {0}


def test_a_seed_repeats() -> None:
    first, second = (Sampler(Sampling(temperature=1.0, seed=4)) for _ in range(2))
    assert [first.choose(LOGITS).id for _ in range(50)] == [second.choose(LOGITS).id for _ in range(50)]


def test_logprobs_are_raw_and_only_where_asked_for() -> None:
    plain = Sampler(Sampling()).choose(LOGITS)
    assert (plain.logprob, plain.margin, plain.top) == (None, None, ())
    asked = Sampler(Sampling(temperature=0.1, logprobs=3, logit_bias={1: 9.0})).choose(LOGITS)
    assert asked.id == 1 and asked.logprob == pytest.approx(math.log(0.3), abs=1e-5)
    assert asked.margin == pytest.approx(math.log(0.5 / 0.3), abs=1e-5)
    assert [one for one, _ in asked.top] == [0, 1, 2]


def test_a_negative_seed_repeats_its_draws() -> None:
    logits = np.linspace(0, 3, 50, dtype=np.float32)
    draws = [[Sampler(Sampling(temperature=1.0, seed=-1)).choose(logits).id for _ in range(3)] for _ in range(2)]
    assert draws[0] == draws[1]


def test_a_temperature_near_zero_takes_the_best_token() -> None:
    logits = np.array([1.0, 2.0, 5.0, 4.999], dtype=np.float32)
    for temperature in (1e-300, 1e-30, 1e-6):
        assert {Sampler(Sampling(temperature=temperature, seed=n)).choose(logits).id for n in range(5)} == {2}
