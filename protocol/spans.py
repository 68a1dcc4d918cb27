"""Events of requests folded into spans under one trace id: of text the decision, moves, stream, and what the other
house did; of tensors the stages.

Ids, numbers and names of targets only; what OpenTelemetry's conventions for generative AI name has their names.

Spans of a trace that its beginner does not record are not made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal

from attrs import field, frozen

from protocol.events import Event, HandedOver, HandoffServed, RouteTold, SourceLost, TensorDone, TextDone
from protocol.trace import TraceContext, child, parsed

MAX_WAITING = 1024
"""Requests whose moves wait for their end; the oldest are forgotten first."""

MAX_MOVES = 16
"""Of one request."""

Value = str | int | float | bool


@frozen
class Span:
    """One stretch of a trace. Monotonic seconds. failed: its status is an error, said in `error`."""

    name: str
    context: TraceContext
    begins_s: float
    ends_s: float
    kind: Literal["server", "internal"] = "internal"
    attributes: Mapping[str, Value] = field(factory=dict)
    error: str = ""


Deliver = Callable[[Span], None]
"""Takes a finished span; never blocks, never raises, any thread."""


class SpanFold:
    """An Emit. chance: that many random bytes."""

    def __init__(self, deliver: Deliver, chance: Callable[[int], bytes]) -> None:
        self._deliver = deliver
        self._chance = chance
        self._lock = threading.Lock()
        self._moves: OrderedDict[str, list[HandedOver | SourceLost]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        if isinstance(event, HandedOver | SourceLost):
            self._note(event)
        elif isinstance(event, TextDone):
            with self._lock:
                moves = self._moves.pop(event.request_id, [])
            if event.trace is not None and event.trace.sampled:
                self._text(event, event.trace, moves)
        elif isinstance(event, TensorDone):
            if event.trace is not None and event.trace.sampled:
                self._tensor(event, event.trace)
        elif isinstance(event, RouteTold):
            if event.trace.sampled:
                self._route(event)
        elif isinstance(event, HandoffServed):
            above = parsed(event.traceparent)
            if above is not None and above.sampled:
                self._served(event, above)

    def _note(self, event: HandedOver | SourceLost) -> None:
        with self._lock:
            moves = self._moves.setdefault(event.request_id, [])
            if len(moves) < MAX_MOVES:
                moves.append(event)
            if len(self._moves) > MAX_WAITING:
                self._moves.popitem(last=False)

    def _text(self, event: TextDone, root: TraceContext, moves: list[HandedOver | SourceLost]) -> None:
        asked_s = event.at_s - event.total_s
        begins_s = asked_s - event.decided_s
        facts: dict[str, Value] = {"midstream.request_id": event.request_id, "gen_ai.request.model": event.model}
        numbers: dict[str, Value] = {
            "midstream.status": event.status,
            "gen_ai.usage.input_tokens": event.prompt_tokens,
            "gen_ai.usage.output_tokens": event.completion_tokens,
            "midstream.targets": ",".join(dict.fromkeys(name for name, _ in event.sides)),
            "midstream.cached": event.cached,
            "midstream.cost_usd": event.usd,
        }
        error = event.status if event.status not in ("ok", "cancelled") else ""
        self._deliver(Span("text request", root, begins_s, event.at_s, "server", facts | numbers, error))
        why: dict[str, Value] = {"midstream.reason": event.reason, "midstream.level": event.level}
        self._inside(root, "decide", begins_s, asked_s, facts | why)
        if event.ttft_s is not None:
            spoke_s = min(event.at_s, asked_s + event.ttft_s)
            self._inside(root, "first token", asked_s, spoke_s, facts)
            self._inside(root, "stream", spoke_s, event.at_s, facts | {"midstream.tokens": event.completion_tokens})
        for move in moves:
            self._move(root, move, event.at_s)

    def _move(self, root: TraceContext, move: HandedOver | SourceLost, ends_s: float) -> None:
        facts: dict[str, Value] = {
            "midstream.request_id": move.request_id,
            "midstream.source": move.source,
            "midstream.target": move.target,
            "midstream.index": move.index,
            "midstream.reason": move.reason,
        }
        name = "handover" if isinstance(move, HandedOver) else "fallback"
        self._inside(root, name, min(move.at_s, ends_s), ends_s, facts)

    def _served(self, event: HandoffServed, above: TraceContext) -> None:
        facts: dict[str, Value] = {
            "gen_ai.request.model": event.model,
            "midstream.status": event.status,
            "gen_ai.usage.input_tokens": event.prompt_tokens,
            "midstream.first": event.first,
            "gen_ai.usage.output_tokens": event.tokens,
        }
        error = event.status if event.status not in ("ok", "stopped") else ""
        context = child(above, self._chance(8))
        self._deliver(Span("handoff", context, event.at_s - event.total_s, event.at_s, "server", facts, error))

    def _tensor(self, event: TensorDone, root: TraceContext) -> None:
        """Stages one after the other, as a request goes through them; one that took no time is none."""
        at_s = event.at_s - event.total_s
        facts: dict[str, Value] = {
            "midstream.request_id": event.request_id,
            "midstream.model": event.model,
            "midstream.arm": event.arm,
        }
        numbers: dict[str, Value] = {
            "midstream.status": event.status,
            "midstream.reason": event.reason,
            "midstream.hedged": event.hedged,
            "midstream.up_bytes": event.up_bytes,
            "midstream.down_bytes": event.down_bytes,
        }
        error = event.status if event.status not in ("ok", "cancelled") else ""
        self._deliver(Span("tensor request", root, at_s, event.at_s, "server", facts | numbers, error))
        for name, seconds in event.stages().items():
            if seconds > 0:
                ends_s = min(event.at_s, at_s + seconds)
                self._inside(root, name, at_s, ends_s, facts)
                at_s = ends_s

    def _route(self, event: RouteTold) -> None:
        facts: dict[str, Value] = {
            "gen_ai.request.model": event.model,
            "midstream.targets": event.target,
            "midstream.level": event.level,
            "midstream.reason": event.reason,
        }
        self._deliver(Span("route request", event.trace, event.at_s - event.total_s, event.at_s, "server", facts))

    def _inside(
        self, root: TraceContext, name: str, begins_s: float, ends_s: float, facts: Mapping[str, Value]
    ) -> None:
        self._deliver(Span(name, child(root, self._chance(8)), begins_s, max(begins_s, ends_s), attributes=facts))
