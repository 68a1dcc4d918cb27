"""What the coordinator's one TLS port serves: its own routes, and the mounts of both ways behind the guard."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from cloud_stub.access import Check, OpenFrames, guarded, guarded_frames
from cloud_stub.enrolment import Enrolment
from links.port import FrameRoute, Mount, Request, Response, Route
from protocol.decode import decode, encode
from protocol.documents import CoordinatorInfo, JoinRequest

JOIN_PATH = "/midstream/v1/join"
STATUS_PATH = "/midstream/v1/status"
INFO_PATH = "/midstream/v1/info"
MAX_JOIN_BYTES = 16 << 10
MOST_CONNECTIONS = 20_000
JSON = {"content-type": "application/json"}
METRICS = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}


@frozen
class Served:
    """Everything one server needs."""

    routes: Sequence[Route]
    frame_routes: Sequence[FrameRoute]


@frozen
class Checks:
    """Who counts as what."""

    member: Check
    observer: Check
    operator: Check


def open_routes(enrolment: Enrolment, serving: Callable[[], bool]) -> list[Route]:
    """What a stranger may call: liveness, and joining by secret."""

    async def healthz(request: Request) -> Response:
        ok = serving()
        return Response(200 if ok else 503, JSON, json.dumps({"status": "ok" if ok else "draining"}).encode())

    async def join(request: Request) -> Response:
        answer = await enrolment.join(decode(JoinRequest, request.body, what="join request", max_bytes=MAX_JOIN_BYTES))
        return Response(headers=JSON | {"cache-control": "no-store"}, body=encode(answer))

    return [
        Route("GET", "/healthz", healthz, max_body_bytes=0),
        Route("POST", JOIN_PATH, join, max_body_bytes=MAX_JOIN_BYTES),
    ]


def observer_routes(
    status: Callable[[], Mapping[str, Any]], metrics: Callable[[], str], info: Callable[[], CoordinatorInfo]
) -> list[Route]:
    """How the house is, for devices and operators."""

    async def show_metrics(request: Request) -> Response:
        return Response(headers=METRICS, body=metrics().encode())

    async def show_status(request: Request) -> Response:
        return Response(headers=JSON, body=json.dumps(status()).encode())

    async def show_info(request: Request) -> Response:
        return Response(headers=JSON, body=encode(info()))

    return [
        Route("GET", "/metrics", show_metrics, max_body_bytes=0),
        Route("GET", STATUS_PATH, show_status, max_body_bytes=0),
        Route("GET", INFO_PATH, show_info, max_body_bytes=0),
    ]


def assemble(
    strangers: Sequence[Route],
    observers: Sequence[Route],
    members: Sequence[Route],
    operators: Sequence[Route],
    mounts: Sequence[Mount],
    frames: Sequence[FrameRoute],
    checks: Checks,
    opened: OpenFrames,
) -> Served:
    """Each route behind the check of its kind; nothing of a mount is reachable without one."""
    ways = [route for mount in mounts for route in mount.routes]
    way_frames = [route for mount in mounts for route in mount.frame_routes]
    return Served(
        routes=[
            *strangers,
            *guarded(observers, checks.observer),
            *guarded([*members, *ways], checks.member),
            *guarded(operators, checks.operator),
        ],
        frame_routes=guarded_frames([*frames, *way_frames], checks.member, opened),
    )


def most_connections() -> int:
    """Connections at once: apps hold one each for their control channel; half of this process's files is left to it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = soft if soft != resource.RLIM_INFINITY else 4 * MOST_CONNECTIONS
    return max(64, min(MOST_CONNECTIONS, files // 2))
