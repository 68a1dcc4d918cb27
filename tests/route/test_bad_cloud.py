"""A cloud that is dead, slow, lying or cut, and a real model on the device: every chat ends with a complete answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.emitting import human_lines
from engines.llama_server import LlamaServerEngine
from engines.port import TextEngine
from engines.upstream import UpstreamEngine
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http import HttpLink
from protocol.events import TextDone
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy
from tests.route.bad_server import Way, bad_server
from tests.route.openai_scenarios import client as stock_client
from tests.route.openai_scenarios import text_of
from tests.route.text_house import House, house

MODEL = "smollm2-135m"
COUNT = 64
MESSAGES = [{"role": "user", "content": "Tell me a long story about the river Rhine."}]
CLOUD_FIRST = Policy(dispatch=DispatchPolicy(start="cloud"), migration=MigrationPolicy(enabled=False, stall_s=1.0))


@pytest.fixture
async def device(model_file: Callable[[str], Path]) -> AsyncIterator[LlamaServerEngine]:
    engine = LlamaServerEngine(model_file(MODEL), model=MODEL, context_tokens=512, threads=1)
    await engine.capabilities()
    yield engine
    await engine.close()


def here(engine: TextEngine) -> Target:
    return Target("device", True, engine, frozenset({MODEL}))


@asynccontextmanager
async def cloud_at(url: str) -> AsyncIterator[Target]:
    """The cloud as a stock server; what it can do was probed on better days."""
    link = HttpLink("cloud", url)
    engine = UpstreamEngine(link, MODEL, continues="text")
    try:
        yield Target("cloud", False, engine, frozenset({MODEL}))
    finally:
        await engine.close()
        await link.close()


def lines_of(one: House) -> list[str]:
    """What the agent's console would show for people."""
    lines: list[str] = []
    show = human_lines(lines.append)
    for event in one.emit.events:
        show(event)
    return lines


async def chat(one: House, max_tokens: int = COUNT) -> tuple[str, str, float]:
    """(text, finish reason, seconds to the first content) of a streamed chat with the stock client."""
    began_s, first_s, finish = time.monotonic(), 0.0, ""
    chunks = []
    async with stock_client(one.base_url) as api:
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
        )
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.choices and chunk.choices[0].delta.content and not first_s:
                first_s = time.monotonic() - began_s
            finish = (chunk.choices and chunk.choices[0].finish_reason) or finish
    return text_of(chunks), finish, first_s


def done(one: House) -> Sequence[TextDone]:
    return [event for event in one.emit.events if isinstance(event, TextDone)]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) for way in ("dead", "lying")] + ["slow", "cut"]
)
async def test_a_chat_ends_with_a_complete_answer_and_one_line(way: str, device: LlamaServerEngine) -> None:
    """S1, S4, N1 with real parts; the slow one would send its first byte after 30 s."""
    kind: Way = "slow" if way == "dead" else way  # type: ignore[assignment]
    async with (
        bad_server(kind) as server,
        cloud_at("http://127.0.0.1:9" if way == "dead" else server.url) as cloud,
        house([here(device), cloud], policy=CLOUD_FIRST, settings=GatewaySettings(drain_s=0.2)) as one,
    ):
        text, finish, first_s = await chat(one)
        [told] = done(one)
        assert (told.status, finish) == ("ok", "length")
        assert told.completion_tokens == COUNT
        if way == "cut":
            assert told.sides == (("cloud", 40), ("device", COUNT - 40))
            assert text.startswith("".join(f" word{number}" for number in range(40)))
        else:
            assert told.sides == (("device", COUNT),)
            assert len(text) > COUNT
        assert first_s < 5.0
        [line] = lines_of(one)
        where = "at token 40, device continued" if way == "cut" else "before the first token, device answers"
        assert line.startswith(f"cloud lost {where}")
    assert device.load().running == 0


@pytest.mark.slow
async def test_a_cloud_that_is_known_to_be_down_costs_no_wait(device: LlamaServerEngine) -> None:
    """Turn by turn with a house that has the device alone, after a chat that learnt that nobody is there."""
    async with (
        cloud_at("http://127.0.0.1:9") as cloud,
        house([here(device), cloud], policy=CLOUD_FIRST) as both,
        house([here(device)]) as alone,
    ):
        await chat(alone, 2)
        await chat(both, 2)
        added_s = []
        for _ in range(7):
            (_, _, with_cloud_s), (_, _, alone_s) = await chat(both, 2), await chat(alone, 2)
            added_s.append(with_cloud_s - alone_s)
        assert statistics.median(added_s) <= 0.05, added_s
        assert all(told.sides == (("device", 2),) for told in done(both))


async def test_a_silent_cloud_is_left_alone_once_it_is_known(device: LlamaServerEngine) -> None:
    """The first chat waits for it as long as policy allows, the next one does not ask it."""
    async with (
        bad_server("slow") as server,
        cloud_at(server.url) as cloud,
        house([here(device), cloud], policy=CLOUD_FIRST, settings=GatewaySettings(drain_s=0.2)) as one,
    ):
        _, _, first_s = await chat(one, 2)
        assert first_s >= CLOUD_FIRST.migration.stall_s
        asked = len(server.asked)
        _, _, second_s = await chat(one, 2)
        assert len(server.asked) == asked
        assert second_s < CLOUD_FIRST.migration.stall_s
        assert len(lines_of(one)) == 1
