"""The local server's own routes: health, metrics, status. The two ways bring theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.config import AgentConfig, is_loopback
from links.http_server import RunningServer, serve
from links.port import FrameRoute, Mount, Request, Response, Route
from protocol.error_forms import error_body

JSON = {"content-type": "application/json"}
METRICS = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}

Status = Callable[[], Mapping[str, Any]]


def house_routes(status: Status, metrics: Callable[[], str]) -> tuple[Route, ...]:
    """GET /healthz (200 while serving, else 503), /metrics (Prometheus text), /midstream/v1/status (JSON)."""

    async def healthz(request: Request) -> Response:
        found = status()
        serving = found["life"]["serving"]
        body = {"status": "ok" if serving == "ready" else serving, "warnings": found["warnings"]}
        return Response(status=200 if serving == "ready" else 503, headers=JSON, body=json.dumps(body).encode())

    async def show_metrics(request: Request) -> Response:
        return Response(headers=METRICS, body=metrics().encode())

    async def show_status(request: Request) -> Response:
        return Response(headers=JSON, body=json.dumps(status()).encode())

    return (
        Route("GET", "/healthz", healthz, max_body_bytes=0),
        Route("GET", "/metrics", show_metrics, max_body_bytes=0),
        Route("GET", "/midstream/v1/status", show_status, max_body_bytes=0),
    )


async def serve_house(config: AgentConfig, house: Sequence[Route], ways: Sequence[Mount]) -> RunningServer:
    """Listen on the configured address; Host and Origin are checked on loopback, against web pages that post here.

    Raises ConfigError when the port is taken or the address is not ours.
    """
    frames: list[FrameRoute] = [route for way in ways for route in way.frame_routes]
    return await serve(
        [*house, *(route for way in ways for route in way.routes)],
        frames,
        host=config.host,
        port=config.port,
        origin_check=is_loopback(config.host),
        on_error=lambda request, err: Response(*error_body(request.path, err)),
    )
