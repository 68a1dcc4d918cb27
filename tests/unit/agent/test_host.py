"""The guarded host: its failures are warnings, its locks are left, its state is followed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from agent.fakes_host import FakeHost, MemorySecrets
from agent.health import Health
from agent.host import KEY_NAME, Host
from agent.host_bridge import HostState, PlainHost
from agent.pacing import Pace
from engines.fakes_tensor import FakeTensorRuntime
from links.port import Found
from profiles.facts import Facts
from protocol.clock import FakeClock
from protocol.errors import ConfigError, LinkError

EVERY_CALL = frozenset({"state", "watch", "hold_awake", "hold_multicast", "browse", "runtimes", "text_engine"})


@define
class Followed:
    host: Host
    health: Health
    paces: list[tuple[Pace, Pace]] = field(factory=list)


@asynccontextmanager
async def following(bridge: Any) -> AsyncIterator[Followed]:
    health = Health(FakeClock())
    paces: list[tuple[Pace, Pace]] = []
    found = Followed(Host(bridge, health, lambda before, now: paces.append((before, now))), health, paces)
    task = asyncio.create_task(found.host.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await found.host.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_change_is_followed_at_once_and_heat_is_warned_of() -> None:
    bridge = FakeHost(HostState(network="wifi"))
    async with following(bridge) as seen:
        await until(lambda: bridge.watchers == 1)
        bridge.change(network="none", thermal="critical")
        await until(lambda: len(seen.paces) == 1)
        before, now = seen.paces[0]
        assert (before.may_dial, now.may_dial) == (True, False)
        assert [w.name for w in seen.health.warnings] == ["thermal"]
        bridge.change(network="wifi", thermal="none")
        await until(lambda: len(seen.paces) == 2 and not seen.health.warnings)
    assert bridge.watchers == 0


async def test_the_wake_lock_is_held_until_everyone_has_left_it_and_never_outlives_the_agent() -> None:
    bridge = FakeHost()
    async with following(bridge) as seen:
        for on in (True, True, False, False, True, True):
            seen.host.hold_awake(on)
    assert [on for name, on in bridge.calls if name == "hold_awake"] == [True, False, True, False]


async def test_the_multicast_lock_is_held_while_services_are_looked_for() -> None:
    bridge = FakeHost(found=[Found("midstream", ("192.168.1.5",), 8791)])
    async with following(bridge) as seen:
        found = await seen.host.browse("_midstream._tcp", 0.1)
    assert [f.port for f in found] == [8791]
    assert [on for name, on in bridge.calls if name == "hold_multicast"] == [True, False]


async def test_a_host_that_fails_in_every_call_costs_nothing_but_what_it_would_have_brought(tmp_path: Path) -> None:
    bridge = FakeHost(failing=EVERY_CALL, runtimes={"tflite": FakeTensorRuntime()})
    async with following(bridge) as seen:
        assert seen.host.runtimes == {}
        assert seen.host.text_engine("any") is None
        assert seen.host.key(tmp_path) is None
        assert seen.host.pace.may_dial
        seen.host.hold_awake(True)
        with pytest.raises(LinkError, match="not allowed"):
            await seen.host.browse("_midstream._tcp", 0.1)
        assert seen.host.facts(Facts()) == Facts()


async def test_the_key_is_in_the_store_of_secrets(tmp_path: Path) -> None:
    secrets = MemorySecrets()
    async with following(FakeHost(secrets=secrets)) as seen:
        keeper = seen.host.key(tmp_path)
        assert keeper is not None
        keeper.write(b"-----BEGIN PRIVATE KEY-----x-----END")
        assert keeper.read() == secrets.held[KEY_NAME]


async def test_a_locked_store_is_no_absent_key(tmp_path: Path) -> None:
    """Else a phone that was not unlocked yet would make a new key and could never come back with it."""

    class Locked(MemorySecrets):
        def read(self, name: str) -> bytes | None:
            raise OSError("user not authenticated")

    async with following(FakeHost(secrets=Locked())) as seen:
        keeper = seen.host.key(tmp_path)
        assert keeper is not None
        with pytest.raises(ConfigError, match="not authenticated"):
            keeper.read()


async def test_power_in_the_profile_is_what_the_host_says() -> None:
    async with following(FakeHost(HostState(charging=False, battery_ratio=0.25))) as seen:
        facts = seen.host.facts(Facts(power="mains"))
        assert (facts.power, facts.battery_ratio) == ("battery", 0.25)


async def test_a_plain_host_holds_nothing_back() -> None:
    async with following(PlainHost()) as seen:
        assert seen.host.pace.may_fetch
        assert await seen.host.browse("_midstream._tcp", 0.1) == ()
        assert seen.host.text_engine("any") is None
        seen.host.hold_awake(True)
    assert seen.paces == []


async def test_a_host_that_holds_a_call_does_not_hold_up_the_end() -> None:
    gate = threading.Event()

    class Stuck(FakeHost):
        def hold_awake(self, on: bool) -> None:
            gate.wait(30)
            super().hold_awake(on)

    bridge = Stuck()
    host = Host(bridge, Health(FakeClock()), lambda before, now: None)
    host.hold_awake(True)
    try:
        async with asyncio.timeout(10):
            await host.close(timeout_s=0.1)
        assert bridge.calls == []
    finally:
        gate.set()
    await until(lambda: [on for name, on in bridge.calls if name == "hold_awake"] == [True, False])
