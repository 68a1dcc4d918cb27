"""Events of all rooms, spread to everyone who listens. Emitting never blocks and never raises."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from protocol.events import Emit, Event

log = logging.getLogger("midstream.events")


class Fanout:
    """An Emit that calls every listener; a listener that fails is logged once and dropped."""

    def __init__(self, listeners: Sequence[Emit] = ()) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Emit) -> None:
        self._listeners.append(listener)

    def __call__(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:  # whoever emits must not suffer from whoever listens
                log.exception("an event listener failed and is dropped")
                self._listeners.remove(listener)
