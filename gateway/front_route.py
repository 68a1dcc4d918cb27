"""POST /v1/route: ask first, run yourself. A chat request in, where it would go out; no engine is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.door import JSON, Door, shaped
from gateway.pipeline import Decision
from links.port import Request, Response, Route
from protocol import openai_wire
from protocol.chat import ChatRequest
from protocol.events import RouteTold
from protocol.openai_parse import parse_chat, parse_completion
from protocol.trace import RANDOM_BYTES, entered


class RouteFront:
    """/v1/route."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def routes(self) -> Sequence[Route]:
        """What a house mounts."""
        limit = self._door.way.settings.max_body_bytes
        return (Route("POST", "/v1/route", shaped(self.route, openai_wire.error_body), limit),)

    async def route(self, request: Request) -> Response:
        """A body of /v1/chat/completions or /v1/completions; `model` is `auto` where it is left out."""
        caller, body = self._door.opened(request)
        ports = self._door.way.ports
        came_s, span = ports.clock(), entered(caller.traceparent, ports.chance(RANDOM_BYTES))
        decision = await self._door.way.route(_chat(body), caller)
        now_s, routed = ports.clock(), decision.routed
        target = next(iter(dict(decision.plan.starts)), "")
        ports.emit(
            RouteTold(
                at_s=now_s, model=routed.model, target=target, level=routed.level, reason=routed.reason,
                total_s=now_s - came_s, trace=span,
            )
        )  # fmt: skip
        headers = {**JSON, **decision.reservation.headers, "x-midstream-trace-id": span.trace_id}
        return Response(200, headers, openai_wire.dump(document(decision)))


def _chat(body: Mapping[str, Any]) -> ChatRequest:
    named = {"model": "auto", **body}
    return parse_chat(named) if "messages" in body or "prompt" not in body else parse_completion(named)


def document(decision: Decision) -> dict[str, Any]:
    """target: who begins. targets: who may answer, with the seconds after which they begin (null: a reserve)."""
    starts = dict(decision.plan.starts)
    names = [*starts, *(name for name in decision.local if name not in starts)]
    return {
        "object": "route",
        "model": decision.routed.model,
        "target": next(iter(starts), None),
        "level": decision.routed.level,
        "reason": decision.routed.reason,
        "intent": decision.routed.intent,
        "complexity": decision.routed.complexity,
        "hard": decision.routed.hard,
        "dispatch": decision.plan.reason,
        "local_only": decision.findings.local_only or decision.routed.constraints.local_only,
        "private": sorted({span.kind for span in decision.findings.spans}),
        "targets": [{"name": name, "local": decision.local[name], "after_s": starts.get(name)} for name in names],
    }
