"""Serves Routes and FrameRoutes to one peer over a Session, as links/http_server.py does to clients over TCP.

A peer that leaves a stream cancels its handler; a streamed body is closed at once. Every answer says how long the house
worked: `server-timing: app;dur=<ms>`. Who the peer is was settled before the session began.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import parse_qsl

from attrs import evolve, frozen

from links.channel_link import ChannelFrames
from links.channel_messages import Head, Open
from links.channel_stream import Stream
from links.port import FrameRoute, Request, Response, Route
from links.router import Router
from protocol.errors import BadRequest, LinkClosed, MidstreamError, RejectedError, TooLarge

log = logging.getLogger("midstream.links.channel_server")

LEAST_BYTES_PER_S = 10_000
"""A peer that reads more slowly than this does not read."""

MAX_QUERY_FIELDS = 100

OnError = Callable[[Request, MidstreamError], Response]


@frozen
class ChannelLimits:
    """Seconds that one request may take to arrive, and that a peer may let one part of an answer wait."""

    body_s: float = 300.0
    write_s: float = 60.0


@frozen
class Peer:
    """Who is at the other end: the device id and the certificate (DER) by which it was recognised."""

    name: str
    der: bytes | None = None


class BodyTooLate(RejectedError):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


def plain_error(request: Request, error: MidstreamError) -> Response:
    """`{"error": {"message", "code", "field"}}` with the family's status."""
    document = {"error": {"message": str(error), "code": error.code, "field": error.field}}
    return Response(error.http_status, {"content-type": "application/json"}, json.dumps(document).encode())


class ChannelServer:
    """`accept` is what the peer's Session is made with; `close` ends the handlers that still run."""

    def __init__(
        self,
        routes: Sequence[Route],
        frame_routes: Sequence[FrameRoute],
        peer: Peer,
        *,
        on_error: OnError = plain_error,
        limits: ChannelLimits = ChannelLimits(),
    ) -> None:
        self._router = Router(routes, frame_routes)
        self._peer = peer
        self._on_error = on_error
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, stream: Stream, opening: Open) -> None:
        """Serve one stream in a task of its own, which ends with the stream."""
        work = self._frames(stream, opening) if opening.frames else self._exchange(stream, opening)
        task = asyncio.get_running_loop().create_task(self._guarded(work, stream, opening), name=f"{opening.path[:80]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        stream.on_gone = task.cancel

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, work: Coroutine[Any, Any, None], stream: Stream, opening: Open) -> None:
        try:
            await work
        except LinkClosed as err:
            log.debug("%s %s ended: %s", opening.method, opening.path[:200], err)
        except Exception:
            log.exception("%s %s failed", opening.method, opening.path[:200])
        finally:
            stream.leave()

    async def _exchange(self, stream: Stream, opening: Open) -> None:
        request = self._request(opening)
        began_s = time.monotonic()
        try:
            request = evolve(request, query=_query(opening.path))
            matched = self._router.find(request.method, request.path, upgrade=False)
            assert isinstance(matched.route, Route)
            body = await self._body(stream, request, matched.route.max_body_bytes)
            request = evolve(request, params=matched.params, body=body)
            # The body's journey is wire time; the work begins here.
            began_s = time.monotonic()
            answer = await matched.route.handle(request)
        except MidstreamError as err:
            if stream.gone:
                raise LinkClosed(f"{self._peer.name} left") from err
            answer = self._on_error(request, err)
        except Exception:
            log.exception("handler of %s %s failed", request.method, request.path[:200])
            error = MidstreamError("internal error", next_step="see the log of this process")
            answer = self._on_error(request, error)
        await self._answer(stream, answer, time.monotonic() - began_s)

    async def _body(self, stream: Stream, request: Request, limit: int) -> bytes:
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > limit:
            raise TooLarge(f"the body has {told[:20]} bytes, at most {limit} are taken here")
        data = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while (part := await stream.receive()) is not None:
                    data += part.data
                    if len(data) > limit:
                        raise TooLarge(f"the body has more than the {limit} bytes that are taken here")
        except TimeoutError as err:
            raise BodyTooLate("the body did not arrive in time", next_step="send it in smaller parts") from err
        return bytes(data)

    async def _answer(self, stream: Stream, answer: Response, seconds: float) -> None:
        headers = {"server": "midstream"} | {name.lower(): value for name, value in answer.headers.items()}
        headers["server-timing"] = f"app;dur={seconds * 1000:.3f}"
        try:
            stream.answer(Head(answer.status, headers))
            if isinstance(answer.body, bytes):
                await self._write(stream, answer.body, last=True)
            else:
                async for chunk in answer.body:
                    await self._write(stream, chunk)
                stream.end()
        finally:
            close = getattr(answer.body, "aclose", None)
            if close is not None:
                await close()

    async def _write(self, stream: Stream, data: bytes, *, last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._limits.write_s + len(data) / LEAST_BYTES_PER_S):
                if data or last:
                    await stream.send(data, last=last)
        except TimeoutError as err:
            raise LinkClosed(f"{self._peer.name} does not read its answer") from err

    async def _frames(self, stream: Stream, opening: Open) -> None:
        request = self._request(opening)
        try:
            request = evolve(request, query=_query(opening.path))
            matched = self._router.find("GET", request.path, upgrade=True)
        except MidstreamError as err:
            await self._answer(stream, self._on_error(request, err), 0.0)
            return
        assert isinstance(matched.route, FrameRoute)
        stream.answer(Head(101))
        frames = ChannelFrames(stream, self._peer.name)
        try:
            await matched.route.handle(evolve(request, params=matched.params), frames)
        except MidstreamError as err:
            if not stream.gone:
                log.info("frame stream %s refused: %s", request.path[:200], err)
        finally:
            await frames.close()

    def _request(self, opening: Open) -> Request:
        return Request(
            method=opening.method,
            path=opening.path.partition("?")[0],
            headers={name.lower(): value for name, value in opening.headers.items()},
            peer=self._peer.name,
            peer_der=self._peer.der,
        )


def _query(path: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(path.partition("?")[2], keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
    except ValueError as err:
        raise BadRequest(f"the query has more than {MAX_QUERY_FIELDS} fields") from err
