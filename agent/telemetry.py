"""Telemetry to the coordinator: a few numbers, seldom, and only when they changed."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from protocol.documents import Telemetry
from protocol.events import ArmSwitched, Event, HandedOver, SourceLost, TensorDone, TextDone, arm_kind

# Reports are for people who look at a dashboard; a device on a metered link pays for each.
PERIOD_S = 60.0


class Counters:
    """An Emit that counts what the fleet's owner wants to see; thread-safe; a fixed set of names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        for name, amount in _counts(event).items():
            with self._lock:
                self._values[name] = self._values.get(name, 0.0) + amount

    def news(self) -> Mapping[str, float] | None:
        """All counters if any changed since the last call, else None."""
        with self._lock:
            if self._values == self._told:
                return None
            self._told = dict(self._values)
            return dict(self._values)


def _counts(event: Event) -> Mapping[str, float]:
    if isinstance(event, TensorDone):
        side = arm_kind(event.arm)
        return {"tensor_requests": 1, f"tensor_{side}": 1, "up_bytes": event.up_bytes, "down_bytes": event.down_bytes}
    if isinstance(event, TextDone):
        return {
            "text_requests": 1,
            "prompt_tokens": event.prompt_tokens,
            "completion_tokens": event.completion_tokens,
        }
    for kind, name in ((ArmSwitched, "switches"), (HandedOver, "handoffs"), (SourceLost, "sources_lost")):
        if isinstance(event, kind):
            return {name: 1}
    return {}


def report(values: Mapping[str, float], boot: str, unix_s: float) -> Telemetry:
    """The document for `tele/counters`."""
    return Telemetry(kind="counters", at=unix_s, boot=boot, values=values)
