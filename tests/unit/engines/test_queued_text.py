"""Bounded admission in front of a text engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engines.fakes_text import FakeTextEngine
from engines.port import Continuation
from engines.queued_text import QueuedTextEngine
from protocol.errors import EngineCrashed, EngineError, Full, LinkTimeout
from protocol.events import QueueSampled, RecordingEmit
from protocol.text import Sampling, TextRequest


def ask(text: str = "p") -> TextRequest:
    return TextRequest("m", text, Sampling(max_tokens=3))


@pytest.fixture
async def inner() -> AsyncIterator[FakeTextEngine]:
    yield FakeTextEngine(capacity=100)


def queued(inner: FakeTextEngine, emit: RecordingEmit | None = None, wait_target_s: float = 5.0) -> QueuedTextEngine:
    return QueuedTextEngine(inner, slots=1, wait_target_s=wait_target_s, emit=emit or RecordingEmit())


async def finish(continuation: Continuation) -> int:
    return len([token async for token in continuation.start(0, 100)])


async def test_requests_run_in_order_of_arrival_one_slot_at_a_time(inner: FakeTextEngine) -> None:
    engine = queued(inner)
    assert await finish(await engine.prepare(ask("warm"), 5)) == 3
    first = await engine.prepare(ask("first"), 5)
    others = [asyncio.create_task(engine.prepare(ask(name), 5)) for name in ("second", "third")]
    await asyncio.sleep(0.02)
    assert [request.prompt for request in inner.prepared] == ["warm", "first"]
    assert engine.load().waiting == 2 and engine.load().running == 1
    await finish(first)
    await finish(await others[0])
    await finish(await others[1])
    assert [request.prompt for request in inner.prepared] == ["warm", "first", "second", "third"]
    assert engine.load().running == 0


async def test_a_queued_request_whose_client_left_never_runs(inner: FakeTextEngine) -> None:
    engine = queued(inner)
    first = await engine.prepare(ask("first"), 5)
    gone = asyncio.create_task(engine.prepare(ask("gone"), 5))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.wait([gone])
    late = await engine_times_out(engine)
    assert late
    await finish(first)
    assert [request.prompt for request in inner.prepared] == ["first"]
    assert engine.load().waiting == 0


async def engine_times_out(engine: QueuedTextEngine) -> bool:
    with pytest.raises(LinkTimeout):
        await engine.prepare(ask("late"), 0.05)
    return True


async def test_beyond_the_capacity_there_is_an_honest_refusal(inner: FakeTextEngine) -> None:
    emit = RecordingEmit()
    engine = queued(inner, emit)
    first = await engine.prepare(ask(), 5)
    waiting = asyncio.create_task(engine.prepare(ask(), 5))
    await asyncio.sleep(0.01)
    with pytest.raises(Full) as full:
        await engine.prepare(ask(), 5)
    assert full.value.retry_after_s > 0
    outcomes = [event.outcome for event in emit.events if isinstance(event, QueueSampled)]
    assert outcomes == ["queued", "queued", "refused"]
    await finish(first)
    await finish(await waiting)


async def test_a_failed_prepare_gives_its_slot_back(inner: FakeTextEngine) -> None:
    engine = queued(inner)
    inner.fail("prepare", EngineCrashed("gone"))
    with pytest.raises(EngineCrashed):
        await engine.prepare(ask(), 5)
    assert await finish(await engine.prepare(ask(), 5)) == 3


async def test_closing_answers_who_waits(inner: FakeTextEngine) -> None:
    engine = queued(inner)
    first = await engine.prepare(ask(), 5)
    waiting = asyncio.create_task(engine.prepare(ask(), 5))
    await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineError):
        await waiting
    with pytest.raises(EngineError):
        await engine.prepare(ask(), 5)
    await first.close()


async def test_a_longer_wait_target_gives_room_at_once() -> None:
    engine = queued(FakeTextEngine(capacity=100, tokens_per_s=200), wait_target_s=0.001)
    await finish(await engine.prepare(ask("measured"), 5))
    first = await engine.prepare(ask(), 5)
    waiting = [asyncio.create_task(engine.prepare(ask(), 5))]
    await asyncio.sleep(0.01)
    with pytest.raises(Full):
        await engine.prepare(ask(), 5)
    engine.set_wait_target(30.0)
    waiting.append(asyncio.create_task(engine.prepare(ask(), 5)))
    await asyncio.sleep(0.01)
    assert engine.load().waiting == 2
    await finish(first)
    for one in waiting:
        await finish(await one)


async def test_leaving_an_answer_half_read_frees_the_slot_and_ends_the_inner_answer(inner: FakeTextEngine) -> None:
    engine = queued(inner)
    continuation = await engine.prepare(ask(), 5)
    tokens = continuation.start(0, 100)
    assert (await anext(tokens)).index == 0
    await tokens.aclose()  # type: ignore[attr-defined]
    assert engine.load().running == inner.load().running == 0
    await continuation.close()
    assert engine.load().running == 0


async def test_a_cut_answer_teaches_the_rate_and_not_the_length() -> None:
    engine = queued(FakeTextEngine(capacity=100, tokens_per_s=200), wait_target_s=0.3)
    long = TextRequest("m", "p", Sampling(max_tokens=64))
    continuation = await engine.prepare(long, 5)
    tokens = continuation.start(0, 100)
    for _ in range(6):
        await anext(tokens)
    await continuation.close()
    running = await engine.prepare(long, 5)
    waiting = asyncio.create_task(engine.prepare(long, 5))
    await asyncio.sleep(0.01)
    # Two answers of 64 tokens at about 200 a second lie ahead, however short the cut one was.
    assert engine.load().wait_s > 0.5
    with pytest.raises(Full) as full:
        await engine.prepare(long, 5)
    assert full.value.retry_after_s > 0.2
    await running.close()
    await (await waiting).close()


async def test_a_rate_from_the_profile_counts_until_an_answer_was_seen(inner: FakeTextEngine) -> None:
    engine = queued(inner, wait_target_s=5.0)
    engine.expect(10.0)
    held = await engine.prepare(TextRequest("m", "p", Sampling(max_tokens=100)), 5)
    assert engine.load().wait_s == pytest.approx(10.0)
    await held.close()
