"""Who may call what on the coordinator's one TLS port; every refusal has the shape its API's clients expect.

Open: /healthz. By secret: the join endpoint. By admin key: /midstream/v1/admin. By a client certificate of the fleet or
an admin key: metrics and status. The two ways: a client certificate, or an invoke key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.keys import KeyTable, presented
from links.port import FrameRoute, FrameStream, Request, Response, Route
from protocol.error_forms import error_body
from protocol.errors import MidstreamError, Unauthenticated

MAX_KEY_CHARS = 256

Check = Callable[[Request], str | None]
"""Who asks, by name, or None when they may not."""


IsDevice = Callable[[str, bytes | None], bool]
"""Whether the holder of a verified certificate (its name, and itself as DER) is a device of the fleet now."""


def fleet_member(is_device: IsDevice, keys: KeyTable) -> Check:
    """Who may use the two ways: devices by certificate, clients by invoke key."""

    def check(request: Request) -> str | None:
        if request.peer is not None and is_device(request.peer, request.peer_der):
            return request.peer
        return keys.caller(request.headers, request.remote).key_id if presented(request.headers) else None

    return check


def observer(is_device: IsDevice, keys: KeyTable) -> Check:
    """Who may see how the house is: devices and admin keys. An invoke key sees its own answers alone."""

    def check(request: Request) -> str | None:
        if request.peer is not None and is_device(request.peer, request.peer_der):
            return request.peer
        return keys.admin(request.headers, request.remote).id if presented(request.headers) else None

    return check


def admin(keys: KeyTable) -> Check:
    """The operator, by admin key."""

    def check(request: Request) -> str | None:
        return keys.admin(request.headers, request.remote).id if presented(request.headers) else None

    return check


Record = Callable[[str, str, str, Mapping[str, Any]], None]
"""Writes down (who, what, on what, details); waits for the disk."""


def recorded(routes: Sequence[Route], operator: Check, record: Record) -> list[Route]:
    """The same routes; what may change something is written down before it is done."""

    def watched(route: Route) -> Route:
        async def handle(request: Request) -> Response:
            who = operator(request) or "nobody"
            await asyncio.to_thread(record, who, f"{route.method} {route.path}", request.path[:256], {})
            return await route.handle(request)

        return Route(route.method, route.path, handle, route.max_body_bytes)

    return [route if route.method == "GET" else watched(route) for route in routes]


def bearer(request: Request) -> str | None:
    """The key of an Authorization header, bounded."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and 0 < len(key) <= MAX_KEY_CHARS else None


def guarded(routes: Sequence[Route], check: Check) -> list[Route]:
    """The same routes, each behind `check`."""
    return [_guard(route, check) for route in routes]


class OpenFrames:
    """The frame streams that devices have open: they are judged when they open, and ended when that no longer holds."""

    def __init__(self) -> None:
        self._open: dict[str, set[FrameStream]] = {}

    @contextlib.contextmanager
    def held(self, device_id: str, stream: FrameStream) -> Iterator[None]:
        """Known as this device's for as long as the block runs."""
        self._open.setdefault(device_id, set()).add(stream)
        try:
            yield
        finally:
            left = self._open[device_id]
            left.discard(stream)
            if not left:
                del self._open[device_id]

    async def end(self, device_id: str) -> None:
        """Close all of them; returns when they are closed, a bounded time later."""
        streams = tuple(self._open.get(device_id, ()))
        await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True)


def guarded_frames(routes: Sequence[FrameRoute], check: Check, opened: OpenFrames) -> list[FrameRoute]:
    """The same WebSocket endpoints; a stranger's stream is closed before the handler sees it."""

    def guard(route: FrameRoute) -> FrameRoute:
        async def handle(request: Request, stream: FrameStream) -> None:
            _require(check, request)
            with opened.held(request.peer, stream) if request.peer is not None else contextlib.nullcontext():
                await route.handle(request, stream)

        return FrameRoute(route.path, handle)

    return [guard(route) for route in routes]


def error_response(request: Request, error: MidstreamError) -> Response:
    """In the form of the API that the path belongs to; OpenAI's for our own endpoints."""
    status, headers, body = error_body(request.path, error)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(status, headers, body)


def _guard(route: Route, check: Check) -> Route:
    inner: Callable[[Request], Awaitable[Response]] = route.handle

    async def handle(request: Request) -> Response:
        _require(check, request)
        return await inner(request)

    return Route(route.method, route.path, handle, route.max_body_bytes)


def _require(check: Check, request: Request) -> None:
    if check(request) is None:
        raise Unauthenticated(
            "this endpoint needs a fleet certificate or a key",
            next_step="send `Authorization: Bearer <key>`; the first start printed one, midstream keys add makes more",
        )
