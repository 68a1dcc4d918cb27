"""The full HTTP server, and the only aiohttp.web user: serves Routes and FrameRoutes over HTTP/1.1 and WebSocket.

Connections begin at `links/http_plain.py`; those whose requests are not plain are served here. A client that leaves
(also one that only half-closes) cancels its handler; a streamed body is closed at once, even while it waits for its
next chunk. Every answer says how long the house worked: `server-timing: app;dur=<ms>`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl as ssl_module
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from aiohttp import web
from attrs import define

from links.frames import WebSocketFrames
from links.http_front import CLOSING_STATUSES, BodyTooSlow, Front, OnError, ServerLimits, plain_error, with_body
from links.http_plain import PlainConnections, peer_of
from links.port import MAX_FRAME_BYTES, FrameRoute, Request, Response, Route
from links.router import Router
from protocol.errors import BadRequest, ConfigError, LinkClosed, MidstreamError, RejectedError, TooLarge

log = logging.getLogger("midstream.links.http_server")

READ_AHEAD_BYTES = 512 << 10
"""Of a body, before reading it is paused: each pause costs as much as copying this does."""

DEFAULT_LIMITS = ServerLimits()
LEAST_GRACE_S = 0.02
MOST_GRACE_S = 60.0


class RunningServer:
    """A server that accepts connections on `host`:`port` until `close`."""

    def __init__(
        self, host: str, port: int, plain: PlainConnections, server: web.Server, listener: asyncio.Server
    ) -> None:
        self.host = host
        self.port = port
        self._plain = plain
        self._server = server
        self._listener = listener

    @property
    def connections(self) -> int:
        """Open connections now."""
        return len(self._plain.open) + len(self._server.connections)

    async def close(self, grace_s: float = 2.0) -> None:
        """Stop accepting, let running handlers end within `grace_s` seconds, then cancel them. Always bounded."""
        await _stop_accepting(self._listener)
        self._plain.stop()
        self._server.pre_shutdown()
        # aiohttp takes 0 for "without a limit", and would wait for ever for a handler that waits for its peer.
        grace_s = min(max(grace_s, LEAST_GRACE_S), MOST_GRACE_S)
        await asyncio.gather(self._plain.end(grace_s), self._server.shutdown(grace_s))
        # Transports close in the next turns of the loop; nothing of ours may outlive this call.
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def _stop_accepting(listener: asyncio.Server) -> None:
    """Close a listener. A connection that was accepted in this very turn of the loop has its transport first: without a
    listener asyncio would drop it unclosed, and its client would wait.
    """
    loop = asyncio.get_running_loop()
    for sock in listener.sockets:
        loop.remove_reader(sock.fileno())
    await asyncio.sleep(0)
    listener.close()


async def serve(
    routes: Sequence[Route],
    frame_routes: Sequence[FrameRoute] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ssl: ssl_module.SSLContext | None = None,
    origin_check: bool = False,
    on_error: OnError = plain_error,
    limits: ServerLimits = DEFAULT_LIMITS,
) -> RunningServer:
    """Start a server; port 0 takes a free one.

    Args:
        origin_check: for loopback APIs: refuse with 403 requests whose Host is not a loopback name with our port
            (DNS rebinding) or whose Origin is not a loopback page.
        on_error: turns a MidstreamError that escapes a handler into an answer.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    front = Front(Router(routes, frame_routes), on_error, limits, origin_check)
    server = _Server(_Handler(front))
    plain = PlainConnections(front, server, lambda: len(server.connections))
    loop = asyncio.get_running_loop()
    try:
        listener = await loop.create_server(plain, host, port, ssl=ssl, backlog=128)
    except OSError as err:
        raise _cannot_listen(host, port, err) from err
    front.port = listener.sockets[0].getsockname()[1]
    return RunningServer(host, front.port, plain, server, listener)


def _cannot_listen(host: str, port: int, err: OSError) -> ConfigError:
    if err.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is already in use",
            next_step="stop the other process (perhaps a running midstream) or configure another port",
            field="port",
        )
    return ConfigError(
        f"cannot listen on {host} port {port}: {err.strerror or err}",
        next_step="choose an address of this machine and a port that you may use",
        field="host",
    )


class _Connection(web.RequestHandler):
    """aiohttp's protocol with what it lacks: time limits for the first request and for taking the end of an answer, and
    JSON for malformed requests."""

    __slots__ = ("_first_request_timer", "_front", "_left_bytes", "_taking_timer")

    def __init__(self, manager: _Server, front: Front) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=front.limits.keep_idle_s,
            access_log=None,  # type: ignore[arg-type]
            lingering_time=1.0,
            max_line_size=8190,
            max_field_size=8190,
            max_headers=100,
            read_bufsize=READ_AHEAD_BYTES,
            auto_decompress=False,
        )
        self._front = front
        self._first_request_timer: asyncio.TimerHandle | None = None
        self._taking_timer: asyncio.TimerHandle | None = None
        self._left_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._first_request_timer = loop.call_later(self._front.limits.header_s, self._no_request)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.request_began()
        super().connection_lost(exc)

    def request_began(self) -> None:
        """A request has been read; after the first the idle time-out guards the connection."""
        for timer in (self._first_request_timer, self._taking_timer):
            if timer is not None:
                timer.cancel()
        self._first_request_timer = self._taking_timer = None

    def must_take(self, left_bytes: int = -1) -> None:
        """All of an answer is written or will be at once: the client has to take it, however slowly. left_bytes: what
        it had not taken a while ago.
        """
        self._left_bytes = left_bytes
        self._taking_timer = asyncio.get_running_loop().call_later(self._front.limits.write_s, self._look)

    def _look(self) -> None:
        self._taking_timer = None
        left_bytes = self.transport.get_write_buffer_size() if self.transport is not None else 0
        if left_bytes and self.transport is not None and 0 <= self._left_bytes <= left_bytes:
            self.transport.abort()
        elif left_bytes:
            self.must_take(left_bytes)

    def _no_request(self) -> None:
        self._first_request_timer = None
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self.request_began()
        error = RejectedError("the request is not HTTP that this server understands")
        answer = self._front.on_error(Request(method="", path="", headers={}), error)
        assert isinstance(answer.body, bytes)
        response = web.Response(status=status, body=answer.body, headers=dict(answer.headers))
        response.force_close()
        return response


