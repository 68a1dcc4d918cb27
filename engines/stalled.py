"""Queues that grow while the CPU is idle: whatever their workers wait for, it is not a core. Pure; time is an argument.

A long queue on a busy machine is load, and says so by its wait. A long queue on an idle one is a fault: a lock, a disk,
a peer, or too few workers. The alarm has hysteresis: it is raised after `raise_looks` looks in a row and cleared after
`clear_looks`, so that a short burst or one fast look changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from attrs import define, field, frozen

from protocol.events import Event, QueueSampled

MAX_QUEUES = 64
"""Executors of a house are few; this only bounds a mistake."""


@frozen
class StallRules:
    """least_waiting: shorter queues are never reported. idle_ratio: share of the CPU that must be idle, 0..1.

    The queue must not have shrunk over raise_looks looks. It is well again after clear_looks looks with less than half
    of what waited when the alarm was raised, or on a CPU that works.
    """

    least_waiting: int = 4
    idle_ratio: float = 0.5
    raise_looks: int = 5
    clear_looks: int = 10


@frozen
class Stalled:
    """A queue with the alarm on: what waits now, the idle share of the CPU then, and since when."""

    queue: str
    waiting: int
    idle_ratio: float
    since_s: float


def described(alarm: Stalled, stages: Mapping[str, str]) -> str:
    """The alarm in words. stages: what people call the work of a queue; others are named as they are."""
    stage = stages.get(alarm.queue, alarm.queue)
    return (
        f"the queue of {stage} ({alarm.queue}) grows while the CPU is idle: {alarm.waiting} wait, "
        f"{100 * alarm.idle_ratio:.0f} % idle"
    )


class QueueDepths:
    """An Emit that remembers how much waits in each executor now."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, QueueSampled) and (event.name in self._waiting or len(self._waiting) < MAX_QUEUES):
            self._waiting[event.name] = event.waiting

    def now(self) -> Mapping[str, int]:
        """Waiting work by queue."""
        return dict(self._waiting)


@define(eq=False)
class _Watched:
    depths: deque[int]
    stalled: Stalled | None = None
    raised_at: int = 0
    well_looks: int = 0
    idle_looks: deque[bool] = field(factory=deque)


class StallWatch:
    """Folds looks at all queues into the alarms that are on."""

    def __init__(self, rules: StallRules | None = None) -> None:
        self._rules = rules or StallRules()
        self._watched: dict[str, _Watched] = {}

    def look(self, at_s: float, waiting: Mapping[str, int], idle_ratio: float | None) -> tuple[Stalled, ...]:
        """What waits now and the idle share of the CPU since the last look; None when it is not known.

        Returns the alarms that are on, by queue.
        """
        for name, depth in waiting.items():
            if name not in self._watched and len(self._watched) < MAX_QUEUES:
                looks = self._rules.raise_looks
                self._watched[name] = _Watched(deque(maxlen=looks), idle_looks=deque(maxlen=looks))
            if name in self._watched:
                self._one(self._watched[name], name, at_s, depth, idle_ratio)
        return tuple(seen.stalled for _, seen in sorted(self._watched.items()) if seen.stalled is not None)

    def _one(self, seen: _Watched, name: str, at_s: float, depth: int, idle_ratio: float | None) -> None:
        rules = self._rules
        idle = idle_ratio is not None and idle_ratio >= rules.idle_ratio
        seen.depths.append(depth)
        seen.idle_looks.append(idle)
        if seen.stalled is None:
            long_enough = len(seen.depths) == rules.raise_looks and min(seen.depths) >= rules.least_waiting
            if long_enough and all(seen.idle_looks) and depth >= seen.depths[0]:
                seen.stalled = Stalled(name, depth, idle_ratio or 0.0, at_s)
                seen.raised_at, seen.well_looks = depth, 0
            return
        well = 2 * depth < seen.raised_at or not idle
        seen.well_looks = seen.well_looks + 1 if well else 0
        if seen.well_looks >= rules.clear_looks:
            seen.stalled = None
            seen.depths.clear()
            seen.idle_looks.clear()
        else:
            shown = idle_ratio if idle_ratio is not None else seen.stalled.idle_ratio
            seen.stalled = Stalled(name, depth, shown, seen.stalled.since_s)
