"""How much work may wait for a set of workers: Little's law over a measured service time. Pure arithmetic.

A newcomer that finds `waiting` before it waits about (waiting + 1) * service / slots until it runs. Work is let in
while that is within the wait target, so the room to wait is floor(wait_target * slots / service), recomputed as the
service time drifts (J. D. C. Little, "A Proof for the Queuing Formula: L = lambda W", Operations Research 9(3), 1961).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

from attrs import frozen

WhenFull = Literal["caller_runs", "refuse", "wait"]
Act = Literal["queue", "caller_runs", "wait", "refuse"]

WINDOW = 31
"""Runs that the service time remembers: a drift shows after about half of them, a single stray run never does."""

CLIP_RATIO = 4.0
"""A run counts at most this many medians, so that one swapped-out run cannot close the queue."""

RESERVED_PART = 4
"""One part in this many of the room is for those who cannot run the work themselves."""

LEAST_SHARED_ROOM = 3
"""With less room than this nothing is reserved: cores would idle while a caller that runs work hands nothing in. A
single worker's core never does, for the caller has its place."""

MAX_WAITING = 256
"""Whatever the service time, more waiting work than this is memory spent on answers nobody expects any more."""

MIN_SERVICE_S = 1e-6


class ServiceTime:
    """Robust moving estimate of what one run costs on a core of its own.

    With n runs at once on `parallel` cores each takes max(1, n / parallel) times as long (processor sharing), so
    samples are divided by that: the estimate is the same on an idle and on a crowded machine.
    """

    def __init__(self, parallel: float) -> None:
        if parallel <= 0:
            raise ValueError("parallel is the number of runs that go at full speed at once, above 0")
        self._parallel = parallel
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._seconds: float | None = None

    def add(self, seconds: float, running: float) -> None:
        """One run took `seconds` of wall time while on average `running` runs (itself included) shared the cores."""
        self._samples.append(max(MIN_SERVICE_S, seconds) / max(1.0, running / self._parallel))
        bound = CLIP_RATIO * median(self._samples)
        self._seconds = sum(min(s, bound) for s in self._samples) / len(self._samples)

    @property
    def seconds(self) -> float | None:
        """Mean of the window with strays clipped; None before the first run."""
        return self._seconds


@frozen
class Decision:
    """What to do with a piece of work, and why. `retry_after_s` is set when it is refused."""

    act: Act
    reason: str
    retry_after_s: float = 0.0


@frozen
class Load:
    """State of the workers at the moment of a decision."""

    waiting: int
    running: int
    workers: int


class Admission:
    """Room to wait and the decision about each newcomer.

    Args:
        workers: threads that run the work.
        wait_target_s: longest wait before a run that work is let in for.
        parallel: runs that go at full speed at once: cores over threads per run.
        max_waiting: upper bound whatever is measured.
        bounded: False lets everything in: for work that is bounded elsewhere, or to measure what the bound is worth.
    """

    def __init__(
        self,
        workers: int,
        wait_target_s: float,
        *,
        parallel: float,
        max_waiting: int = MAX_WAITING,
        bounded: bool = True,
    ) -> None:
        if workers < 1 or wait_target_s <= 0 or max_waiting < 1:
            raise ValueError("workers, wait_target_s and max_waiting must be above 0")
        self._workers = workers
        self._wait_target_s = wait_target_s
        self._slots = min(float(workers), parallel)
        self._max_waiting = max_waiting
        self._bounded = bounded
        self._service = ServiceTime(parallel)

    def add(self, seconds: float, running: float) -> None:
        """A run ended; see ServiceTime.add."""
        self._service.add(seconds, running)

    def set_wait_target(self, seconds: float) -> None:
        """Let work wait up to `seconds` from now on; what waits already stays."""
        if seconds <= 0:
            raise ValueError("the wait target must be above 0")
        self._wait_target_s = seconds

    @property
    def service_s(self) -> float | None:
        """Seconds of one run on a core of its own; None before the first run."""
        return self._service.seconds

    @property
    def capacity(self) -> int:
        """How many may wait: one per worker until something was measured, then by Little's law, at least 1."""
        service_s = self._service.seconds
        if service_s is None:
            return min(self._workers, self._max_waiting)
        return max(1, min(self._max_waiting, int(self._wait_target_s * self._slots / service_s)))

    @property
    def reserved(self) -> int:
        """Room kept for those who cannot run the work themselves: the event loop's requests."""
        capacity, least = self.capacity, min(LEAST_SHARED_ROOM, self._workers + 1)
        return max(1, capacity // RESERVED_PART) if capacity >= least else 0

    def wait_s(self, load: Load) -> float:
        """Seconds that a newcomer would wait before it runs; 0 while a worker is free or nothing was measured."""
        if load.waiting == 0 and load.running < self._workers:
            return 0.0
        return (load.waiting + 1) * (self._service.seconds or 0.0) / self._slots

    def decide(self, load: Load, when_full: WhenFull) -> Decision:
        """Let a newcomer in, or do what it asked for in case there is no room."""
        if not self._bounded or load.waiting + load.running < load.workers:
            return Decision("queue", "a worker is free")
        capacity = self.capacity
        room = capacity - (self.reserved if when_full == "caller_runs" else 0)
        if load.waiting < room:
            return Decision("queue", f"{load.waiting} of {capacity} wait")
        if when_full == "refuse":
            return Decision("refuse", f"{load.waiting} wait, room for {capacity}", self.wait_s(load))
        return Decision(when_full, f"{load.waiting} wait, room for {room}")
