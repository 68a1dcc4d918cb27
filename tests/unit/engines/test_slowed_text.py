"""A declared slow-down is waited for."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from engines.fakes_text import FakeTextEngine
from engines.slowed_text import SlowedTextEngine, _Pace
from protocol.text import Sampling, TextRequest


class Timed:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


async def test_prefill_and_tokens_take_the_factor_longer() -> None:
    clock = Timed()
    inner = FakeTextEngine(tokens_per_s=10.0, prefill_tokens_per_s=2.0, sleep=clock.sleep, clock=clock)
    engine = SlowedTextEngine(inner, 4.0, clock=clock, sleep=clock.sleep)
    began_s = clock()
    continuation = await engine.prepare(TextRequest("m", "two words", Sampling(max_tokens=9)), 60)
    assert clock() - began_s == pytest.approx(4.0 * 1.0)
    began_s = clock()
    tokens = [token async for token in continuation.start(0, 100)]
    assert clock() - began_s == pytest.approx(4.0 * 0.9)
    gaps = [later.at_s - sooner.at_s for sooner, later in itertools.pairwise(tokens)]
    assert gaps == pytest.approx([0.4] * 8)


async def test_a_pause_for_credit_is_not_slowed_down() -> None:
    clock = Timed()
    inner = FakeTextEngine(tokens_per_s=10.0, sleep=clock.sleep, clock=clock)
    engine = SlowedTextEngine(inner, 3.0, clock=clock, sleep=clock.sleep)
    continuation = await engine.prepare(TextRequest("m", "p", Sampling(max_tokens=8)), 60)
    began_s = clock()
    async for token in continuation.start(0, 1):
        if token.index == 3:
            clock.now_s += 50.0
        continuation.acknowledge(token.index)
    assert clock() - began_s < 50.0 + 8 * 0.3 + 2.0


async def test_an_engine_that_runs_ahead_is_paced_by_when_its_tokens_were_made() -> None:
    clock = Timed()
    pace = _Pace(5.0, 100.0)
    made = [100.1 + 0.1 * place for place in range(20)]
    due = [pace.due_s(100.0 if place == 0 else 101.0 + place, made_s, work=True) for place, made_s in enumerate(made)]
    assert due == pytest.approx([100.5 + 0.5 * place for place in range(20)])
    # From here on the engine is held back by its reader for 2 s a token; that is not decoding.
    held = [made[-1] + 2.0 * place for place in range(1, 40)]
    late = [pace.due_s(made_s + 1.0, made_s, work=True) for made_s in held]
    assert late[-1] <= held[-1] + 10 * 1.0
    assert clock() == 100.0


def test_a_factor_below_one_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SlowedTextEngine(FakeTextEngine(), 0.5)
