"""The last ten transfers of one transport in one direction: seconds = floor_s + bytes / bytes_per_s.

A plain mean of rates is biased as soon as the payload changes, so pairs are kept. Of all lines through two of the pairs
(and through one, with the floor at one of its bounds) the one with the least weighted sum of errors is taken. An error
is 1 - least / greatest of predicted and real seconds: relative, the same both ways and below 1, so that neither a stall
nor a fluke counts for more than one transfer (least absolute deviations, whose optimum passes through data points:
Bloomfield and Steiger, 1983). The newest pair weighs most, since a fade shows there first. The floor is neither
negative nor longer than the shortest transfer; among many, one impossibly short transfer is not believed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

WINDOW = 10
LEVERAGE = 1.25
"""Sizes must differ by this ratio before they can tell the floor from the rate."""

FADE = 0.8
"""Weight of a pair over that of the next newer one."""
HALF_S = 120.0
"""In this time a pair also loses half of its weight, down to LEAST_WEIGHT: what is old still tells floor from rate."""
LEAST_WEIGHT = 0.05

MANY = 4
"""From this many pairs on the floor may be longer than the shortest of them, but not than the second shortest."""

_LEAST_SECONDS = 1e-6
_CLEARLY = 1 - 1e-9  # among equals the first line counts, whichever way their sums were rounded
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
    """The line through `pairs`, oldest first.

    Args:
        rtt_s: round-trip time of small frames; stands in for the floor where sizes cannot tell it from the rate.
    """
    if not pairs:
        return NOTHING
    weights = _weights(pairs)
    best, least_loss = NOTHING, float("inf")
    for floor_s, slope in _lines(pairs, rtt_s or 0.0):
        loss = 0.0
        for pair, weight in zip(pairs, weights, strict=True):
            predicted_s, seconds = floor_s + pair.size_bytes * slope, pair.seconds
            loss += weight * (abs(predicted_s - seconds) / max(predicted_s, seconds))
        if loss < least_loss * _CLEARLY:
            best, least_loss = Fit(floor_s, 1.0 / slope, len(pairs)), loss
    return best


def has_leverage(pairs: Sequence[Pair]) -> bool:
    """Whether the sizes differ enough to tell the floor from the rate."""
    sizes = [pair.size_bytes for pair in pairs]
    return bool(sizes) and max(sizes) >= LEVERAGE * min(sizes)


def longest_floor_s(pairs: Sequence[Pair]) -> float:
    """What the floor of a line through `pairs` is at most."""
    seconds = sorted(pair.seconds for pair in pairs)
    return seconds[1] if len(seconds) >= MANY else seconds[0]


def _weights(pairs: Sequence[Pair]) -> Sequence[float]:
    newest_s, last = pairs[-1].at_s, len(pairs) - 1
    return [
        FADE ** (last - place) * max(LEAST_WEIGHT, 0.5 ** (max(0.0, newest_s - pair.at_s) / HALF_S))
        for place, pair in enumerate(pairs)
    ]


def _lines(pairs: Sequence[Pair], rtt_s: float) -> Iterator[tuple[float, float]]:
    """Candidates (floor_s, seconds per byte), those with the floor at a bound first."""
    longest_s = longest_floor_s(pairs)
    least_s = max(_LEAST_SECONDS, _LEAST_FLOOR_SHARE * longest_s)
    for floor_s in (min(rtt_s, longest_s / 2), longest_s):
        for pair in pairs:
            yield floor_s, max(pair.seconds - floor_s, least_s) / pair.size_bytes
    for place, one in enumerate(pairs):
        for other in pairs[:place]:
            small, large = (one, other) if one.size_bytes < other.size_bytes else (other, one)
            if large.size_bytes < LEVERAGE * small.size_bytes or large.seconds <= small.seconds:
                continue
            slope = (large.seconds - small.seconds) / (large.size_bytes - small.size_bytes)
            floor_s = small.seconds - small.size_bytes * slope
            if 0.0 <= floor_s <= longest_s:
                yield floor_s, slope


class Window:
    """The pairs behind one LinkView: the newest ten, and the line through them."""

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        self._pairs: list[Pair] = list(pairs)[-WINDOW:]
        self._line: tuple[float | None, Fit] | None = None

    @property
    def pairs(self) -> Sequence[Pair]:
        """Oldest first."""
        return tuple(self._pairs)

    def line(self, rtt_s: float | None = None) -> Fit:
        """The fit of the pairs; computed once while neither they nor the round trip change."""
        if self._line is None or self._line[0] != rtt_s:
            self._line = (rtt_s, fit(self._pairs, rtt_s))
        return self._line[1]

    def add(self, pair: Pair) -> None:
        """Keep `pair`, let go of the oldest."""
        self.restart([*self._pairs, pair])

    def restart(self, pairs: Sequence[Pair]) -> None:
        """Forget everything but `pairs`."""
        self._pairs, self._line = list(pairs)[-WINDOW:], None
