"""Paced delivery with a clock of its own: due times, delayed tokens, gaps, bounds, ends and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pacing import DeliveryMeter, metered, paced, reader_tokens_per_s
from protocol.errors import LinkClosed
from protocol.policy import DeliveryPolicy, MigrationPolicy, Policy


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


async def at(times: list[float], clock: Time, error: Exception | None = None) -> AsyncGenerator[float, None]:
    """Yields each moment when the clock is there or past it."""
    for moment in times:
        clock.now_s = max(clock.now_s, moment)
        yield moment
    if error is not None:
        raise error


def one(_: float) -> int:
    return 1


@pytest.mark.parametrize(
    ("mode", "rate"), [("raw", 9.0), ("reading", 5.0), ("listening", 3.3)], ids=["raw", "reading", "listening"]
)
def test_the_reader_rate_is_the_policys(mode: str, rate: float) -> None:
    policy = Policy(migration=MigrationPolicy(consume_tokens_per_s=9.0), delivery=DeliveryPolicy(mode=mode))  # type: ignore[arg-type]
    assert reader_tokens_per_s(policy) == rate


def test_a_token_is_due_by_the_first_one_and_delayed_after_that() -> None:
    meter = DeliveryMeter(tokens_per_s=10.0)
    assert [meter.came(1, at_s) for at_s in (1.0, 1.02, 1.2, 1.31, 1.4)] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])
    # Only the fourth came after its due time.
    assert (meter.tokens, meter.delayed_tokens) == (5, 1)
    assert meter.raw_s == pytest.approx([0.02, 0.18, 0.11, 0.09])


def test_tokens_that_come_together_have_no_gap_between_them() -> None:
    meter = DeliveryMeter(tokens_per_s=10.0)
    assert meter.came(3, 5.0) == 5.0
    assert meter.came(2, 5.5) == pytest.approx(5.3)
    assert meter.raw_s == [0.0, 0.0, 0.5, 0.0]
    assert meter.delayed_tokens == 2


async def test_a_fast_answer_leaves_at_the_readers_rate() -> None:
    clock, meter = Time(), DeliveryMeter(tokens_per_s=5.0)
    left = []
    source = at([100.0, 100.01, 100.02, 100.03, 100.04], clock)
    async for _ in paced(source, meter, one, clock, ahead_tokens=32, sleep=clock.sleep):
        left.append(clock.now_s)
    # This source does not sleep, so all had come at 100.04 when the first one left; the others keep to their due times.
    assert left == pytest.approx([100.04, 100.2, 100.4, 100.6, 100.8])
    assert meter.delayed_tokens == 0


async def test_raw_delivery_adds_nothing() -> None:
    clock, meter = Time(), DeliveryMeter(tokens_per_s=5.0)
    times = [100.0, 100.5, 100.6]
    assert [item async for item in metered(at(times, clock), meter, one, clock)] == times
    assert meter.raw_s == meter.paced_s == pytest.approx([0.5, 0.1])
    assert meter.delayed_tokens == 2


async def test_no_more_than_the_bound_waits_and_the_source_is_held_back() -> None:
    taken = 0

    async def endless() -> AsyncGenerator[int, None]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    stream = paced(endless(), DeliveryMeter(1e-3), lambda _: 1, asyncio.get_running_loop().time, ahead_tokens=6)
    assert await anext(stream) == 1
    await asyncio.sleep(0.01)
    assert taken <= 7
    await stream.aclose()


async def test_closing_while_a_token_waits_for_its_due_time_closes_the_source() -> None:
    closed = asyncio.Event()

    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
            await asyncio.sleep(60)
        finally:
            closed.set()

    stream = paced(source(), DeliveryMeter(1e-3), lambda _: 1, asyncio.get_running_loop().time, ahead_tokens=6)
    assert await anext(stream) == 1
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    await stream.aclose()
    assert closed.is_set()


async def test_what_ended_the_answer_comes_after_what_was_made() -> None:
    clock, meter = Time(), DeliveryMeter(tokens_per_s=5.0)
    seen = []
    with pytest.raises(LinkClosed):
        async for item in paced(
            at([100.0, 100.1, 100.2], clock, LinkClosed("gone")), meter, one, clock, ahead_tokens=8, sleep=clock.sleep
        ):
            seen.append(item)
    assert seen == [100.0, 100.1, 100.2]


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=40), st.floats(0.5, 50.0))
async def test_no_token_leaves_early_or_later_than_it_must(gaps: list[float], rate: float) -> None:
    """Law: token i leaves at max(when it came, t_first + i / r_c), and is delayed when it came after that."""
    clock, meter = Time(), DeliveryMeter(rate)
    times = [100.0 + sum(gaps[:number]) for number in range(len(gaps))]
    came: list[float] = []

    async def source() -> AsyncGenerator[float, None]:
        for moment in times:
            clock.now_s = max(clock.now_s, moment)
            came.append(clock.now_s)
            yield moment

    left = []
    async for _ in paced(source(), meter, one, clock, ahead_tokens=1000, sleep=clock.sleep):
        left.append(clock.now_s)
    due = [came[0] + number / rate for number in range(len(times))]
    assert all(leaves >= due_s - 1e-6 for leaves, due_s in zip(left, due, strict=True))
    assert left == sorted(left)
    assert meter.delayed_tokens == sum(came_s > due_s for came_s, due_s in zip(came, due, strict=True))
