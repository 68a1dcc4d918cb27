"""What `midstream agent` writes: state changes and seam moves on stdout, requests' records into the event file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

from agent.emitting import LineWriter, human_lines
from agent.emitting import json_lines as as_json_lines
from protocol.events import ArmSwitched, Emit, Event, HandedOver, SourceLost

SHOWN = (ArmSwitched, HandedOver, SourceLost)


class Voice(Protocol):
    """What an agent tells the outside: events, and changes of its own state."""

    def emit(self, event: Event) -> None: ...

    def say(self, name: str, text: str, **facts: Any) -> None: ...


class Console:
    """Two outputs, both behind writer threads; `emit` is a listener for events."""

    def __init__(self, *, json_lines: bool, events_file: Path | None) -> None:
        self._json = json_lines
        self._file = LineWriter.to_file(events_file) if events_file is not None else None
        self._out = LineWriter.to_stdout()
        self._to_file: Emit | None = _as_json(self._file) if self._file is not None else None
        self._to_out: Emit = _as_json(self._out) if json_lines else human_lines(self._out.write)

    def emit(self, event: Event) -> None:
        """Write what the event means to each output."""
        if self._to_file is not None:
            self._to_file(event)
        if isinstance(event, SHOWN):
            self._to_out(event)

    def say(self, name: str, text: str, **facts: Any) -> None:
        """A state change: a JSON line with `facts`, or `text` for people."""
        if self._json:
            self._out.write(json.dumps({"event": name, **facts, "unix_s": round(time.time(), 3)}))
        else:
            self._out.write(text)

    def close(self) -> None:
        """Write what is queued and end the threads."""
        self._out.close()
        if self._file is not None:
            self._file.close()


def _as_json(writer: LineWriter) -> Emit:
    return as_json_lines(writer.write)
