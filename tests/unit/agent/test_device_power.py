"""Power of the device as dispatch is told it: from files, and from a host program that knows better."""

from __future__ import annotations

import time
from pathlib import Path

from agent.device_power import DevicePower
from agent.fakes_host import FakeHost
from agent.health import Health
from agent.host import Host
from agent.host_bridge import HostState
from profiles.energy import PowerState
from profiles.power_meter import Reading
from tests.unit.profiles.fake_root import build

FILES = {
    "sys/class/power_supply/BAT0/type": "Battery",
    "sys/class/power_supply/BAT0/status": "Discharging",
    "sys/class/power_supply/BAT0/capacity": "40",
    "sys/class/power_supply/BAT0/power_now": "3000000",
    "sys/class/thermal/thermal_zone0/temp": "75000",
}


def host(state: HostState) -> Host:
    return Host(FakeHost(state), Health(time.monotonic), lambda before, now: None)


def test_files_tell_source_charge_headroom_and_drain(tmp_path: Path) -> None:
    power = DevicePower(build(tmp_path, FILES))
    assert power.sample(0.0) == (Reading(0.0, 0.0), PowerState("battery", 0.4, 10.0))
    assert power.sample(2.0)[0] == Reading(6.0, 2.0)


def test_nothing_is_known_of_a_board_without_gauges(tmp_path: Path) -> None:
    assert DevicePower(tmp_path).sample(0.0) == (None, PowerState())


def test_the_host_program_knows_better(tmp_path: Path) -> None:
    told = HostState(charging=True, battery_ratio=0.9, thermal="severe")
    assert DevicePower(build(tmp_path, FILES), host(told)).sample(0.0)[1] == PowerState("mains", 0.9, 0.0)
    silent = DevicePower(build(tmp_path, FILES), host(HostState())).sample(0.0)[1]
    assert silent == PowerState("battery", 0.4, 30.0)
