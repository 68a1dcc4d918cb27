"""Events of all rooms, spread to everyone who listens: metrics, the event file, the console.

Emitting never blocks and never raises. Slow readers (files, terminals) are served by one writer thread behind a bounded
queue; what does not fit is counted and dropped.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import attrs

from protocol.errors import ConfigError
from protocol.events import ArmSwitched, Emit, Event, HandedOver, RegimeChosen, SourceLost, TensorDone, TextDone

log = logging.getLogger("midstream.agent")

WRITER_QUEUE = 10_000

NAMES: Mapping[type[Event], str] = {
    TensorDone: "tensor_done",
    ArmSwitched: "switch",
    TextDone: "text_done",
    HandedOver: "handoff",
    SourceLost: "source_lost",
    RegimeChosen: "regime",
}
"""The events that go to `--events` and to `--json`, by their name there; a lost cloud is `cloud_lost`."""


class LineWriter:
    """Writes lines to a stream from its own thread. `close` waits for what is queued."""

    def __init__(self, out: TextIO, *, owned: bool) -> None:
        self._out = out
        self._owned = owned
        self._lines: queue.Queue[str | None] = queue.Queue(WRITER_QUEUE)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="midstream-lines", daemon=True)
        self._thread.start()

    @classmethod
    def to_file(cls, path: Path) -> LineWriter:
        """Append to `path`. Raises ConfigError when it cannot be opened."""
        try:
            return cls(path.open("a", encoding="utf-8"), owned=True)
        except OSError as err:
            raise ConfigError(f"cannot write {path}: {err.strerror}", next_step="choose another --events file") from err

    @classmethod
    def to_stdout(cls) -> LineWriter:
        return cls(sys.stdout, owned=False)

    def write(self, line: str) -> None:
        """Queue one line; drops it when the reader is too slow."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        failed = False
        while (line := self._lines.get()) is not None:
            if failed:
                continue
            try:
                self._out.write(line + "\n")
                self._out.flush()
            except (OSError, ValueError) as err:
                failed = True
                log.warning("event output stopped: %s", err)
        if self._owned:
            self._out.close()


def record(event: Event) -> dict[str, Any] | None:
    """The event as one JSON object with the monotonic `at_s`, or None when it is not one of NAMES."""
    name = NAMES.get(type(event))
    if name is None:
        return None
    if isinstance(event, SourceLost) and event.source == "cloud":
        name = "cloud_lost"
    return {"event": name, **attrs.asdict(event)}


def json_lines(write: Callable[[str], None]) -> Emit:
    """An Emit that writes each named event as one JSON line, with the wall time it was written at."""

    def emit(event: Event) -> None:
        found = record(event)
        if found is not None:
            write(json.dumps({**found, "unix_s": round(time.time(), 3)}))

    return emit


def human_lines(write: Callable[[str], None]) -> Emit:
    """An Emit for people: seam moves only."""

    def emit(event: Event) -> None:
        line = sentence(event)
        if line:
            write(line)

    return emit


def sentence(event: Event) -> str:
    """What a person wants to see of an event; empty for the rest."""
    if isinstance(event, ArmSwitched):
        return f"switch: {event.source} -> {event.target} ({event.model}: {event.reason})"
    if isinstance(event, HandedOver):
        return f"handoff: {event.source} -> {event.target} at token {event.index}"
    if isinstance(event, SourceLost) and event.index == 0:
        return f"{event.source} lost before the first token, {event.target} answers ({event.reason})"
    if isinstance(event, SourceLost):
        return f"{event.source} lost at token {event.index}, {event.target} continued"
    return ""
