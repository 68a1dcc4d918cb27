"""Limits of the control groups this process lives in: MemTotal is not to be believed in a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from attrs import frozen

from profiles.files import read_int, read_text

# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT_BYTES = 1 << 60


@frozen
class Limits:
    """Memory in bytes and CPUs (a fraction for quotas); None where nothing limits."""

    memory_bytes: int | None = None
    cpus: float | None = None


def read_limits(root: Path) -> Limits:
    """The tightest limits over this process's groups and all their parents, v2 and v1."""
    memory: list[int] = []
    cpus: list[float] = []
    base = root / "sys/fs/cgroup"
    for controllers, group in _groups(root):
        for folder in _upwards(base, controllers, group):
            _add_v2(folder, memory, cpus)
            _add_v1(folder, memory, cpus)
    return Limits(min(memory, default=None), min(cpus, default=None))


def _groups(root: Path) -> list[tuple[str, str]]:
    """(controllers, path) per line of /proc/self/cgroup; the root group when there is no such file."""
    found = [("", "/"), ("memory", "/"), ("cpu", "/"), ("cpu,cpuacct", "/")]
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines()[:64]:
        parts = line.split(":", 2)
        if len(parts) == 3 and ".." not in PurePosixPath(parts[2]).parts:
            found.append((parts[1], parts[2]))
    return found


def _upwards(base: Path, controllers: str, group: str) -> Iterator[Path]:
    """The group's folder and each parent; a container may show a path of the host that is not there."""
    parts = [part for part in PurePosixPath(group).parts if part != "/"][:32]
    for top in (base, base / "unified") if not controllers else (base / controllers,):
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _add_v2(folder: Path, memory: list[int], cpus: list[float]) -> None:
    limit = read_int(folder / "memory.max")
    if limit is not None and 0 < limit < _NO_LIMIT_BYTES:
        memory.append(limit)
    fields = (read_text(folder / "cpu.max") or "").split()
    if len(fields) == 2 and all(f.isascii() and f.isdigit() and len(f) < 16 for f in fields) and int(fields[1]) > 0:
        _quota(int(fields[0]), int(fields[1]), cpus)


def _add_v1(folder: Path, memory: list[int], cpus: list[float]) -> None:
    limit = read_int(folder / "memory.limit_in_bytes")
    if limit is not None and 0 < limit < _NO_LIMIT_BYTES:
        memory.append(limit)
    quota, period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    if quota is not None and period is not None and period > 0:
        _quota(quota, period, cpus)


def _quota(quota_us: int, period_us: int, cpus: list[float]) -> None:
    if quota_us > 0:
        cpus.append(quota_us / period_us)
