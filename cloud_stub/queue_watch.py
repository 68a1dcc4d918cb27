"""Says which queue of the coordinator grows while its CPU is idle: in the log, in /metrics and in the notes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from engines.stalled import QueueDepths, Stalled, StallWatch, described
from protocol.clock import Clock
from protocol.events import Event
from protocol.exposition import Exposition

log = logging.getLogger("midstream.coordinator.queues")

LOOK_S = 1.0

STAGES: Mapping[str, str] = {"tails": "tails and whole models", "images": "pre- and post-processing of pictures"}


class QueueWatch:
    """An Emit in front of the metrics that looks at all queues once per LOOK_S."""

    def __init__(self, metrics: Exposition, idle_ratio: Callable[[], float | None], clock: Clock) -> None:
        self._metrics = metrics
        self._depths = QueueDepths()
        self._idle_ratio = idle_ratio
        self._clock = clock
        self._watch = StallWatch()
        self._on: dict[str, Stalled] = {}

    def __call__(self, event: Event) -> None:
        self._metrics(event)
        self._depths(event)

    @property
    def notes(self) -> Sequence[str]:
        """What is wrong now, in words."""
        return [described(alarm, STAGES) for alarm in self._on.values()]

    async def run(self) -> None:
        """Look for as long as the task lives."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """One look: the gauge follows, and the log says once that it began and once that it ended."""
        found = {a.queue: a for a in self._watch.look(self._clock(), self._depths.now(), self._idle_ratio())}
        for queue in found.keys() - self._on.keys():
            log.warning("%s", described(found[queue], STAGES))
        for queue in self._on.keys() - found.keys():
            log.info("the queue %s is well again", queue)
        for queue in self._on.keys() | found.keys():
            labels = {"queue": queue, "stage": STAGES.get(queue, queue)}
            help_text = "1 while a queue grows and the CPU is idle."
            self._metrics.set_gauge("midstream_queue_stalled", queue in found, labels, help=help_text)
        self._on = found