class _Server(web.Server):
    """Makes one _Connection for each that is not plain."""

    def __init__(self, handler: _Handler) -> None:
        super().__init__(handler.handle, handler_cancellation=True)
        self._front = handler.front

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._front)


@define(eq=False)
class _Handler:
    """From aiohttp's request to ours and back."""

    front: Front

    async def handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        """The handler of every request; only aiohttp's own errors and cancellation leave it."""
        connection = raw.protocol
        assert isinstance(connection, _Connection)
        connection.request_began()
        peer, peer_der, remote = peer_of(raw.transport) if raw.transport is not None else (None, None, None)
        request = Request(
            method=raw.method,
            path=raw.rel_url.raw_path,
            headers={name.lower(): value for name, value in raw.headers.items()},
            query=dict(raw.rel_url.query),
            peer=peer,
            peer_der=peer_der,
            remote=remote,
        )
        began_s = time.monotonic()
        upgrade = request.headers.get("upgrade", "").lower() == "websocket"
        frames: web.StreamResponse | None = None

        async def handled() -> Response:
            nonlocal began_s, frames
            matched = self.front.matched(request, upgrade)
            if isinstance(matched.route, FrameRoute):
                frames = await self._frames(raw, with_body(request, matched.params, b""), matched.route)
                return Response()
            body = await self._body(raw, matched.route.max_body_bytes)
            # The body's journey is wire time; the work begins here.
            began_s = time.monotonic()
            return await matched.route.handle(with_body(request, matched.params, body))

        answer = await self.front.guarded(request, handled())
        return frames or await self._answer(raw, answer, time.monotonic() - began_s)

    async def _body(self, raw: web.BaseRequest, limit: int) -> bytes:
        if (raw.content_length or 0) > limit:
            raise TooLarge(f"the body has {raw.content_length} bytes, at most {limit} are taken here")
        if raw.headers.get("expect", "").lower() == "100-continue":
            await raw.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if raw.content.is_eof() and raw.content.total_bytes <= limit:
            return raw.content.read_nowait()  # all of it came with the headers: nothing to wait for
        chunks: list[bytes] = []
        size_bytes = 0
        try:
            async with asyncio.timeout(self.front.limits.body_total_s):
                while True:
                    async with asyncio.timeout(self.front.limits.body_chunk_s):
                        chunk = await raw.content.readany()
                    if not chunk:
                        return b"".join(chunks)
                    chunks.append(chunk)
                    size_bytes += len(chunk)
                    if size_bytes > limit:
                        raise TooLarge(f"the body has more than the {limit} bytes that are taken here")
        except TimeoutError as err:
            raise BodyTooSlow("the body did not arrive in time", next_step="send it in smaller parts") from err

    async def _answer(self, raw: web.BaseRequest, answer: Response, seconds: float) -> web.StreamResponse:
        headers = {"server": "midstream"} | dict(answer.headers)
        headers["server-timing"] = f"app;dur={seconds * 1000:.3f}"
        if isinstance(answer.body, bytes):
            whole = web.Response(status=answer.status, headers=headers, body=answer.body)
            if answer.status in CLOSING_STATUSES:
                whole.force_close()
            _must_take(raw)
            return whole
        return await self._stream(raw, answer.status, headers, answer.body)

    async def _stream(
        self, raw: web.BaseRequest, status: int, headers: Mapping[str, str], body: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        try:
            await response.prepare(raw)
            if raw.method != "HEAD":
                async for chunk in body:
                    async with asyncio.timeout(self.front.limits.write_s):
                        await response.write(chunk)
            await response.write_eof()
            _must_take(raw)
        except (ConnectionError, TimeoutError):
            # The client left or stopped reading: there is nobody to tell.
            _abort(raw)
        except Exception:
            log.exception("stream of %s %s failed", raw.method, raw.path)
            _abort(raw)
        finally:
            close = getattr(body, "aclose", None)
            if close is not None:
                await close()
        return response

    async def _frames(self, raw: web.BaseRequest, request: Request, route: FrameRoute) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            timeout=2.0, autoping=False, max_msg_size=MAX_FRAME_BYTES + 1, compress=False, heartbeat=None
        )
        try:
            await socket.prepare(raw)
        except web.HTTPException as err:
            raise BadRequest(
                f"this is no WebSocket handshake: {err.text}", next_step="connect with a WebSocket client, version 13"
            ) from err
        stream = WebSocketFrames(socket, peer=request.peer or "the client", heartbeat_s=self.front.limits.heartbeat_s)
        try:
            await route.handle(request, stream)
        except LinkClosed as err:
            log.debug("frame stream %s ended: %s", request.path, err)
        except MidstreamError as err:
            log.info("frame stream %s refused: %s", request.path, err)
        except Exception:
            log.exception("frame stream %s failed", request.path)
        finally:
            await stream.close()
        return socket


def _must_take(raw: web.BaseRequest) -> None:
    if isinstance(raw.protocol, _Connection):
        raw.protocol.must_take()


def _abort(raw: web.BaseRequest) -> None:
    transport = raw.transport
    if transport is not None:
        transport.abort()
