"""The last ten transfers of one transport in one direction: seconds = floor_s + bytes / bytes_per_s.

A plain mean of rates is biased as soon as the payload changes, so pairs are kept. The slope is the median of the slopes
between all pairs, weighted by how far apart they are in size (after Theil, 1950, and Sen, 1968): exact without noise,
and one odd transfer cannot move it far. It is held between two bounds that always hold: the floor is neither negative
nor longer than the shortest transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from attrs import frozen

WINDOW = 10
LEVERAGE = 1.25
"""Sizes must differ by this ratio before they can tell the floor from the rate."""

_LEAST_SECONDS = 1e-6
_LEAST_FLOOR_SHARE = 0.02


@frozen
class Pair:
    """One finished transfer: at least one byte, more than zero seconds, ended at monotonic `at_s`."""

    size_bytes: int
    seconds: float
    at_s: float


@frozen
class Fit:
    """seconds(bytes) = floor_s + bytes / bytes_per_s, from `samples` pairs; rate 0 when there are none."""

    floor_s: float
    bytes_per_s: float
    samples: int

    def seconds_for(self, size_bytes: float) -> float:
        """Predicted seconds; infinite when nothing is known."""
        return self.floor_s + size_bytes / self.bytes_per_s if self.bytes_per_s > 0 else float("inf")


NOTHING = Fit(floor_s=0.0, bytes_per_s=0.0, samples=0)


def fit(pairs: Sequence[Pair], rtt_s: float | None = None) -> Fit:
    """The line through `pairs`.

    Args:
        rtt_s: round-trip time of small frames; stands in for the floor while all sizes are about the same.
    """
    if not pairs:
        return NOTHING
    shortest_s = min(pair.seconds for pair in pairs)
    slope = _slope(pairs) if has_leverage(pairs) else None
    if slope is None:
        floor_s = min(rtt_s or 0.0, shortest_s / 2)
    else:
        floor_s = median(pair.seconds - pair.size_bytes * slope for pair in pairs)
        if 0.0 <= floor_s <= shortest_s:
            return Fit(floor_s, 1.0 / slope, len(pairs))
        floor_s = min(max(floor_s, 0.0), shortest_s)
    # The floor is at a bound: the rate is what explains the time that remains.
    seconds = sum(pair.seconds - floor_s for pair in pairs)
    size = sum(pair.size_bytes for pair in pairs)
    least_s = max(_LEAST_SECONDS, _LEAST_FLOOR_SHARE * shortest_s)
    return Fit(floor_s, size / max(seconds, least_s), len(pairs))


def has_leverage(pairs: Sequence[Pair]) -> bool:
    """Whether the sizes differ enough to tell the floor from the rate."""
    sizes = [pair.size_bytes for pair in pairs]
    return bool(sizes) and max(sizes) >= LEVERAGE * min(sizes)


def _slope(pairs: Sequence[Pair]) -> float | None:
    """Weighted median of the pairwise slopes, seconds per byte; None when time does not grow with size."""
    slopes: list[tuple[float, int]] = []
    for place, one in enumerate(pairs):
        for other in pairs[:place]:
            apart = one.size_bytes - other.size_bytes
            if apart:
                slopes.append(((one.seconds - other.seconds) / apart, abs(apart)))
    slopes.sort()
    half = sum(weight for _, weight in slopes) / 2
    passed = 0.0
    for slope, weight in slopes:
        passed += weight
        if passed >= half:
            return slope if slope > 0 else None
    return None


class Window:
    """The pairs behind one LinkView; the newest ten, none older than `max_age_s` before the newest."""

    def __init__(self, max_age_s: float = 900.0, pairs: Iterable[Pair] = ()) -> None:
        self._max_age_s = max_age_s
        self._pairs: list[Pair] = list(pairs)[-WINDOW:]

    @property
    def pairs(self) -> Sequence[Pair]:
        """Oldest first."""
        return tuple(self._pairs)

    def add(self, pair: Pair) -> None:
        """Keep `pair`, let go of the oldest."""
        kept = [old for old in self._pairs if pair.at_s - old.at_s <= self._max_age_s]
        self._pairs = [*kept, pair][-WINDOW:]

    def restart(self, pairs: Sequence[Pair]) -> None:
        """Forget everything but `pairs`."""
        self._pairs = list(pairs)[-WINDOW:]
