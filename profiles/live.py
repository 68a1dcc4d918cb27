"""Facts that only the running system can tell: auxiliary vector, affinity, installed runtimes, other platforms.

The only module that uses psutil, and only for what Linux files did not tell (its readings have gaps of their own).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform

from attrs import evolve

from profiles.facts import Facts
from profiles.linux import HostNumbers

_AT_HWCAP = 16
_AT_HWCAP2 = 26

_ORT_BUILDS = {
    "onnxruntime-gpu": "ort-cuda", "onnxruntime-openvino": "ort-openvino", "onnxruntime-qnn": "ort-qnn",
    "onnxruntime-directml": "ort-directml", "onnxruntime-rocm": "ort-rocm", "onnxruntime-migraphx": "ort-migraphx",
}  # fmt: skip


def machine() -> str | None:
    """The architecture in the system's words."""
    return platform.machine() or None


def host_numbers() -> HostNumbers:
    """Numbers of the running process."""
    return HostNumbers(
        arch=machine(),
        page_bytes=_page_bytes(),
        hwcap=_auxiliary(_AT_HWCAP),
        hwcap2=_auxiliary(_AT_HWCAP2),
        affinity=affinity(),
    )


def fill(facts: Facts) -> Facts:
    """Fill what is still unknown (other platforms, hidden /proc) from psutil where it is installed."""
    known = evolve(
        facts,
        os=facts.os or platform.platform(terse=True) or None,
        cores_present=facts.cores_present or os.cpu_count(),
        cores=facts.cores or os.cpu_count(),
    )
    if known.memory_total_bytes is not None:
        return known
    try:
        import psutil

        memory = psutil.virtual_memory()
    except (ImportError, OSError, RuntimeError, AttributeError, NotImplementedError):
        return known
    limit = known.memory_bytes if known.memory_bytes is not None else memory.total
    return evolve(
        known,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_bytes=min(memory.total, limit),
    )


def onnxruntime_builds() -> tuple[str, ...]:
    """Accelerated onnxruntime builds that are installed, by package name; nothing is imported to find out."""
    return tuple(name for package, name in _ORT_BUILDS.items() if _installed(package))


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _page_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def memory_present_bytes() -> int | None:
    """The machine's memory as POSIX tells it, where /proc does not."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def affinity() -> int | None:
    """CPUs that this process may be scheduled on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def _auxiliary(number: int) -> int | None:
    """One entry of the auxiliary vector; the C library has no such call everywhere."""
    try:
        call = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError, TypeError):
        return None
    call.restype = ctypes.c_ulong
    call.argtypes = [ctypes.c_ulong]
    return int(call(number))
