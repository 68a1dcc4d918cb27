"""Facts from /proc, /sys and the device tree, under any root folder.

Every file may be missing, unreadable or garbage: what it would have told is then None. We read sysfs ourselves because
psutil trips over gaps (psutil 7.2.2 raises when scaling_max_freq is missing; giampaolo/psutil#1310, #1939, #1071).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from profiles.cgroup import Limits, read_limits
from profiles.cpu import features_from_cpuinfo, features_from_hwcap, soc_name
from profiles.facts import Facts, Throttle
from profiles.files import read_int, read_text
from profiles.power import read_power

_THROTTLE_BITS = ("under_voltage", "frequency_capped", "throttled", "soft_temperature_limit")

# Offsets and signs of broken sensors; no working silicon is outside of this.
_PLAUSIBLE_C = (-60.0, 160.0)


@frozen
class HostNumbers:
    """What only the running system tells; all unknown for a root that is not this machine's."""

    arch: str | None = None
    page_bytes: int | None = None
    hwcap: int | None = None
    hwcap2: int | None = None
    affinity: int | None = None


@frozen
class Usable:
    """What this process may use: CPUs (a fraction under a quota) and bytes of memory; None where unknown."""

    cores: float | None = None
    memory_bytes: int | None = None


def usable(root: Path, affinity: int | None = None) -> Usable:
    """The machine's CPUs and memory with affinity and cgroup limits applied."""
    limits = read_limits(root)
    present = _cores_present(root, read_text(root / "proc/cpuinfo") or "")
    return Usable(_usable_cores(present, affinity, limits), _least(_meminfo(root, "MemTotal"), limits.memory_bytes))


def collect_linux(root: Path, host: HostNumbers = HostNumbers()) -> Facts:
    """Facts of the Linux whose file system is at `root`."""
    cpuinfo = read_text(root / "proc/cpuinfo") or ""
    limits = read_limits(root)
    total = _meminfo(root, "MemTotal")
    present = _cores_present(root, cpuinfo)
    power, battery = read_power(root)
    frequency, maximum = _frequencies(root)
    return Facts(
        model=device_tree_model(root) or _dmi(root),
        soc=soc_name(root, cpuinfo),
        cpu=_field(cpuinfo, "model name") or _field(cpuinfo, "Processor"),
        arch=host.arch,
        cores=_usable_cores(present, host.affinity, limits),
        cores_present=present,
        cpu_features=features_from_cpuinfo(cpuinfo) | features_from_hwcap(host.arch, host.hwcap, host.hwcap2),
        memory_bytes=_least(total, limits.memory_bytes),
        memory_total_bytes=total,
        memory_available_bytes=_meminfo(root, "MemAvailable"),
        page_bytes=host.page_bytes,
        os=_os_name(root),
        kernel=read_text(root / "proc/sys/kernel/osrelease") or None,
        temperature_c=temperature_c(root),
        throttle=throttle(root),
        governor=_governor(root),
        frequency_hz=frequency,
        frequency_max_hz=maximum,
        accelerators=accelerators(root),
        power=power,
        battery_ratio=battery,
        stalled_ratio=_pressure(root),
    )


def names(root: Path, arch: str | None = None) -> Facts:
    """Board, chip, CPU and architecture; nothing else is looked for."""
    cpuinfo = read_text(root / "proc/cpuinfo") or ""
    return Facts(
        model=device_tree_model(root) or _dmi(root),
        soc=soc_name(root, cpuinfo),
        cpu=_field(cpuinfo, "model name") or _field(cpuinfo, "Processor"),
        arch=arch,
    )


def device_tree_model(root: Path) -> str | None:
    """The board's name; the file ends with a NUL byte."""
    return read_text(root / "proc/device-tree/model") or read_text(root / "sys/firmware/devicetree/base/model") or None


def temperature_c(root: Path = Path("/")) -> float | None:
    """The hottest CPU or SoC zone, else the hottest zone of any kind."""
    found: list[tuple[bool, float]] = []
    for zone in _glob(root, "sys/class/thermal/thermal_zone*"):
        raw = read_int(zone / "temp")
        if raw is None or not _PLAUSIBLE_C[0] <= raw / 1000 <= _PLAUSIBLE_C[1]:
            continue
        kind = (read_text(zone / "type") or "").lower()
        found.append((any(name in kind for name in ("cpu", "soc", "pkg")), raw / 1000))
    return max(found)[1] if found else None


