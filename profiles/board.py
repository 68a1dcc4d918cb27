"""What a small board may suffer from, from /proc, /sys, /run and /etc below any root: Wi-Fi power save, card, clock.

As everywhere in this room a file that is missing or odd means None, never a guess.
"""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path

from attrs import frozen

from profiles.files import read_int, read_text

_SECTOR_BYTES = 512
_SIOCGIWPOWER = 0x8B2D
_MAX_LISTED = 32


@frozen
class Card:
    """An SD card or eMMC and what was written to it since boot. kind: `SD` or `MMC`."""

    name: str
    kind: str
    written_bytes: int
    up_s: float

    @property
    def bytes_per_s(self) -> float:
        """Mean since boot."""
        return self.written_bytes / self.up_s if self.up_s > 0 else 0.0


@frozen
class TimeSource:
    """Where the wall clock comes from. synchronised: what systemd-timesyncd says, None when it does not run here."""

    has_rtc: bool
    synchronised: bool | None


def wifi_interfaces(root: Path = Path("/")) -> tuple[str, ...]:
    """Names of the wireless interfaces."""
    try:
        found = sorted((root / "sys/class/net").iterdir())[:_MAX_LISTED]
    except OSError:
        return ()
    return tuple(path.name for path in found if (path / "wireless").is_dir() or (path / "phy80211").exists())


def wifi_power_save(interface: str) -> bool | None:
    """Whether the driver of this machine's interface saves power now; None when it does not say."""
    import fcntl

    request = struct.pack("16siBBH8x", interface.encode()[:15], 0, 0, 0, 0)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            reply = fcntl.ioctl(any_socket, _SIOCGIWPOWER, request)
    except OSError:
        return None
    return power_save_of(reply)


def power_save_of(reply: bytes) -> bool:
    """The answer to SIOCGIWPOWER: a name of 16 bytes, then struct iw_param (value, fixed, disabled, flags)."""
    _, _, disabled, _ = struct.unpack_from("iBBH", reply, 16)
    return not disabled


def configured_power_save(root: Path = Path("/")) -> bool | None:
    """What NetworkManager's configuration asks for (2 is off, 3 is on); None where it says nothing."""
    found: bool | None = None
    folders = ("usr/lib/NetworkManager/conf.d", "etc/NetworkManager/conf.d")
    for folder in folders:
        try:
            files = sorted((root / folder).glob("*.conf"))[:_MAX_LISTED]
        except OSError:
            continue
        for file in files:
            value = re.search(r"^\s*wifi\.powersave\s*=\s*(\d)\s*$", read_text(file) or "", re.MULTILINE)
            if value and value.group(1) in "23":
                found = value.group(1) == "3"
    return found


def cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """Every SD card and eMMC with its writes since boot."""
    uptime = re.match(r"(\d{1,12}(?:\.\d+)?)\s", (read_text(root / "proc/uptime") or "") + " ")
    if uptime is None:
        return ()
    found = []
    try:
        devices = sorted((root / "sys/block").glob("mmcblk*"))[:_MAX_LISTED]
    except OSError:
        return ()
    for device in devices:
        counters = (read_text(device / "stat") or "").split()
        if re.fullmatch(r"mmcblk\d+", device.name) and len(counters) > 6 and counters[6].isdecimal():
            kind = read_text(device / "device/type") or "SD"
            found.append(Card(device.name, kind, int(counters[6]) * _SECTOR_BYTES, float(uptime.group(1))))
    return tuple(found)


def time_source(root: Path = Path("/")) -> TimeSource:
    """Whether there is a battery-backed clock, and whether the time was fetched since boot."""
    try:
        clocks = list((root / "sys/class/rtc").glob("rtc*"))
    except OSError:
        clocks = []
    # A clock without a battery (a Pi 5 as it comes) counts from 1970 or 2000 after each power cut.
    set_before = any((read_int(clock / "since_epoch") or 0) > 1_600_000_000 for clock in clocks)
    daemon = root / "run/systemd/timesync"
    return TimeSource(set_before, (daemon / "synchronized").exists() if daemon.is_dir() else None)


def under_voltage_alarm(root: Path = Path("/")) -> bool | None:
    """The kernel's own under-voltage alarm (hwmon `rpi_volt`), for systems that do not show the throttle word."""
    try:
        sensors = sorted((root / "sys/class/hwmon").iterdir())[:_MAX_LISTED]
    except OSError:
        return None
    for sensor in sensors:
        if read_text(sensor / "name") == "rpi_volt":
            alarm = read_int(sensor / "in0_lcrit_alarm")
            return None if alarm is None else alarm > 0
    return None
