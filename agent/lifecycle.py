"""The three tracks of an agent's life as pure tables: serving, connected, profiled.

They run side by side and meet only through events. READY belongs to serving alone: neither a missing coordinator nor a
running benchmark holds it back. A pair of state and event that the table lacks leaves the state as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import evolve, frozen

Track = Literal["serving", "connected", "profiled"]
Table = Mapping[tuple[str, str], str]

SERVING: Table = {
    ("stopped", "start"): "starting",
    ("starting", "listening"): "ready",
    ("starting", "failed"): "stopped",
    ("ready", "drain"): "draining",
    # Only a host that the agent is a guest of pauses it.
    ("ready", "pause"): "paused",
    ("paused", "resume"): "ready",
    ("paused", "drain"): "draining",
    ("starting", "drain"): "draining",
    ("draining", "drained"): "stopped",
}

CONNECTED: Table = {
    ("alone", "search"): "searching",
    ("searching", "found"): "connecting",
    ("searching", "nothing_found"): "searching",
    ("searching", "up"): "connected",
    ("alone", "found"): "connecting",
    ("searching", "clock_wrong"): "wait_clock",
    ("connecting", "up"): "connected",
    ("connecting", "down"): "connecting",
    ("connecting", "refused"): "refused",
    ("connecting", "clock_wrong"): "wait_clock",
    ("connecting", "duplicate"): "duplicate",
    ("connecting", "search"): "searching",
    ("connected", "down"): "connecting",
    ("connected", "refused"): "refused",
    ("connected", "clock_wrong"): "wait_clock",
    ("connected", "duplicate"): "duplicate",
    ("connected", "found"): "connecting",
    ("wait_clock", "search"): "searching",
    ("wait_clock", "up"): "connected",
    ("wait_clock", "down"): "connecting",
    ("refused", "search"): "searching",
    ("refused", "up"): "connected",
    ("refused", "down"): "connecting",
    # Only an operator ends a fight over one name, so nothing but a fresh search leaves this state.
    ("duplicate", "search"): "searching",
    ("searching", "stop"): "alone",
    ("connecting", "stop"): "alone",
    ("connected", "stop"): "alone",
    ("wait_clock", "stop"): "alone",
    ("refused", "stop"): "alone",
    ("duplicate", "stop"): "alone",
}

PROFILED: Table = {
    ("unknown", "measure"): "measuring",
    ("unknown", "cached"): "known",
    ("measuring", "measured"): "known",
    ("measuring", "failed"): "unknown",
    ("known", "stale"): "unknown",
}

TABLES: Mapping[Track, Table] = {"serving": SERVING, "connected": CONNECTED, "profiled": PROFILED}


@frozen
class Life:
    """Where each track stands."""

    serving: str = "stopped"
    connected: str = "alone"
    profiled: str = "unknown"


def advance(life: Life, track: Track, event: str) -> Life:
    """The life after `event` on one track; the others never move."""
    state: str = getattr(life, track)
    return evolve(life, **{track: TABLES[track].get((state, event), state)})
