"""A worker process that crashes, refuses, or is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from engines.fakes_text import fake_answer
from engines.worker import WorkerEngine
from protocol.errors import EngineCrashed, EngineError, LinkTimeout
from protocol.text import Sampling, TextRequest, Token

FAKE = "engines.fakes_text:FakeTextEngine"


def ask(count: int = 20) -> TextRequest:
    return TextRequest("m", "a crash is survived", Sampling(max_tokens=count))


@pytest.fixture
async def worker() -> AsyncIterator[WorkerEngine]:
    engine = WorkerEngine(FAKE, {"tokens_per_s": 100.0, "answer_tokens": 200})
    yield engine
    await engine.close()


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_crash_in_the_middle_is_an_error_at_the_exact_index_and_the_next_request_works(
    worker: WorkerEngine,
) -> None:
    continuation = await worker.prepare(ask(100), 10)
    taken: list[Token] = []
    assert worker.process_id is not None
    first = worker.process_id
    with pytest.raises(EngineCrashed, match="ended"):
        async for token in continuation.start(0, 10):
            taken.append(token)
            continuation.acknowledge(token.index)
            if token.index == 5:
                os.kill(first, signal.SIGSEGV)
    assert [token.index for token in taken] == list(range(len(taken)))
    rest = await worker.prepare(TextRequest("m", ask().prompt, Sampling(max_tokens=20), prefix=tuple(taken)), 10)
    taken += [token async for token in rest.start(len(taken), 100)]
    assert b"".join(token.data for token in taken) == fake_answer(ask().prompt, 20, 200)
    assert worker.process_id != first and not alive(first)


async def test_a_crash_while_preparing_is_engine_crashed(worker: WorkerEngine) -> None:
    await worker.capabilities()
    assert worker.process_id is not None
    os.kill(worker.process_id, signal.SIGSTOP)
    preparing = asyncio.ensure_future(worker.prepare(ask(), 10))
    await asyncio.sleep(0.05)
    os.kill(worker.process_id, signal.SIGKILL)
    with pytest.raises(EngineCrashed):
        await preparing


async def test_a_child_that_shows_no_sign_of_life_is_replaced_and_its_requests_are_told() -> None:
    worker = WorkerEngine(FAKE, {"tokens_per_s": 100.0, "answer_tokens": 2000}, alive_s=0.3)
    running = await worker.prepare(ask(2000), 10)
    tokens = running.start(0, 2000)
    await anext(aiter(tokens))
    first = worker.process_id
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(LinkTimeout):
        await worker.prepare(ask(), 0.1)
    with pytest.raises(EngineCrashed, match="no sign of life"):
        async with asyncio.timeout(10):
            async for _ in tokens:
                pass
    continuation = await worker.prepare(ask(5), 10)
    assert len([token async for token in continuation.start(0, 100)]) == 5
    assert worker.process_id != first and not alive(first)
    await worker.close()


async def test_a_child_that_is_only_slow_is_left_alone() -> None:
    worker = WorkerEngine(FAKE, {"tokens_per_s": 100.0, "prefill_tokens_per_s": 10.0}, alive_s=2.0)
    await worker.capabilities()
    first = worker.process_id
    with pytest.raises(LinkTimeout):
        await worker.prepare(ask(), 0.05)
    await asyncio.sleep(0.5)
    assert worker.process_id == first
    assert (await worker.capabilities()).context_tokens > 0
    await worker.close()


async def test_close_ends_the_child(worker: WorkerEngine) -> None:
    await worker.capabilities()
    assert worker.process_id is not None
    child = worker.process_id
    await worker.close()
    assert not alive(child)


async def test_a_target_that_cannot_be_made_is_an_engine_error() -> None:
    worker = WorkerEngine("engines.fakes_text:NoSuchEngine", {})
    with pytest.raises(EngineError, match="NoSuchEngine"):
        await worker.capabilities()
    await worker.close()


async def test_a_worker_that_keeps_dying_is_not_started_for_ever() -> None:
    worker = WorkerEngine("os:abort", {})
    for _ in range(5):
        with pytest.raises(EngineCrashed):
            await worker.capabilities()
    with pytest.raises(EngineError, match="died 5 times"):
        await worker.capabilities()
    await worker.close()
