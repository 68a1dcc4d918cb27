"""The places of an engine that runs a few generations at once: taken, given back, refused when all are taken."""

from __future__ import annotations

from engines.port import EngineLoad
from protocol.clock import Clock
from protocol.errors import Full

WEIGHT_OF_NEWEST_RATIO = 0.2


class Slots:
    """`count` places. How long they are held is averaged, which tells how soon one is free."""

    def __init__(self, count: int, clock: Clock) -> None:
        self.count = count
        self._clock = clock
        self._open: dict[object, float] = {}
        self._service_s = 1.0

    def enter(self) -> object:
        """A place, for leave(). Raises Full."""
        if len(self._open) >= self.count:
            raise Full(f"all {self.count} slots of the model are taken", retry_after_s=self._wait_s())
        place = object()
        self._open[place] = self._clock()
        return place

    def leave(self, place: object) -> None:
        """Give a place back; again is allowed."""
        since_s = self._open.pop(place, None)
        if since_s is not None:
            self._service_s += WEIGHT_OF_NEWEST_RATIO * (self._clock() - since_s - self._service_s)

    def load(self) -> EngineLoad:
        running = len(self._open)
        return EngineLoad(running=running, waiting=0, wait_s=self._wait_s() if running >= self.count else 0.0)

    def _wait_s(self) -> float:
        return self._service_s / self.count
