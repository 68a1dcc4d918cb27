"""The notification protocol, byte by byte, and what is fed to the watchdog."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.notify import MAX_STATUS_BYTES, Notifier, notifier_from, watchdog_s
from agent.service import Service
from agent.watchdog import Watchdog
from engines.executor import BoundedExecutor
from links.mqtt import MqttChannel, MqttSettings
from protocol.clock import FakeClock
from protocol.pulse import Listening, Pulse
from tests.conftest import Broker
from tests.unit.agent.houses import RunningHouse, config_for
from tests.unit.agent.managers import FakeManager

PERIOD_S = 0.8
FEED_S = PERIOD_S / 4


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    listening = FakeManager.at(tmp_path)
    yield listening
    listening.close()


def test_what_is_said_is_what_the_protocol_wants(manager: FakeManager) -> None:
    notifier = Notifier(manager.address)
    before_us = time.monotonic_ns() // 1000
    notifier.ready("serving\nat x")
    notifier.extend(1.5)
    notifier.reloading()
    notifier.feed()
    notifier.stopping("bye")
    heard = [manager.read(5) for _ in range(5)]
    assert heard[0] == {"READY": "1", "STATUS": "serving at x"}
    assert heard[1] == {"EXTEND_TIMEOUT_USEC": "1500000"}
    assert heard[2] is not None and heard[2]["RELOADING"] == "1"
    assert before_us <= int(heard[2]["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert heard[3:] == [{"WATCHDOG": "1"}, {"STOPPING": "1", "STATUS": "bye"}]


def test_abstract_sockets_are_understood() -> None:
    listening = FakeManager(f"@midstream-test-{secrets.token_hex(8)}")
    Notifier(listening.address).feed()
    assert listening.read(5) == {"WATCHDOG": "1"}
    listening.close()


def test_a_manager_that_is_gone_or_deaf_is_no_error(
    tmp_path: Path, manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "midstream.agent.service")
    Notifier(str(tmp_path / "nobody")).ready("x")
    manager.close()
    Notifier(manager.address).feed()
    told = [record.getMessage() for record in caplog.records]
    assert ["READY=1" in told[0], "WATCHDOG=1" in told[1]] == [True, True]


@given(st.text(max_size=2000))
def test_a_status_is_one_short_line(text: str) -> None:
    listening = FakeManager(f"@midstream-test-{secrets.token_hex(8)}")
    try:
        Notifier(listening.address).status(text)
        message = listening.read(5)
    finally:
        listening.close()
    assert message is not None and set(message) == {"STATUS"}
    assert len(message["STATUS"].encode()) <= MAX_STATUS_BYTES


def test_the_environment_says_who_listens_and_children_do_not_see_it() -> None:
    environ = {"NOTIFY_SOCKET": "/run/x", "HOME": "/"}
    assert notifier_from(environ) is not None and environ == {"HOME": "/"}
    assert notifier_from({}) is None
    assert notifier_from({"NOTIFY_SOCKET": "vsock:2:1234"}) is None


def test_the_watchdog_is_ours_only_when_the_manager_means_this_process() -> None:
    assert watchdog_s({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}, 7) == 60.0
    assert watchdog_s({"WATCHDOG_USEC": "60000000"}, 7) == 60.0
    assert watchdog_s({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "8"}, 7) is None
    for text in ("", "0", "-5", "x"):
        assert watchdog_s({"WATCHDOG_USEC": text}, 7) is None


def test_only_a_busy_counter_that_stands_still_for_too_long_is_a_hang() -> None:
    listening = Listening()

    def hung(beats: int, busy: bool, now_s: float) -> bool:
        return listening.hung([Pulse("w", beats, busy, 10.0)], now_s) == ("w",)

    assert not hung(0, False, 0.0)
    assert not hung(0, False, 1000.0), "idle"
    assert not hung(1, True, 1001.0)
    assert not hung(1, True, 1011.0), "exactly its patience"
    assert hung(1, True, 1011.5)
    assert not hung(2, True, 1012.0), "it moved"
    assert hung(2, True, 1023.0)
    assert not hung(2, False, 1024.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0.0, 4.0)), max_size=40))
def test_a_hang_means_busy_without_a_beat_for_longer_than_the_patience(
    looks: list[tuple[int, bool, float]],
) -> None:
    listening, now_s, patience_s = Listening(), 0.0, 5.0
    still_since_s, last = 0.0, None
    for beats, busy, passed_s in looks:
        now_s += passed_s
        if not busy or beats != last:
            still_since_s = now_s
        last = beats
        found = listening.hung([Pulse("w", beats, busy, patience_s)], now_s)
        assert (found == ("w",)) == (now_s - still_since_s > patience_s)


async def test_a_loop_that_hangs_is_not_fed(manager: FakeManager) -> None:
    service = Service(Notifier(manager.address), PERIOD_S)
    service.begin(lambda: "serving", tuple)
    try:
        assert "READY" in manager.until(lambda m: "READY" in m)
        await asyncio.to_thread(manager.until_fed)
        manager.until_status("hung: event loop")  # this reading holds the loop
        assert not manager.fed_within(3 * FEED_S)
        await asyncio.to_thread(manager.until_fed)  # the loop moves again, in time
    finally:
        await service.close()


def test_an_engine_worker_that_hangs_is_not_fed(manager: FakeManager) -> None:
    executor = BoundedExecutor("tensor", 2, patience_s=0.4)
    watchdog = Watchdog(Notifier(manager.address), PERIOD_S, executor.pulses)
    gate = threading.Event()
    watchdog.start()
    try:
        manager.until_fed()
        executor.submit(gate.wait, 30, on_done=lambda result, error: None, when_full="refuse")
        executor.submit(lambda: None, on_done=lambda result, error: None, when_full="refuse")
        manager.until_status("hung: tensor-")
        assert not manager.fed_within(3 * FEED_S)
        (hung,) = watchdog.hung
        assert hung in ("tensor-0", "tensor-1")  # whichever worker took it
        gate.set()
        manager.until_fed()
    finally:
        gate.set()
        watchdog.stop()
        executor.close()


def test_long_runs_of_a_slow_device_are_no_hang() -> None:
    clock = FakeClock()
    executor = BoundedExecutor("tensor", 1, clock=clock, patience_s=1.0)
    try:
        executor.call(clock.advance, 30.0)
        (pulse,) = executor.pulses()
        assert pulse.patience_s == pytest.approx(20 * 30.0)
    finally:
        executor.close()


class _NoChance(random.Random):
    def random(self) -> float:
        raise RuntimeError("no chance here")


async def test_a_control_channel_whose_task_died_is_not_fed(
    manager: FakeManager,
) -> None:
    clock = FakeClock()
    nobody = MqttSettings(host="127.0.0.1", port=1, client_id="pi", connect_s=1.0)
    channel = MqttChannel(nobody, rng=_NoChance())
    watchdog = Watchdog(Notifier(manager.address), PERIOD_S, channel.pulses, clock)
    watchdog.start()
    try:
        await asyncio.to_thread(manager.until_fed)
        channel.start()
        while channel.alive:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(manager.until_fed)
        await asyncio.to_thread(time.sleep, FEED_S)
        clock.advance(60.0)
        await asyncio.to_thread(manager.until_status, "hung: mqtt")
        assert not await asyncio.to_thread(manager.fed_within, 3 * FEED_S)
    finally:
        watchdog.stop()
        await channel.close()


async def test_a_control_channel_without_a_broker_is_fed_for_ever(manager: FakeManager) -> None:
    clock = FakeClock()
    channel = MqttChannel(MqttSettings(host="127.0.0.1", port=1, client_id="pi", connect_s=1.0))
    watchdog = Watchdog(Notifier(manager.address), PERIOD_S, channel.pulses, clock)
    watchdog.start()
    channel.start()
    try:
        for _ in range(4):
            clock.advance(3600.0)
            await asyncio.to_thread(manager.until_fed)
        assert watchdog.hung == ()
    finally:
        watchdog.stop()
        await channel.close()


async def test_a_control_channel_whose_disk_hangs_is_not_fed(
    mosquitto: Broker, manager: FakeManager, tmp_path: Path
) -> None:
    clock = FakeClock()
    path = tmp_path / "outbox.sqlite"
    settings = MqttSettings(host=mosquitto.host, port=mosquitto.port, client_id="pi", outbox_path=path)
    channel = MqttChannel(settings)
    watchdog = Watchdog(Notifier(manager.address), PERIOD_S, channel.pulses, clock)
    lock: sqlite3.Connection | None = None
    publishing: list[asyncio.Task[None]] = []
    watchdog.start()
    try:
        channel.start()
        while channel.state != "up":
            await asyncio.sleep(0.02)
        mosquitto.kill()
        while channel.state == "up":
            await asyncio.sleep(0.02)
        await channel.publish("a", b"1")  # makes the file
        lock = sqlite3.connect(path, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        publishing = [asyncio.create_task(channel.publish("b", b"2"))]
        while not any(pulse.busy for pulse in channel.pulses()):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(time.sleep, 2 * FEED_S)
        clock.advance(300.0)
        await asyncio.to_thread(manager.until_status, "hung: mqtt outbox")
        assert not await asyncio.to_thread(manager.fed_within, 3 * FEED_S)
    finally:
        if lock is not None:
            lock.execute("ROLLBACK")
            lock.close()
        await asyncio.gather(*publishing)
        watchdog.stop()
        await channel.close()


async def test_a_connected_channel_beats_while_it_is_looked_after(mosquitto: Broker) -> None:
    channel = MqttChannel(MqttSettings(host=mosquitto.host, port=mosquitto.port, client_id="pi"))
    channel.start()
    try:
        while channel.state != "up":
            await asyncio.sleep(0.02)
        first = channel.pulses()[0]
        assert first.busy
        async with asyncio.timeout(10):
            while channel.pulses()[0].beats == first.beats:
                await asyncio.sleep(0.05)
    finally:
        await channel.close()


async def test_a_whole_agent_tells_of_its_workers(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        await agent.until(lambda: agent.house.tensors.begun)
        assert Listening().hung(agent.house.pulses(), 0.0) == ()
        assert agent.house.line().startswith("ready at http://127.0.0.1:")
        assert "models: none" in agent.house.line()


async def test_a_status_that_fails_or_a_full_pool_stops_neither_the_feeding_nor_what_is_told(
    manager: FakeManager,
) -> None:
    lines: list[str] = ["first"]
    gate, pool = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    service = Service(Notifier(manager.address), PERIOD_S)
    service.begin(lambda: lines[0], tuple)
    held = asyncio.create_task(asyncio.to_thread(gate.wait, 30))
    try:
        lines.clear()  # reading it raises now
        own = ThreadPoolExecutor(1)
        loop = asyncio.get_running_loop()
        end_s = time.monotonic() + 2 * PERIOD_S
        while time.monotonic() < end_s:
            await loop.run_in_executor(own, manager.until_fed, 2.0)
        lines.append("second")
        await loop.run_in_executor(own, manager.until_status, "second")
        own.shutdown()
    finally:
        gate.set()
        await held
        await service.close()
