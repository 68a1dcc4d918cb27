"""The bounded queue in front of a text engine, seen through the text way: spilling, refusing, leaving, live change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from attrs import frozen

from engines.fakes_text import FakeTextEngine
from engines.queued_text import QueuedTextEngine
from gateway.settings import GatewaySettings
from gateway.targets import Target
from protocol.events import QueueSampled
from protocol.policy import MigrationPolicy, Policy
from tests.route.text_house import House, house

MODEL = "fake"
STAY = Policy(migration=MigrationPolicy(enabled=False, stall_s=30.0))


@frozen
class Served:
    """A house whose device runs one answer at a time behind a queue, and an HTTP client."""

    house: House
    client: openai.DefaultAsyncHttpxClient
    inner: FakeTextEngine
    queue: QueuedTextEngine
    cloud: FakeTextEngine

    async def ask(self, count: int, text: str = "x") -> Any:
        """A whole answer of `count` tokens at 100 tokens/s."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": count}
        return await self.client.post("/v1/chat/completions", json=body)

    async def until(self, running: int, waiting: int) -> None:
        """Return when the device has this load."""
        async with asyncio.timeout(5):
            while (self.queue.load().running, self.queue.load().waiting) != (running, waiting):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def served(*, cloud: bool, wait_target_s: float = 0.01) -> AsyncIterator[Served]:
    inner = FakeTextEngine(tokens_per_s=100, capacity=1)
    queue = QueuedTextEngine(inner, slots=1, wait_target_s=wait_target_s)
    remote = FakeTextEngine(name="cloud")
    targets = [Target("device", True, queue, frozenset({MODEL}))]
    targets += [Target("cloud", False, remote, frozenset({MODEL}))] if cloud else []
    settings = GatewaySettings(drain_s=0.1)
    async with (
        house(targets, policy=STAY, settings=settings) as one,
        openai.DefaultAsyncHttpxClient(base_url=one.base_url, timeout=20.0) as client,
    ):
        found = Served(one, client, inner, queue, remote)
        # One answer measures how long an answer holds its slot.
        assert (await found.ask(10)).status_code == 200
        yield found
        await queue.close()


async def test_past_the_queue_an_answer_begins_in_the_cloud_at_once() -> None:
    async with served(cloud=True) as one:
        running, waiting = asyncio.create_task(one.ask(40)), None
        await one.until(1, 0)
        waiting = asyncio.create_task(one.ask(5))
        await one.until(1, 1)
        spilled = await one.ask(20)
        assert (spilled.status_code, spilled.headers["x-midstream-target"]) == (200, "cloud")
        assert one.queue.load().waiting == 1, "the spilled answer took no place"
        for reply in (await running, await waiting):
            assert (reply.status_code, reply.headers["x-midstream-target"]) == (200, "device")
        assert len(one.cloud.prepared) == 1


async def test_without_a_cloud_the_refusal_says_when_to_come_back() -> None:
    async with served(cloud=False) as one:
        running = asyncio.create_task(one.ask(40))
        await one.until(1, 0)
        waiting = asyncio.create_task(one.ask(5))
        await one.until(1, 1)
        for stream in (False, True):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": stream}
            refused = await one.client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "over_capacity"
        assert [(await task).status_code for task in (running, waiting)] == [200, 200]


async def test_a_longer_wait_target_lets_more_wait_at_once() -> None:
    async with served(cloud=False) as one:
        running = [asyncio.create_task(one.ask(40))]
        await one.until(1, 0)
        running.append(asyncio.create_task(one.ask(5)))
        await one.until(1, 1)
        assert (await one.ask(5)).status_code == 503
        one.queue.set_wait_target(30.0)
        running += [asyncio.create_task(one.ask(5)) for _ in range(3)]
        await one.until(1, 4)
        assert [(await task).status_code for task in running] == [200] * 5


@pytest.mark.parametrize("leaves", ["waiting", "running"])
async def test_a_client_that_leaves_gives_its_place_to_the_next(leaves: str) -> None:
    async with served(cloud=False, wait_target_s=30.0) as one:
        tasks = {"running": asyncio.create_task(one.ask(60, "running"))}
        await one.until(1, 0)
        tasks["waiting"] = asyncio.create_task(one.ask(5, "waiting"))
        await one.until(1, 1)
        tasks["next"] = asyncio.create_task(one.ask(5, "next"))
        await one.until(1, 2)
        gone = tasks.pop(leaves)
        gone.cancel()
        await asyncio.wait({gone})
        assert [(await task).status_code for task in tasks.values()] == [200, 200]
        await one.until(0, 0)
        asked = [str(request.prompt[0].content) for request in one.inner.prepared[1:]]  # type: ignore[union-attr]
        assert asked == [name for name in ("running", "waiting", "next") if leaves == "running" or name != "waiting"]
        assert one.inner.load().running == 0


async def test_what_waits_is_seen_by_dispatch_and_in_the_records() -> None:
    seen: list[QueueSampled] = []
    inner = FakeTextEngine(tokens_per_s=100, capacity=2)

    def emit(event: object) -> None:
        if isinstance(event, QueueSampled):
            seen.append(event)

    queue = QueuedTextEngine(inner, slots=2, wait_target_s=5.0, name="text fake", emit=emit)
    async with (
        house([Target("device", True, queue, frozenset({MODEL}))], policy=STAY) as one,
        openai.DefaultAsyncHttpxClient(base_url=one.base_url, timeout=20.0) as client,
    ):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 10}
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4
        assert queue.load().running == 0
    assert {event.outcome for event in seen} == {"queued", "done"}
    assert max(event.waiting for event in seen) == 2
    assert all(event.service_s >= 0.09 for event in seen if event.outcome == "done")
