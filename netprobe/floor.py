"""The floor of a way as its transfers have told it, for windows whose sizes cannot tell it from the rate.

The floor is the path's: it changes less than the rate, and is worth knowing when the sizes that told it have left the
window. Two transfers of clearly different sizes, one right after the other, have seen the same link; one such pair is a
guess, the median of several is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from attrs import define, field

from netprobe.window import Pair

TOLD = 9
"""Floors that are kept, each told by two transfers."""

CLEAR_RATIO = 2.0
"""How many times as large the larger of two transfers must be."""

_ROUNDING_S = 1e-6


@define(eq=False)
class Floor:
    """told_s: what pairs of transfers told, newest last. seconds: the floor now; None before the first transfer."""

    told_s: deque[float] = field(factory=lambda: deque(maxlen=TOLD))
    seconds: float | None = None

    @classmethod
    def of(cls, pairs: Sequence[Pair], idle_s: float) -> Floor:
        """What these transfers tell, oldest first."""
        floor = cls()
        for before, pair in pairwise(pairs):
            floor.take(before, pair, idle_s)
        floor.settle(pairs)
        return floor

    def take(self, before: Pair, pair: Pair, idle_s: float) -> None:
        """A transfer that began at most `idle_s` after the one before had ended; one that ran beside it tells nothing,
        since they shared the rate.
        """
        gap_s = pair.at_s - pair.seconds - before.at_s
        small, large = sorted((before, pair), key=lambda one: one.size_bytes)
        if -_ROUNDING_S <= gap_s <= idle_s and large.size_bytes >= CLEAR_RATIO * small.size_bytes:
            slope = max(0.0, large.seconds - small.seconds) / (large.size_bytes - small.size_bytes)
            self.told_s.append(max(0.0, min(small.seconds, large.seconds) - slope * small.size_bytes))

    def settle(self, known: Iterable[Pair]) -> None:
        """Half of the shortest transfer's time is a guess as good as one that was told, and the only one at first."""
        shortest_s = min((pair.seconds for pair in known), default=None)
        if shortest_s is not None:
            self.seconds = median([*self.told_s, shortest_s / 2])
