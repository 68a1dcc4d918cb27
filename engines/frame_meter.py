"""Wire seconds of requests that follow each other closely on one stream. Arithmetic only; times are arguments.

A request that begins while earlier bytes are still on their way waits for them, which says nothing of the link: its
time counts from when those had left. Delivery is dated by the far end's clock, so that a reader that is late (because
it works between two frames) does not make the link look slow. The offset of that clock is the smallest difference seen
lately, as in the clock filter of NTP (D. L. Mills, RFC 5905, section 10); counting what was delivered between two
acknowledgements is the idea of delivery rate estimation (Cheng, Cardwell et al., draft-cheng-iccrg-delivery-rate-
estimation).
"""

from __future__ import annotations

from collections import deque

from attrs import define, frozen

REMEMBERED = 32
"""Acknowledgements that the clock's offset and the floor are taken from."""

SMALL_BYTES = 4_096
"""A request of so many bytes costs its round trip and nearly nothing else."""

LEAST_S = 1e-6


@frozen
class Sent:
    """size_bytes were on the wire for `seconds`, after `idle_before_s` without any; moved_bytes of them, if known."""

    size_bytes: int
    seconds: float
    idle_before_s: float
    moved_bytes: int | None = None


@define(eq=False)
class _Way:
    size_bytes: int
    began_s: float
    began_at: int
    queued: bool
    idle_before_s: float
    ended_at: int | None = None


class UpMeter:
    """Follows the requests of one stream by their number."""

    def __init__(self) -> None:
        self._ways: dict[int, _Way] = {}
        self._offsets_s: deque[float] = deque(maxlen=REMEMBERED)
        self._floors_s: deque[float] = deque(maxlen=REMEMBERED)
        self._free_s = float("-inf")
        self._last_s: float | None = None

    @property
    def floor_s(self) -> float:
        """Least seconds lately from a small frame to the news of its arrival; 0 before any."""
        return min(self._floors_s, default=0.0)

    def heard(self, now_s: float, far_s: float) -> None:
        """The far end sent something at `far_s` of its clock."""
        self._offsets_s.append(now_s - far_s)

    def greeted(self, sent_s: float, now_s: float, far_s: float) -> None:
        """A first small frame was answered at once: one round trip."""
        self.heard(now_s, far_s)
        self._floors_s.append(max(0.0, now_s - sent_s))

    def began(self, request: int, size_bytes: int, now_s: float, sent_bytes: int) -> None:
        """The first frame of `request` leaves, after `sent_bytes` of others."""
        queued = bool(self._ways)
        idle_s = 0.0 if queued or self._last_s is None else max(0.0, now_s - self._last_s)
        self._ways[request] = _Way(size_bytes, now_s, sent_bytes, queued, idle_s)

    def ended(self, request: int, sent_bytes: int) -> None:
        """Its last frame was handed over; `sent_bytes` in all so far, those of messages in between included."""
        way = self._ways.get(request)
        if way is not None:
            way.ended_at = sent_bytes

    def arrived(self, request: int, now_s: float, far_s: float) -> Sent | None:
        """The far end read its last byte at `far_s` of its clock. None for a request that is not on its way."""
        way = self._ways.pop(request, None)
        if way is None or way.ended_at is None:
            return None
        self._offsets_s.append(now_s - far_s)
        arrived_s = far_s + min(self._offsets_s)
        seconds = max(LEAST_S, arrived_s - self._begin_s(way, arrived_s))
        if not way.queued and way.ended_at - way.began_at <= SMALL_BYTES:
            self._floors_s.append(seconds)
        self._free_s = max(self._free_s, arrived_s - self.floor_s)
        self._last_s = now_s
        return Sent(way.ended_at - way.began_at, seconds, way.idle_before_s)

    def under_way(self, now_s: float, moved_at: int | None = None) -> Sent | None:
        """The oldest request that has not arrived, with its age. moved_at: bytes of the stream that have crossed."""
        return next((self._so_far(way, now_s, moved_at) for way in self._ways.values()), None)

    def given_up(self, request: int, now_s: float, moved_at: int | None = None) -> Sent | None:
        """Nobody waits for it any more: it takes at least this long. None when it had not begun, or has arrived."""
        way = self._ways.pop(request, None)
        if way is None:
            return None
        self._last_s = now_s
        return self._so_far(way, now_s, moved_at)

    def _so_far(self, way: _Way, now_s: float, moved_at: int | None) -> Sent:
        moved = None if moved_at is None else min(way.size_bytes, max(0, moved_at - way.began_at))
        return Sent(way.size_bytes, max(LEAST_S, now_s - self._begin_s(way, now_s)), way.idle_before_s, moved)

    def _begin_s(self, way: _Way, latest_s: float) -> float:
        return max(way.began_s, min(self._free_s, latest_s)) if way.queued else way.began_s
