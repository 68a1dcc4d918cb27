"""What was learnt of the links, over restarts and networks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agent.link_memory import KEEP_S, MAX_KEPT, OLD_S, LinkMemory
from netprobe.probe import LinkProbe
from protocol.clock import FakeClock, WallTime
from protocol.events import TransferSample
from tests.unit.agent.houses import RunningHouse, config_for

HOST, PORT = "10.0.0.9", 8791


class Device:
    """A probe and its memory on a network that the test chooses; `restart` makes both anew from the file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "links.json"
        self.network: str | None = "10.0.0.2"
        self.wall = WallTime(2e9, True)
        self.restart()

    def restart(self, later_s: float = 0.0, trusted: bool = True) -> None:
        self.wall = WallTime(self.wall.unix_s + later_s, trusted)
        self.clock = FakeClock(50.0)
        self.probe = LinkProbe(self.clock)
        self.memory = LinkMemory(self.path, self.probe, self.clock, lambda: self.wall, lambda host, port: self.network)
        self.memory.lead("cloud", HOST, PORT, lambda: None)

    def move(self, network: str | None) -> None:
        self.network = network
        self.clock.advance(2.0)
        self.memory.look()

    def send(self, rate: float, times: int = 5) -> None:
        for size in (20_000, 200_000, 80_000, 400_000, 60_000)[:times]:
            self.clock.advance(size / rate)
            self.probe.add(
                TransferSample(at_s=self.clock(), link="cloud", direction="up", size_bytes=size, seconds=size / rate)
            )

    def seconds_for(self, size: int) -> float:
        return self.probe.view("cloud").seconds_for(size)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


async def test_a_restart_forgets_nothing_and_knows_how_old_it_is(device: Device) -> None:
    device.send(1e6)
    await device.memory.keep()
    device.restart(later_s=120.0)
    assert device.seconds_for(100_000) == pytest.approx(0.1, rel=0.01)
    assert device.probe.view("cloud").age_s == pytest.approx(120.0, abs=1.0)


@pytest.mark.parametrize(("later_s", "trusted"), [(-3600.0, True), (60.0, False)])
async def test_without_a_clock_to_trust_it_is_known_and_old(device: Device, later_s: float, trusted: bool) -> None:
    device.send(1e6)
    await device.memory.keep()
    device.restart(later_s, trusted)
    view = device.probe.view("cloud")
    assert view.samples == 5
    assert view.age_s >= OLD_S


def test_another_network_is_another_link_and_the_first_is_known_again_later(device: Device) -> None:
    device.send(1e6)
    device.move("172.16.0.5")
    assert device.probe.view("cloud").samples == 0
    device.send(1e5)
    device.clock.advance(300.0)
    device.move("10.0.0.2")
    assert device.seconds_for(100_000) == pytest.approx(0.1, rel=0.01)
    assert device.probe.view("cloud").age_s > 300.0
    device.move("172.16.0.5")
    assert device.seconds_for(100_000) == pytest.approx(1.0, rel=0.01)


def test_without_any_network_nothing_is_forgotten(device: Device) -> None:
    device.send(1e6)
    device.move(None)
    assert device.probe.view("cloud").samples == 5


def test_the_route_is_looked_at_once_a_second_at_most(device: Device) -> None:
    device.memory.look()
    device.network = "172.16.0.5"
    device.send(1e6)
    device.clock.now_s = 50.5
    device.memory.look()
    assert device.probe.view("cloud").samples == 5


def test_connecting_again_over_the_same_way_forgets_nothing_and_another_coordinator_does(device: Device) -> None:
    device.send(1e6)
    device.memory.lead("cloud", HOST, PORT, lambda: None)
    assert device.probe.view("cloud").samples == 5
    device.memory.lead("cloud", "10.0.0.8", PORT, lambda: None)
    assert device.probe.view("cloud").samples == 0


@pytest.mark.parametrize("content", [b"", b"not json", b'{"schema":"other/1.0","saved_unix_s":1,"clock_trusted":true}'])
def test_a_damaged_or_foreign_file_is_ignored_with_one_line(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "links.json").write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="midstream.agent.links"):
        device = Device(tmp_path)
    assert len(caplog.records) == 1
    assert device.probe.view("cloud").samples == 0


async def test_an_hour_of_writing_is_within_what_a_card_bears(device: Device) -> None:
    for number in range(MAX_KEPT + 4):
        device.move(f"10.0.{number}.2")
        for _ in range(9):
            device.send(1e6 / 3)
        device.clock.advance(0.1)
    await device.memory.keep()
    size = device.path.stat().st_size
    assert size * 3600 / KEEP_S < 0.2e6
    stamp = device.path.stat().st_mtime_ns
    await device.memory.keep()
    assert device.path.stat().st_mtime_ns == stamp


async def test_a_full_disk_is_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    device = Device(tmp_path / "file")
    device.send(1e6)
    with caplog.at_level(logging.WARNING, logger="midstream.agent.links"):
        await device.memory.keep()
    assert "not kept" in caplog.text


async def test_an_agent_knows_its_links_after_a_restart(tmp_path: Path) -> None:
    sample = TransferSample(at_s=0.0, link="cloud", direction="up", size_bytes=100_000, seconds=0.5)
    async with RunningHouse(config_for(tmp_path)) as agent:
        agent.house.links.lead("cloud", "127.0.0.1", 1, lambda: None)
        agent.house.probe.add(sample)
    async with RunningHouse(config_for(tmp_path)) as agent:
        agent.house.links.lead("cloud", "127.0.0.1", 1, lambda: None)
        assert agent.house.probe.view("cloud").seconds_for(100_000) == pytest.approx(0.5)
