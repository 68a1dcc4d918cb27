"""llama-server in a child process that is asked directly: crashes, files that are none, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engines.llama_server_child import ChildLlamaServer
from protocol.errors import EngineCrashed, EngineError, LinkTimeout
from protocol.text import Sampling, TextRequest, Token

pytest.importorskip("xllamacpp")

MODEL = "smollm2-135m"
PROMPT = "Once upon a time, in a land of rivers, there lived"


def ask(count: int, prefix: tuple[Token, ...] = ()) -> TextRequest:
    return TextRequest(MODEL, PROMPT, Sampling(max_tokens=count), prefix=prefix)


async def answer(engine: ChildLlamaServer, count: int, prefix: tuple[Token, ...] = ()) -> list[Token]:
    continuation = await engine.prepare(ask(count, prefix), 30)
    return [token async for token in continuation.start(len(prefix), 100)]


def process_of(engine: ChildLlamaServer) -> int:
    assert engine.process_id is not None
    return engine.process_id


def alive(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


@pytest.fixture
async def engine(model_file: Callable[[str], Path]) -> AsyncIterator[ChildLlamaServer]:
    made = ChildLlamaServer(model_file(MODEL), context_tokens=256, threads=1, slots=1, name=MODEL)
    yield made
    await made.close()


async def test_a_crash_in_the_middle_is_told_and_the_answer_goes_on_in_the_next_process(
    engine: ChildLlamaServer,
) -> None:
    whole = await answer(engine, 24)
    first, taken = process_of(engine), list[Token]()
    continuation = await engine.prepare(ask(200), 30)
    with pytest.raises(EngineCrashed, match=f"{MODEL} ended by signal SIGSEGV"):
        async for token in continuation.start(0, 4):
            taken.append(token)
            if token.index == 3:
                os.kill(first, signal.SIGSEGV)
            continuation.acknowledge(token.index)
    assert [token.index for token in taken] == list(range(len(taken)))
    rest = await answer(engine, 24, tuple(taken[:4]))
    assert b"".join(token.data for token in [*taken[:4], *rest]) == b"".join(token.data for token in whole)
    assert process_of(engine) != first and not alive(first)
    assert engine.load().running == 0


async def test_a_process_that_died_while_nobody_asked_is_not_noticed(engine: ChildLlamaServer) -> None:
    await engine.capabilities()
    os.kill(process_of(engine), signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert len(await answer(engine, 4)) == 4


async def test_who_asks_while_the_next_process_loads_waits_for_it(model_file: Callable[[str], Path]) -> None:
    engine = ChildLlamaServer(model_file(MODEL), context_tokens=256, threads=1, slots=2, name=MODEL)
    try:
        await engine.capabilities()
        killed = process_of(engine)
        os.kill(killed, signal.SIGKILL)
        await asyncio.sleep(0.2)
        first = asyncio.ensure_future(answer(engine, 2))
        while engine.process_id in (None, killed):
            await asyncio.sleep(0.001)
        assert len(await answer(engine, 3)) == 3
        assert len(await first) == 2
    finally:
        await engine.close()


async def test_a_crash_while_it_loads_is_told(engine: ChildLlamaServer) -> None:
    asking = asyncio.ensure_future(engine.capabilities())
    while engine.process_id is None:
        await asyncio.sleep(0.01)
    os.kill(process_of(engine), signal.SIGKILL)
    with pytest.raises(EngineCrashed, match="SIGKILL"):
        await asking
    assert (await engine.capabilities()).continues == "ids"


async def test_a_request_that_gives_up_while_it_loads_does_not_end_it(engine: ChildLlamaServer) -> None:
    with pytest.raises(LinkTimeout, match="not ready within"):
        await engine.prepare(ask(4), 0.05)
    assert engine.load().running == 0
    assert len(await answer(engine, 4)) == 4


async def test_close_ends_the_child_and_nothing_is_started_after_it(engine: ChildLlamaServer) -> None:
    await engine.capabilities()
    child = process_of(engine)
    await engine.close()
    assert not alive(child)
    with pytest.raises(EngineError, match="was closed"):
        await engine.prepare(ask(4), 5)


async def test_close_while_it_loads_leaves_no_process(engine: ChildLlamaServer) -> None:
    asking = asyncio.ensure_future(engine.capabilities())
    while engine.process_id is None:
        await asyncio.sleep(0.01)
    child = process_of(engine)
    await engine.close()
    await asyncio.wait([asking])
    assert asking.cancelled() or asking.exception() is not None
    assert not alive(child)


async def test_a_model_that_the_library_refuses_is_told_by_its_name(
    engine: ChildLlamaServer, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_file(MODEL).read_bytes()[: 20 << 20])
    broken = ChildLlamaServer(cut, context_tokens=256, threads=1, slots=1)
    with pytest.raises(EngineError, match=r"cannot load cut\.gguf") as caught:
        await broken.capabilities()
    assert "midstream models verify" in (caught.value.next_step or "")
    await broken.close()


async def test_a_child_that_shows_no_sign_of_life_is_ended_and_the_next_request_gets_another(
    model_file: Callable[[str], Path],
) -> None:
    engine = ChildLlamaServer(
        model_file(MODEL), context_tokens=256, threads=1, slots=1, name=MODEL, look_s=0.1, alive_s=0.5
    )
    continuation = await engine.prepare(ask(200), 30)
    first = process_of(engine)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(EngineCrashed, match="no sign of life"):
        async with asyncio.timeout(10):
            async for token in continuation.start(0, 1000):
                continuation.acknowledge(token.index)
    assert len(await answer(engine, 4)) == 4
    assert process_of(engine) != first and not alive(first)
    await engine.close()


async def test_a_child_that_works_for_long_is_left_alone(model_file: Callable[[str], Path]) -> None:
    engine = ChildLlamaServer(
        model_file(MODEL), context_tokens=256, threads=1, slots=1, name=MODEL, look_s=0.001, alive_s=5.0
    )
    await engine.capabilities()
    first = process_of(engine)
    assert len(await answer(engine, 100)) == 100
    assert process_of(engine) == first
    await engine.close()


async def test_a_child_that_never_loads_is_ended(model_file: Callable[[str], Path]) -> None:
    engine = ChildLlamaServer(model_file(MODEL), context_tokens=256, threads=1, slots=1, name=MODEL, load_s=0.01)
    with pytest.raises(EngineCrashed, match="did not load"):
        await engine.capabilities()
    await engine.close()