def throttle(root: Path = Path("/")) -> Throttle | None:
    """The Pi firmware's throttle word, from sysfs (no vcgencmd, no /dev/vcio)."""
    for pattern in ("sys/devices/platform/soc/*firmware/get_throttled", "sys/devices/platform/*/*/get_throttled"):
        for path in _glob(root, pattern):
            word = read_int(path, base=16)
            if word is not None:
                return decode_throttle(word)
    return None


def decode_throttle(word: int) -> Throttle:
    """Bits 0-3 are now, 16-19 since boot (raspberrypi/linux#1320)."""
    now = frozenset(name for bit, name in enumerate(_THROTTLE_BITS) if word >> bit & 1)
    since = frozenset(name for bit, name in enumerate(_THROTTLE_BITS) if word >> (16 + bit) & 1)
    return Throttle(now=now, since_boot=since)


def accelerators(root: Path = Path("/")) -> tuple[str, ...]:
    """Names of accelerators whose device files or drivers are there; that they work is for an engine to find out."""
    signs = {
        "coral-edgetpu": ("dev/apex_*",),
        "hailo": ("dev/hailo*",),
        "rknpu": ("dev/rknpu*", "sys/module/rknpu", "sys/bus/platform/drivers/RKNPU"),
        "jetson": ("etc/nv_tegra_release", "dev/nvhost-gpu"),
        "npu-accel": ("dev/accel/accel*",),
        "nvidia": ("dev/nvidia0",),
        "gpu-render": ("dev/dri/renderD*",),
    }
    found = [name for name, patterns in signs.items() if any(True for p in patterns for _ in _glob(root, p))]
    compatible = read_text(root / "proc/device-tree/compatible") or ""
    if "nvidia,tegra" in compatible and "jetson" not in found:
        found.append("jetson")
    return tuple(found)


def _glob(root: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from sorted(root.glob(pattern))[:256]
    except OSError:
        return


def _field(cpuinfo: str, name: str) -> str | None:
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip()[:128] if found else None


def _dmi(root: Path) -> str | None:
    """Vendor and product of a PC; placeholders are no name."""
    parts = [read_text(root / "sys/class/dmi/id" / name) or "" for name in ("sys_vendor", "product_name")]
    text = " ".join(part for part in parts if part and "to be filled" not in part.lower())
    return text[:128] or None


def _meminfo(root: Path, name: str) -> int | None:
    text = read_text(root / "proc/meminfo") or ""
    found = re.search(rf"^{name}:\s*(\d{{1,15}}) kB$", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _cores_present(root: Path, cpuinfo: str) -> int | None:
    ranges = read_text(root / "sys/devices/system/cpu/online") or ""
    if re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", ranges):
        bounds = (part.partition("-") for part in ranges.split(","))
        count = sum(int(last or first) - int(first) + 1 for first, _, last in bounds)
        if count > 0:
            return count
    return len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or None


def _usable_cores(present: int | None, affinity: int | None, limits: Limits) -> float | None:
    known = [float(n) for n in (present, affinity, limits.cpus) if n is not None]
    return min(known) if known else None


def _least(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return min(known) if known else None


def _os_name(root: Path) -> str | None:
    for path in ("etc/os-release", "usr/lib/os-release"):
        found = re.search(r'^PRETTY_NAME="?([^"\n]{1,128})"?$', read_text(root / path) or "", re.MULTILINE)
        if found:
            return found.group(1)
    return None


def _governor(root: Path) -> str | None:
    for path in _glob(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"):
        if text := read_text(path):
            return text[:32]
    return None


def _frequencies(root: Path) -> tuple[int | None, int | None]:
    """Present and highest frequency over all CPUs in Hz; each file may be missing without the others."""
    present: list[int] = []
    highest: list[int] = []
    for folder in _glob(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq"):
        for names, found in ((("scaling_cur_freq",), present), (("scaling_max_freq", "cpuinfo_max_freq"), highest)):
            values = (read_int(folder / name) for name in names)
            khz = next((value for value in values if value is not None and value > 0), None)
            if khz is not None:
                found.append(khz * 1000)
    return max(present, default=None), max(highest, default=None)


def _pressure(root: Path) -> dict[str, float]:
    """Share of the last 10 s in which some task stalled for cpu, memory or io (PSI), where the kernel has it."""
    found: dict[str, float] = {}
    for name in ("cpu", "memory", "io"):
        line = re.search(r"^some avg10=(\d{1,3}\.\d+)", read_text(root / "proc/pressure" / name) or "", re.MULTILINE)
        if line:
            found[name] = min(1.0, float(line.group(1)) / 100)
    return found
