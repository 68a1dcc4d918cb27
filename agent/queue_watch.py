"""Says which stage's queue grows while the CPU is idle: in the warnings, in /metrics and so to `midstream doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from agent.health import Health
from engines.stalled import QueueDepths, Stalled, StallWatch, described
from protocol.clock import Clock
from protocol.exposition import Exposition

LOOK_S = 1.0

STAGES: Mapping[str, str] = {
    "tensor": "model runs (queue, head)",
    "pictures": "pre- and post-processing of pictures",
    "later": "pre- and post-processing of requests that can wait",
    "post": "post-processing of answers in bursts",
}
"""What people call the work of an executor, by its name; others are named as they are."""

NEXT_STEP = (
    "its workers wait for something that is not the CPU: a lock, a disk or a peer; see midstream_queue_* in /metrics"
)


class QueueWatch:
    """Looks once per LOOK_S. `depths` is an Emit: let it hear the house's events."""

    def __init__(
        self, health: Health, metrics: Exposition, idle_ratio: Callable[[], float | None], clock: Clock
    ) -> None:
        self.depths = QueueDepths()
        self._health = health
        self._metrics = metrics
        self._idle_ratio = idle_ratio
        self._clock = clock
        self._watch = StallWatch()
        self._on: frozenset[str] = frozenset()

    async def run(self) -> None:
        """A track of the house; ends only by cancellation."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> tuple[Stalled, ...]:
        """One look: warnings and metrics follow what is wrong now."""
        idle_ratio = self._idle_ratio()
        if idle_ratio is not None:
            self._metrics.set_gauge("midstream_cpu_idle_ratio", idle_ratio, help="Idle share of the CPU.")
        stalled = self._watch.look(self._clock(), self.depths.now(), idle_ratio)
        for alarm in stalled:
            self._health.warn(_warning(alarm.queue), described(alarm, STAGES), NEXT_STEP)
        on = frozenset(alarm.queue for alarm in stalled)
        for queue in self._on - on:
            self._health.clear(_warning(queue))
        for queue in self._on | on:
            self._metrics.set_gauge(
                "midstream_queue_stalled",
                queue in on,
                {"queue": queue, "stage": STAGES.get(queue, queue)},
                help="1 while a queue grows and the CPU is idle.",
            )
        self._on = on
        return stalled


def _warning(queue: str) -> str:
    return f"queue_stalled:{queue}"
