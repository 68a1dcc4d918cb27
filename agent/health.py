"""Warnings that are on or off, each with its next step: what /healthz and `midstream status` show beside the state."""

from __future__ import annotations

import logging

from attrs import frozen

from protocol.clock import Clock

log = logging.getLogger("midstream.health")

# Names are ours and few; this only bounds a mistake.
MAX_WARNINGS = 64


@frozen
class Warnable:
    """Something wrong now. `since_s` is monotonic."""

    name: str
    text: str
    next_step: str
    since_s: float


class Health:
    """Keeps what is wrong; logs once when it begins and once when it ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._on: dict[str, Warnable] = {}

    def warn(self, name: str, text: str, next_step: str = "") -> None:
        """Set a warning; a repeat with another text replaces it quietly."""
        old = self._on.get(name)
        if old is None:
            log.warning("%s%s", text, f" - {next_step}" if next_step else "")
        if old is not None or len(self._on) < MAX_WARNINGS:
            self._on[name] = Warnable(name, text, next_step, old.since_s if old else self._clock())

    def clear(self, name: str) -> None:
        """End a warning; nothing happens when it is not on."""
        old = self._on.pop(name, None)
        if old is not None:
            log.info("%s: over after %.0f s", name, self._clock() - old.since_s)

    @property
    def warnings(self) -> tuple[Warnable, ...]:
        """What is wrong now, oldest first."""
        return tuple(sorted(self._on.values(), key=lambda w: w.since_s))
