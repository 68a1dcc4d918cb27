"""Where this device's energy comes from and goes: its kernel's files, and what the host program knows better."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from agent.host import Host
from agent.host_bridge import Thermal
from profiles.energy import PowerState
from profiles.power import read_power
from profiles.power_meter import PowerMeter, Reading, thermal_headroom_k

HOST_HEADROOM_K: dict[Thermal, float] = {"none": 30.0, "light": 10.0, "moderate": 5.0}
"""Android tells steps and no temperatures; from `severe` on it throttles."""


class DevicePower:
    """`gateway.dispatch_live.Power` of an agent: some small files, a few milliseconds where a monitor is slow."""

    def __init__(self, root: Path = Path("/"), host: Host | None = None) -> None:
        self._root = root
        self._host = host
        self._meter = PowerMeter(root)

    def sample(self, now_s: float) -> tuple[Reading | None, PowerState]:
        """The meter's sums and the state now."""
        power, charge = read_power(self._root)
        state = PowerState(power, charge, thermal_headroom_k(self._root))
        return self._meter.read(now_s), state if self._host is None else _told(state, self._host)


def _told(state: PowerState, host: Host) -> PowerState:
    told = host.state
    if told.charging is not None:
        state = evolve(state, power="mains" if told.charging else "battery")
    return evolve(
        state,
        charge=state.charge if told.battery_ratio is None else told.battery_ratio,
        headroom_k=HOST_HEADROOM_K.get(told.thermal, 0.0),
    )
