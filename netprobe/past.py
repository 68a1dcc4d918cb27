"""Turns what a probe knows of one link into ages, which outlive the process, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite

from netprobe.change import DEFAULT_RULES
from netprobe.floor import Floor
from netprobe.round_trip import SMALL_BYTES, RoundTrip
from netprobe.view import MAX_RESIDUALS
from netprobe.way import Way
from netprobe.window import WINDOW, Pair, Window
from protocol.events import Direction
from protocol.link_memory import PastLink, PastRoundTrip, PastTransfer, PastWay


def past_of(ways: Mapping[Direction, Way], round_trip: RoundTrip, now_s: float) -> PastLink:
    """Transfers, residuals and round trip with their ages at `now_s`; doubts and what is under way are not kept."""
    return PastLink(
        tuple(_past_way(direction, way, now_s) for direction, way in sorted(ways.items()) if way.window.pairs),
        _past_trip(round_trip, now_s) if round_trip.samples else None,
    )


def ways_of(past: PastLink, now_s: float, older_s: float = 0.0) -> Mapping[Direction, Way]:
    """The ways again, `older_s` later; transfers that cannot be are left out."""
    return {way.direction: _way(way, now_s - older_s) for way in past.ways}


def round_trip_of(past: PastLink, now_s: float, older_s: float = 0.0) -> RoundTrip:
    """The round trip again; nothing known if it cannot be."""
    trip = past.round_trip
    if trip is None or trip.samples < 1 or not _plausible(trip.smoothed_s, trip.deviation_s, trip.least_s, trip.age_s):
        return RoundTrip()
    return RoundTrip(trip.smoothed_s, trip.deviation_s, trip.least_s, trip.samples, now_s - older_s - trip.age_s)


def _past_way(direction: Direction, way: Way, now_s: float) -> PastWay:
    return PastWay(
        direction,
        tuple(PastTransfer(p.size_bytes, p.seconds, max(0.0, now_s - p.at_s)) for p in way.window.pairs),
        tuple(way.residuals),
    )


def _past_trip(trip: RoundTrip, now_s: float) -> PastRoundTrip:
    return PastRoundTrip(
        smoothed_s=trip.smoothed_s,
        deviation_s=trip.deviation_s,
        least_s=trip.least_s,
        samples=trip.samples,
        age_s=max(0.0, now_s - trip.at_s),
    )


def _way(past: PastWay, now_s: float) -> Way:
    pairs = [
        Pair(t.size_bytes, t.seconds, now_s - t.age_s)
        for t in past.transfers[-WINDOW:]
        if t.size_bytes >= SMALL_BYTES and t.seconds > 0 and _plausible(t.seconds, t.age_s)
    ]
    pairs.sort(key=lambda pair: pair.at_s)
    residuals = [ratio for ratio in past.residuals if ratio > 0 and isfinite(ratio)]
    return Way(
        window=Window(pairs),
        residuals=deque(residuals, maxlen=MAX_RESIDUALS),
        recalled=True,
        floor=Floor.of(pairs, DEFAULT_RULES.idle_s),
    )


def _plausible(*values: float) -> bool:
    return all(isfinite(value) and value >= 0 for value in values)
