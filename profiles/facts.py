"""Facts about the device this runs on: collected once, cheaply, with None for everything unknown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, field, frozen

from protocol.device import DeviceProfile, Measured, Power


@frozen
class Throttle:
    """The firmware's throttle word of a Raspberry Pi: what holds now, and what has happened since boot.

    Names: `under_voltage`, `frequency_capped`, `throttled`, `soft_temperature_limit`. Bits 0-3 are now, 16-19 are
    sticky until the next boot; under-voltage is told by polling only.
    """

    now: frozenset[str]
    since_boot: frozenset[str]


@frozen
class Facts:
    """Everything known of a device. Sizes are bytes, frequencies Hz, temperatures degrees Celsius.

    memory_bytes and cores are what this process may use (cgroup limits and CPU affinity applied); memory_total_bytes
    and cores_present are what the machine has. cores may be a fraction of a CPU quota; the profile rounds it up.
    """

    model: str | None = None
    soc: str | None = None
    cpu: str | None = None
    arch: str | None = None
    cores: float | None = None
    cores_present: int | None = None
    cpu_features: frozenset[str] = frozenset()
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    page_bytes: int | None = None
    os: str | None = None
    kernel: str | None = None
    temperature_c: float | None = None
    throttle: Throttle | None = None
    governor: str | None = None
    frequency_hz: int | None = None
    frequency_max_hz: int | None = None
    accelerators: tuple[str, ...] = ()
    power: Power | None = None
    battery_ratio: float | None = None
    stalled_ratio: Mapping[str, float] = field(factory=dict)


NPUS = ("coral-edgetpu", "hailo", "rknpu", "jetson", "npu-accel")
"""Accelerators that run neural networks and little else, in order of preference for the profile's `npu`."""


def collect(root: Path = Path("/")) -> Facts:
    """Facts of the machine whose file system is at `root`; live calls are made only for the running one."""
    from profiles.linux import collect_linux
    from profiles.live import fill, host_numbers, onnxruntime_builds

    if root != Path("/"):
        return collect_linux(root)
    facts = fill(collect_linux(root, host_numbers()))
    return evolve(facts, accelerators=(*facts.accelerators, *onnxruntime_builds()))


def named(root: Path = Path("/")) -> Facts:
    """The names alone, from small files: enough to know a board before anything else is collected."""
    from profiles.linux import names
    from profiles.live import machine

    return names(root, machine() if root == Path("/") else None)


def usable_cores(root: Path = Path("/")) -> int:
    """CPUs that this process can keep busy, at least 1; affinity and cgroup quota applied.

    A part of a CPU is not counted: a thread that a quota has no whole CPU for is stopped in each period.
    """
    from profiles.linux import usable
    from profiles.live import affinity

    here = root == Path("/")
    cores = usable(root, affinity() if here else None).cores
    if cores is None:
        cores = (os.cpu_count() if here else None) or 1
    return max(1, int(cores))


def usable_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may use, cgroup limits applied; None when nothing tells."""
    from profiles.linux import usable
    from profiles.live import memory_present_bytes

    found = usable(root).memory_bytes
    return found if found is not None or root != Path("/") else memory_present_bytes()


def model_budget_bytes(least_bytes: int, root: Path = Path("/")) -> int:
    """Memory that loaded models may take: half of what this process may use, the rest is for everything else.

    At least `least_bytes`, but never more than three quarters: a container that fills its memory is killed.
    """
    limit = usable_memory_bytes(root)
    return least_bytes if limit is None else min(max(least_bytes, limit // 2), limit * 3 // 4)


def cpu_identity(facts: Facts) -> str:
    """What identifies the CPU for the benchmark's key: name, features and usable cores."""
    parts = [facts.soc or "", facts.cpu or "", facts.arch or "", *sorted(facts.cpu_features), str(_whole(facts.cores))]
    return "|".join(parts)


def device_profile(
    facts: Facts,
    device_id: str,
    *,
    labels: Mapping[str, str] | None = None,
    engines: Mapping[str, str] | None = None,
    measured: tuple[Measured, ...] = (),
    key: str = "",
    slowdown_declared: float = 1.0,
) -> DeviceProfile:
    """The document that registers this device."""
    bandwidth = [item for item in measured if item.what == "memory_bandwidth" and item.median_s > 0]
    return DeviceProfile(
        device_id=device_id,
        labels=dict(labels or {}),
        soc=facts.model or facts.soc or facts.cpu,
        cores=_whole(facts.cores),
        cpu_features=facts.cpu_features,
        memory_bytes=facts.memory_bytes,
        page_bytes=facts.page_bytes,
        os=facts.os,
        npu=next((name for name in NPUS if name in facts.accelerators), None),
        engines=dict(engines or {}),
        power=facts.power,
        measured=measured,
        key=key,
        arch=facts.arch,
        accelerators=facts.accelerators,
        memory_bytes_per_s=(1 << 30) / bandwidth[-1].median_s if bandwidth else None,
        slowdown_declared=slowdown_declared,
    )


def _whole(cores: float | None) -> int | None:
    return None if cores is None else max(1, -int(-cores // 1))
