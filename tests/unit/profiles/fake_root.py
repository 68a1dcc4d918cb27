"""File systems of devices that are not here, built under a temporary folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CPU_PI = """processor\t: {number}
BogoMIPS\t: 108.00
Features\t: {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: {part}
CPU revision\t: 3

"""


def build(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write `files` (path -> content; a trailing slash makes a folder) below `root`."""
    for name, content in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return root


def raspberry_pi(
    model: str, chip: str, part: str, features: str, memory_kb: int, throttled: str
) -> dict[str, str | bytes]:
    """The files of a Pi as its kernel shows them."""
    cpuinfo = "".join(CPU_PI.format(number=n, features=features, part=part) for n in range(4))
    return {
        "proc/cpuinfo": cpuinfo + f"Revision\t: d03114\nModel\t\t: {model}\n",
        "proc/device-tree/model": model.encode() + b"\0",
        "proc/device-tree/compatible": b"raspberrypi,4-model-b\0brcm," + chip.encode() + b"\0",
        "proc/meminfo": f"MemTotal:        {memory_kb} kB\nMemFree:  10 kB\nMemAvailable:    {memory_kb // 2} kB\n",
        "proc/self/cgroup": "0::/system.slice/midstream.service\n",
        "proc/sys/kernel/osrelease": "6.6.31+rpt-rpi-v8\n",
        "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n',
        "sys/devices/system/cpu/online": "0-3\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1500000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1800000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "48312\n",
        "sys/devices/platform/soc/soc:firmware/get_throttled": f"{throttled}\n",
        "proc/pressure/cpu": "some avg10=12.50 avg60=1.00 avg300=0.10 total=100\n",
    }
