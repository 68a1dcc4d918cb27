"""Where the device's power comes from."""

from __future__ import annotations

from pathlib import Path

from profiles.files import read_int, read_text
from protocol.device import Power


def read_power(root: Path = Path("/")) -> tuple[Power | None, float | None]:
    """(mains or battery, charge of the battery 0-1); None where nothing tells, as on a board without a gauge."""
    mains_online: bool | None = None
    discharging: bool | None = None
    charge: float | None = None
    try:
        supplies = sorted((root / "sys/class/power_supply").iterdir())[:32]
    except OSError:
        supplies = []
    for supply in supplies:
        kind = (read_text(supply / "type") or "").lower()
        if kind == "battery":
            if (read_text(supply / "scope") or "").lower() == "device":
                continue  # of a mouse or a headset
            status = (read_text(supply / "status") or "").lower()
            if status in ("discharging", "charging", "full", "not charging"):
                discharging = (discharging or False) or status == "discharging"
            percent = read_int(supply / "capacity")
            if percent is not None and 0 <= percent <= 100:
                charge = percent / 100
        elif kind in ("mains", "usb", "wireless"):
            online = read_int(supply / "online")
            if online is not None:
                mains_online = (mains_online or False) or online > 0
    return _source(mains_online, discharging), charge


def _source(mains_online: bool | None, discharging: bool | None) -> Power | None:
    if discharging is not None:
        return "battery" if discharging else "mains"
    return "mains" if mains_online else None
