"""A whole agent in this process, with its console's lines kept, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.config import AgentConfig, load
from agent.host_bridge import HostBridge
from agent.house import House
from links.http import HttpLink
from protocol.events import Event, RecordingEmit


class TestConsole:
    """Stands where agent.console.Console does: keeps what it is told."""

    __test__ = False

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.events = RecordingEmit()

    def emit(self, event: Event) -> None:
        self.events(event)

    def say(self, name: str, text: str, **facts: Any) -> None:
        self.said.append((name, facts))

    def names(self) -> list[str]:
        return [name for name, _ in self.said]


def config_for(folder: Path, **flags: Any) -> AgentConfig:
    """A configuration that touches nothing outside `folder` and loopback."""
    chosen = {"state_dir": str(folder / "agent"), "port": 0, "mdns": False, "benchmark": False, "device_id": "pi"}
    return load({**chosen, **flags}, environ={"HOME": str(folder)})


class RunningHouse:
    """`async with RunningHouse(config) as house`: a started agent and a client of its API."""

    def __init__(self, config: AgentConfig, bridge: HostBridge | None = None) -> None:
        self.console = TestConsole()
        self.house = House(config, self.console, bridge)

    async def __aenter__(self) -> RunningHouse:
        await self.house.supervisor.start()
        self.link = HttpLink("agent", self.house.url)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.link.close()
        await self.house.supervisor.stop()

    async def get(self, path: str) -> tuple[int, bytes]:
        reply = await self.link.exchange(path, {}, b"", 10, method="GET")
        return reply.status, reply.body

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self.get("/midstream/v1/status"))[1])
        return found

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)

    async def until_state(self, state: str, seconds: float = 20.0) -> None:
        await self.until(lambda: self.house.life.life.connected == state, seconds)
