"""Signs of life of threads and tasks, for watchdogs: a counter that moves while its owner gets on with its work."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen


@frozen
class Pulse:
    """One owner's sign of life now.

    beats: changes whenever the owner begins, ends or goes on with something. busy: it should be getting on now; an idle
    owner need not beat. patience_s: how long a busy owner may go without a beat before it counts as hung.
    """

    name: str
    beats: int
    busy: bool
    patience_s: float


class Listening:
    """Remembers when each pulse last moved and names those that stand still; not thread-safe."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[int, float]] = {}

    def hung(self, pulses: Iterable[Pulse], now_s: float) -> tuple[str, ...]:
        """Names of the busy owners whose counter has stood still for longer than their patience, seen at `now_s`.

        Owners that are no longer told of are forgotten. Busy time counts from the first look that saw it.
        """
        moved: dict[str, tuple[int, float]] = {}
        found: list[str] = []
        for pulse in pulses:
            beats, since_s = self._moved.get(pulse.name, (pulse.beats, now_s))
            if not pulse.busy or beats != pulse.beats:
                since_s = now_s
            moved[pulse.name] = (pulse.beats, since_s)
            if now_s - since_s > pulse.patience_s:
                found.append(pulse.name)
        self._moved = moved
        return tuple(found)
