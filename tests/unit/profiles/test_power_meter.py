"""Joules from kernels that are not here: INA monitors, RAPL counters that wrap, batteries of every driver's taste."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.power_meter import PowerMeter, Reading, thermal_headroom_k
from tests.unit.profiles.fake_root import build

HWMON, RAPL, BATTERY = "sys/class/hwmon/hwmon2", "sys/class/powercap/intel-rapl:0", "sys/class/power_supply/BAT0"


def test_nothing_to_read_is_not_zero(tmp_path: Path) -> None:
    meter = PowerMeter(tmp_path)
    assert (meter.read(0.0), meter.source) == (None, None)
    assert thermal_headroom_k(tmp_path) is None


def test_an_ina_monitor_is_integrated_over_time(tmp_path: Path) -> None:
    meter = PowerMeter(build(tmp_path, {f"{HWMON}/name": "ina226\n", f"{HWMON}/power1_input": "4000000\n"}))
    assert meter.read(10.0) == Reading(0.0, 0.0)
    build(tmp_path, {f"{HWMON}/power1_input": "6000000\n"})
    assert meter.read(12.0) == Reading(10.0, 2.0)
    assert meter.source == "ina"
    # A gap says nothing of the power in between.
    assert meter.read(500.0) == Reading(10.0, 2.0)
    assert meter.read(501.0) == Reading(16.0, 3.0)


def test_a_jetson_counts_its_input_rail(tmp_path: Path) -> None:
    files = {f"{HWMON}/name": "ina3221\n", f"{HWMON}/in1_label": "VDD_GPU", f"{HWMON}/in2_label": "VDD_IN\n"}
    files |= {f"{HWMON}/curr1_input": "100", f"{HWMON}/in1_input": "5000"}
    files |= {f"{HWMON}/curr2_input": "1000", f"{HWMON}/in2_input": "5000"}
    meter = PowerMeter(build(tmp_path, files))
    meter.read(0.0)
    assert meter.read(2.0) == Reading(10.0, 2.0)


def test_rapl_packages_add_up_and_wrap(tmp_path: Path) -> None:
    files = {f"{RAPL}/name": "package-0\n", f"{RAPL}/energy_uj": "900000", f"{RAPL}/max_energy_range_uj": "1000000"}
    other = "sys/class/powercap/intel-rapl:1"
    files |= {f"{other}/name": "package-1", f"{other}/energy_uj": "0", f"{other}/max_energy_range_uj": "1000000"}
    # Subzones (cores, DRAM) are parts of the package or stand beside it; they are not counted twice.
    files |= {f"{RAPL}:0/name": "core", f"{RAPL}:0/energy_uj": "1"}
    meter = PowerMeter(build(tmp_path, files))
    assert meter.read(0.0) == Reading(0.0, 0.0)
    build(tmp_path, {f"{RAPL}/energy_uj": "100000", f"{other}/energy_uj": "300000", f"{RAPL}:0/energy_uj": "900000"})
    found = meter.read(100.0)
    assert found is not None
    assert (found.joules, found.seconds) == (pytest.approx(0.2 + 0.3), 100.0)
    assert meter.source == "rapl"


@pytest.mark.parametrize(
    ("files", "watts"),
    [
        ({"status": "Discharging", "power_now": "5000000"}, 5.0),
        ({"status": "Discharging", "current_now": "-1000000", "voltage_now": "4000000"}, 4.0),
        ({"status": "Charging", "power_now": "5000000"}, None),
        ({"status": "Discharging", "power_now": "5000000", "scope": "Device"}, None),
    ],
)
def test_a_battery_tells_its_drain_while_it_discharges(
    tmp_path: Path, files: dict[str, str], watts: float | None
) -> None:
    build(tmp_path, {f"{BATTERY}/type": "Battery\n", **{f"{BATTERY}/{name}": text for name, text in files.items()}})
    meter = PowerMeter(tmp_path)
    meter.read(0.0)
    assert meter.read(1.0) == (None if watts is None else Reading(watts, 1.0))


def test_headroom_is_that_of_the_zone_nearest_to_its_first_trip(tmp_path: Path) -> None:
    zone = "sys/class/thermal/thermal_zone"
    files = {f"{zone}0/temp": "60000", f"{zone}0/trip_point_0_type": "passive", f"{zone}0/trip_point_0_temp": "80000"}
    files |= {f"{zone}0/trip_point_1_type": "critical", f"{zone}0/trip_point_1_temp": "110000"}
    files |= {f"{zone}1/temp": "70000", f"{zone}1/trip_point_0_type": "active", f"{zone}1/trip_point_0_temp": "50000"}
    files |= {f"{zone}2/temp": "-274000"}
    assert thermal_headroom_k(build(tmp_path, files)) == pytest.approx(15.0)
