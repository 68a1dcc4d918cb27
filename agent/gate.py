"""The gate before both ways: counts requests under way, and turns newcomers away while a host has paused the agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from attrs import evolve

from links.port import FrameRoute, FrameStream, Mount, Request, Response, Route
from protocol.errors import Full

PAUSED_RETRY_S = 30.0


class Gate:
    """Used on the event loop. `on_busy` is told when the first request comes in and when the last one has ended."""

    def __init__(self, on_busy: Callable[[bool], None] = lambda busy: None) -> None:
        self._on_busy = on_busy
        self._under_way = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.open = True

    @property
    def under_way(self) -> int:
        """Requests that came in and have not ended, streamed answers included."""
        return self._under_way

    async def drained(self, within_s: float) -> bool:
        """True when nothing is under way any more; False when something still is after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        return self._under_way == 0

    def before(self, mount: Mount) -> Mount:
        """The same way, behind this gate."""
        routes = tuple(evolve(route, handle=self._guarded(route)) for route in mount.routes)
        frames = tuple(
            evolve(route, handle=self._guarded_frames(route)) if route.work else route for route in mount.frame_routes
        )
        return evolve(mount, routes=routes, frame_routes=frames)

    def _enter(self) -> None:
        if not self.open:
            raise Full(
                "this agent is paused by the program that it runs in",
                retry_after_s=PAUSED_RETRY_S,
                next_step="try again when that program is in use",
            )
        self._under_way += 1
        if self._under_way == 1:
            self._empty.clear()
            self._on_busy(True)

    def _leave(self) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self._empty.set()
            self._on_busy(False)

    def _guarded(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            self._enter()
            streams = False
            try:
                answer = await route.handle(request)
                if not isinstance(answer.body, bytes):
                    answer = evolve(answer, body=_Counted(answer.body, self._leave))
                    streams = True
                return answer
            finally:
                if not streams:
                    self._leave()

        return handle

    def _guarded_frames(self, route: FrameRoute) -> Callable[[Request, FrameStream], Awaitable[None]]:
        async def handle(request: Request, stream: FrameStream) -> None:
            self._enter()
            try:
                await route.handle(request, stream)
            finally:
                self._leave()

        return handle


class _Counted:
    """A streamed body that counts until it is closed; the server closes every body, begun or not."""

    def __init__(self, body: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        self._body = body
        self._leave: Callable[[], None] | None = leave

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._body)

    async def aclose(self) -> None:
        leave, self._leave = self._leave, None
        try:
            close = getattr(self._body, "aclose", None)
            if close is not None:
                await close()
        finally:
            if leave is not None:
                leave()
