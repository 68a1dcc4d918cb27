"""Medians with their spread, and the memory-bandwidth probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

from attrs import frozen

from profiles.benchmark import Probe
from protocol.clock import Clock
from protocol.device import Measured

GIB = 1 << 30
COPY_BYTES = 32 << 20
"""Larger than the last-level cache of every board we aim at, small enough for 512 MB of memory."""


def summary(seconds: Sequence[float]) -> tuple[float, float]:
    """(median, half the inter-quartile range) of at least one measurement."""
    if len(seconds) < 2:
        return seconds[0], 0.0
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return median(seconds), (high - low) / 2


@frozen
class MemoryProbe:
    """Seconds to move one GiB through memory, read and write counted, by copying a buffer over and over."""

    name: str = "memory_bandwidth"
    expected_s: float = 0.5
    copy_bytes: int = COPY_BYTES
    copies: int = 9
    clock: Clock = time.perf_counter

    @property
    def run(self) -> Callable[[], Measured]:
        return self._measure

    def _measure(self) -> Measured:
        source, target = bytearray(self.copy_bytes), bytearray(self.copy_bytes)
        into, out_of = memoryview(target), memoryview(source)
        seconds: list[float] = []
        for _ in range(self.copies + 1):
            started = self.clock()
            into[:] = out_of
            seconds.append(self.clock() - started)
        scale = GIB / (2 * self.copy_bytes)
        middle, spread = summary(seconds[1:])  # the first touches the pages
        return Measured(
            digest="", engine="", threads=1, what="memory_bandwidth", median_s=middle * scale, spread_s=spread * scale
        )


def memory_probe() -> Probe:
    """The probe every device runs."""
    return MemoryProbe()
