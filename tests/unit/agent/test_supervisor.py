"""What happens to the agent when one of its tracks ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agent.health import Health
from agent.supervisor import LifeKeeper, Parts, Supervisor
from links.http_server import RunningServer, serve
from protocol.clock import FakeClock
from protocol.errors import ConfigError


def supervisor(health: Health, track: Callable[[], Coroutine[Any, Any, None]]) -> Supervisor:
    async def nothing() -> None:
        return None

    async def listen() -> RunningServer:
        return await serve([])

    return Supervisor(
        Parts(
            life=LifeKeeper(), health=health, open_server=listen, ways=[], tracks=[track], drain=nothing, close=nothing
        )
    )


async def run_once(error: Exception) -> Health:
    async def track() -> None:
        raise error

    health = Health(FakeClock())
    agent = supervisor(health, track)
    await agent.start()
    await asyncio.sleep(0.01)
    await agent.stop()
    return health


async def test_a_track_that_cannot_go_on_is_a_warning_with_its_next_step(caplog: pytest.LogCaptureFixture) -> None:
    health = await run_once(ConfigError("the key is damaged", next_step="join again"))
    assert [(w.text, w.next_step) for w in health.warnings] == [("the key is damaged", "join again")]
    assert "Traceback" not in caplog.text


async def test_a_track_that_ends_by_a_bug_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        health = await run_once(RuntimeError("a bug"))
    assert not health.warnings
    assert "Traceback" in caplog.text and "goes on without it" in caplog.text


async def test_a_pause_ends_the_tracks_and_a_resume_begins_them_once_and_never_after_the_stop() -> None:
    begun, ended = [0], [0]

    async def track() -> None:
        begun[0] += 1
        try:
            await asyncio.Event().wait()
        finally:
            ended[0] += 1

    agent = supervisor(Health(FakeClock()), track)
    await agent.start()
    await asyncio.sleep(0.01)
    for _ in range(2):
        await agent.pause()
    assert (begun[0], ended[0]) == (1, 1)
    assert agent.port > 0, "the server goes on"
    for _ in range(2):
        await agent.resume()
        await asyncio.sleep(0.01)
    assert (begun[0], ended[0]) == (2, 1)
    await agent.pause()
    stopping = asyncio.create_task(agent.stop())
    await asyncio.sleep(0)
    await agent.resume()
    await stopping
    await agent.resume()
    await asyncio.sleep(0.01)
    assert begun[0] == ended[0] == 2
