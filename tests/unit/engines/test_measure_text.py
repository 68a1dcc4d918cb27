"""Rates of a text engine whose speed is known."""

from __future__ import annotations

import asyncio

import pytest

from engines.fakes_text import FakeTextEngine
from engines.measure_text import text_probes, why_no_rate
from engines.port import TextEngine
from protocol.errors import EngineError


class Timed:
    """A clock that moves when the fake sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


def test_prefill_and_decode_are_the_engines_own_and_measured_together() -> None:
    clock, made = Timed(), []

    def make(threads: int) -> TextEngine:
        made.append(threads)
        return FakeTextEngine(
            tokens_per_s=10.0 * threads, prefill_tokens_per_s=100.0 * threads, sleep=clock.sleep, clock=clock
        )

    probes = text_probes(make, "d", model="m", engine="fake", threads=(1, 2), budget_s=1000.0, clock=clock)
    assert len({probe.name for probe in probes}) == 4
    results = [probe.run() for probe in probes]
    assert [(one.what, one.threads) for one in results] == [
        ("prefill", 1),
        ("decode", 1),
        ("prefill", 2),
        ("decode", 2),
    ]
    assert [one.per_token_s for one in results] == pytest.approx([0.01, 0.1, 0.005, 0.05])
    assert made == [1, 2]


def test_a_slow_engine_is_measured_within_its_budget() -> None:
    clock = Timed()
    slow = FakeTextEngine(tokens_per_s=1.0, prefill_tokens_per_s=1000.0, sleep=clock.sleep, clock=clock)
    (_, decode) = text_probes(
        lambda threads: slow, "d", model="m", engine="f", threads=(1,), budget_s=12.0, clock=clock
    )
    assert decode.run().per_token_s == pytest.approx(1.0)
    assert clock.now_s < 25


def test_an_engine_too_slow_for_the_budget_gets_no_figure_and_no_more_time() -> None:
    clock = Timed()
    slow = FakeTextEngine(tokens_per_s=1.0, sleep=clock.sleep, clock=clock)
    (_, decode) = text_probes(lambda threads: slow, "d", model="m", engine="f", threads=(1,), budget_s=3.0, clock=clock)
    with pytest.raises(EngineError, match="16 are needed"):
        decode.run()
    assert clock.now_s < 15


def test_tokens_that_were_held_back_make_no_rate() -> None:
    clock = Timed()
    burst = FakeTextEngine(sleep=clock.sleep, clock=clock)
    (_, decode) = text_probes(lambda threads: burst, "d", model="m", engine="f", threads=(1,), clock=clock)
    with pytest.raises(EngineError, match="held back"):
        decode.run()


@pytest.mark.parametrize(
    ("times_s", "why"),
    [
        ([0.1 * place for place in range(15)], "15 tokens"),
        ([0.1 * (place // 2) for place in range(24)], "12 different times"),
        ([0.1 * place for place in range(20)] + [0.5], "held back"),
        ([0.1 * place for place in range(16)], ""),
        ([0.1 * place for place in range(20)] + [0.1 * 19], ""),
    ],
)
def test_what_a_rate_may_be_made_of(times_s: list[float], why: str) -> None:
    assert (why in why_no_rate(times_s)) if why else why_no_rate(times_s) == ""


def test_what_was_timed_of_reading_is_kept_where_decoding_has_no_speed() -> None:
    made: list[int] = []

    def make(threads: int) -> TextEngine:
        made.append(threads)
        return FakeTextEngine(answer_tokens=0)

    prefill, decode = text_probes(make, "d", model="m", engine="f", threads=(1,))
    assert prefill.run().what == "prefill"
    with pytest.raises(EngineError, match="ended after 0 tokens"):
        decode.run()
    assert made == [1], "one measurement gave both"
