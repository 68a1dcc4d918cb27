"""Joules that this device has used, where its kernel can tell: INA2xx monitors, RAPL counters, or the battery's drain.

An INA2xx on the input rail sees the whole board; RAPL sees the processor's packages by counters that wrap; a battery
tells its power only while it discharges. Power is integrated between readings, so a meter is read while work runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from attrs import define, field, frozen

from profiles.files import read_int, read_text

Source = Literal["ina", "rapl", "battery"]

INPUT_RAILS = ("VDD_IN", "POM_5V_IN", "VIN_SYS_5V0")
"""Names of the board's input on Jetsons, whose monitors have a channel per rail; else the first channel counts."""

MAX_ENTRIES = 64
LONGEST_GAP_S = 30.0
"""Power is not taken as constant for longer than this: after such a gap the meter begins anew."""

ASSUMED_TRIP_C = 85.0
"""Where a zone names no trip point."""


@frozen
class Reading:
    """What was used since the first reading, and the seconds that it was used in; meant for differences."""

    joules: float
    seconds: float


@define
class PowerMeter:
    """Reads below `root`. Gaps over which nothing can be said count neither joules nor seconds."""

    root: Path = Path("/")
    source: Source | None = None
    _joules: float = 0.0
    _seconds: float = 0.0
    _counters: Mapping[str, int] = field(factory=dict)
    _last_s: float = 0.0
    _last_w: float = 0.0

    def read(self, now_s: float) -> Reading | None:
        """The sums so far; None where nothing tells."""
        watts = _ina_watts(self.root)
        if watts is not None:
            return self._integrated("ina", watts, now_s)
        counters = _rapl(self.root)
        if counters:
            return self._counted(counters, now_s)
        watts = _battery_watts(self.root)
        return None if watts is None else self._integrated("battery", watts, now_s)

    def _integrated(self, source: Source, watts: float, now_s: float) -> Reading:
        """Trapezoids between readings."""
        passed_s, before_w = now_s - self._last_s, self._last_w
        known = self.source == source and passed_s <= LONGEST_GAP_S
        self._last_w = watts
        return self._moved(source, passed_s * (watts + before_w) / 2 if known else None, now_s)

    def _counted(self, counters: Mapping[str, tuple[int, int]], now_s: float) -> Reading:
        """The packages' counters added up; each wraps at its own range."""
        before, self._counters = self._counters, {name: count for name, (count, _) in counters.items()}
        if self.source != "rapl" or before.keys() != counters.keys():
            return self._moved("rapl", None, now_s)
        moved = sum(
            count - before[name] + (range_uj if count < before[name] else 0)
            for name, (count, range_uj) in counters.items()
        )
        return self._moved("rapl", moved / 1e6, now_s)

    def _moved(self, source: Source, joules: float | None, now_s: float) -> Reading:
        passed_s, self._last_s, self.source = now_s - self._last_s, now_s, source
        if joules is not None and passed_s > 0:
            self._joules += joules
            self._seconds += passed_s
        return Reading(self._joules, self._seconds)


def thermal_headroom_k(root: Path = Path("/")) -> float | None:
    """Kelvin until the first thermal zone begins to throttle; None without a zone that can be read."""
    rooms = []
    for zone in _entries(root / "sys/class/thermal", "thermal_zone"):
        millidegrees = read_int(zone / "temp")
        if millidegrees is None or not -50_000 < millidegrees < 200_000:
            continue
        trips = [trip for n in range(16) if (trip := _trip_c(zone, n)) is not None]
        rooms.append(min(trips, default=ASSUMED_TRIP_C) - millidegrees / 1e3)
    return min(rooms, default=None)


def _trip_c(zone: Path, number: int) -> float | None:
    kind = read_text(zone / f"trip_point_{number}_type")
    millidegrees = read_int(zone / f"trip_point_{number}_temp")
    if kind not in ("passive", "hot", "critical") or millidegrees is None or millidegrees <= 0:
        return None
    return millidegrees / 1e3


def _ina_watts(root: Path) -> float | None:
    for monitor in _entries(root / "sys/class/hwmon", "hwmon"):
        if (read_text(monitor / "name") or "").lower().startswith(("ina2", "ina3")):
            watts = _channel_watts(monitor, _channel(monitor))
            if watts is not None:
                return watts
    return None


def _channel(monitor: Path) -> int:
    """The channel of the board's input."""
    for channel in range(1, 9):
        if read_text(monitor / f"in{channel}_label") in INPUT_RAILS:
            return channel
    return 1


def _channel_watts(monitor: Path, channel: int) -> float | None:
    """hwmon's units: microwatts, milliamperes, millivolts. On single-channel parts in0 is the shunt, in1 the bus."""
    microwatts = read_int(monitor / f"power{channel}_input")
    if microwatts is not None:
        return microwatts / 1e6
    milliamperes, millivolts = read_int(monitor / f"curr{channel}_input"), read_int(monitor / f"in{channel}_input")
    return None if milliamperes is None or millivolts is None else milliamperes * millivolts / 1e6


def _rapl(root: Path) -> Mapping[str, tuple[int, int]]:
    """(microjoules, range) of each package by its folder; usually only root may read them."""
    found = {}
    for zone in _entries(root / "sys/class/powercap", "intel-rapl:"):
        if zone.name.count(":") == 1 and (read_text(zone / "name") or "").startswith("package"):
            microjoules, range_uj = read_int(zone / "energy_uj"), read_int(zone / "max_energy_range_uj")
            if microjoules is not None:
                found[zone.name] = (microjoules, range_uj or 0)
    return found


def _battery_watts(root: Path) -> float | None:
    """The drain of all batteries of the machine itself; None unless one discharges."""
    watts: float | None = None
    for supply in _entries(root / "sys/class/power_supply", ""):
        if (read_text(supply / "type") or "").lower() != "battery":
            continue
        scope, status = (read_text(supply / name) or "" for name in ("scope", "status"))
        if scope.lower() == "device" or status.lower() != "discharging":
            continue
        drain = _drain_watts(supply)
        watts = drain if watts is None else watts + (drain or 0.0)
    return watts


def _drain_watts(supply: Path) -> float | None:
    """Drivers differ in the sign of what discharges."""
    microwatts = read_int(supply / "power_now")
    if microwatts is not None:
        return abs(microwatts) / 1e6
    microamperes, microvolts = read_int(supply / "current_now"), read_int(supply / "voltage_now")
    return None if microamperes is None or microvolts is None else abs(microamperes * microvolts) / 1e12


def _entries(folder: Path, prefix: str) -> Sequence[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.startswith(prefix))[:MAX_ENTRIES]
    except OSError:
        return ()
