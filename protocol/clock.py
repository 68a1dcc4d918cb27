"""Time as an argument: monotonic seconds for every timer, wall time with a mark of trust.

A device without a real-time clock boots in the past, so nothing that decides may read the wall clock untested.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

Clock = Callable[[], float]
"""Monotonic seconds; only differences mean anything."""


class WallTime(NamedTuple):
    """Seconds since the Unix epoch, and whether the clock is known to be set."""

    unix_s: float
    trusted: bool


WallClock = Callable[[], WallTime]

# A clock that shows a time before this release was made has not been set yet.
EARLIEST_PLAUSIBLE_UNIX_S = 1_764_374_400.0


def wall_now() -> WallTime:
    """The system's wall clock, trusted when it shows a time after this release was made."""
    now_s = time.time()
    return WallTime(unix_s=now_s, trusted=now_s >= EARLIEST_PLAUSIBLE_UNIX_S)


class FakeClock:
    """A Clock that moves only when told to.

    >>> clock = FakeClock(); clock.advance(1.5); clock()
    1.5
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError("a monotonic clock never goes back")
        self.now_s += seconds
