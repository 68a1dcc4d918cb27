"""The only aiohttp client: exchanges, event lines, frames over WebSocket.

Every exchange leaves a TransferSample behind: wire time only, the peer's `server-timing: app;dur=` is taken out and so
is the time a new connection takes to open.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from attrs import define

from links.frames import WebSocketFrames
from links.port import MAX_FRAME_BYTES, FrameStream, RejectedStatus, Reply, WireTimes
from links.progress import acknowledged
from links.tls import tls_error
from links.transfer_log import Receipt, Sink, Transfer, TransferLog
from protocol.clock import Clock
from protocol.errors import ConfigError, LinkClosed, LinkError, LinkTimeout
from protocol.events import TransferSample

MAX_REPLY_BYTES = 64 << 20
MAX_ERROR_BODY_BYTES = 64 << 10
PIECE_BYTES = 128 << 10
"""Of a body, handed to the connection at a time: TLS works on one without a pause."""

READ_AHEAD_BYTES = 512 << 10
"""Of an answer, before reading it is paused: each pause costs as much as copying this does."""

_CLOSED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError)


@define(eq=False)
class _Transfer(Transfer):
    """sending_s: None while a connection is being made."""

    phase: str = "waiting for a free connection"
    reused: bool = False
    """It went over a connection that had been used before."""


class _Body(aiohttp.Payload):
    """A request's body that tells the transfer which connection it goes over, and how much of it was `written`.

    It is written piece by piece and never copied here, so that a slow uplink never holds up the loop.
    """

    _autoclose = True

    def __init__(self, body: bytes, transfer: _Transfer) -> None:
        super().__init__(body, content_type="application/octet-stream")
        self._size = len(body)
        self._transfer = transfer
        self.written = 0

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._transfer.moved = acknowledged(getattr(writer, "transport", None))
        view = memoryview(self._value)[:content_length]
        while self.written < len(view):
            piece = view[self.written : self.written + PIECE_BYTES]
            self.written += len(piece)
            await writer.write(piece)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)


def _trace(clock: Clock) -> aiohttp.TraceConfig:
    """Keeps `phase` and `sending_s` of the _Transfer that the request carries as its trace context."""

    def enter(phase: str) -> Callable[..., Any]:
        async def note(session: object, context: Any, params: object) -> None:
            transfer: _Transfer | None = context.trace_request_ctx
            if transfer is not None:
                transfer.phase = phase

        return note

    async def reused(session: object, context: Any, params: object) -> None:
        transfer: _Transfer | None = context.trace_request_ctx
        if transfer is not None:
            transfer.reused = True

    async def sent(session: object, context: Any, params: object) -> None:
        transfer: _Transfer | None = context.trace_request_ctx
        if transfer is not None:
            transfer.phase = "waiting for the answer"
            transfer.sending_s = clock()

    trace = aiohttp.TraceConfig()
    trace.on_dns_resolvehost_start.append(enter("looking up the name"))
    trace.on_dns_resolvehost_end.append(enter("connecting"))
    trace.on_connection_create_start.append(enter("connecting"))
    trace.on_connection_create_end.append(enter("sending"))
    trace.on_connection_reuseconn.append(reused)
    trace.on_request_headers_sent.append(sent)
    return trace


def server_seconds(headers: Mapping[str, str]) -> float:
    """Seconds the peer says it worked (`server-timing: app;dur=<ms>`), 0 when it does not say or says nonsense."""
    for metric in headers.get("server-timing", "").split(","):
        name, *params = [part.strip() for part in metric.split(";")]
        for param in params:
            key, _, value = param.partition("=")
            if name == "app" and key.strip() == "dur":
                try:
                    milliseconds = float(value.strip('" '))
                except ValueError:
                    return 0.0
                return milliseconds / 1000 if 0 <= milliseconds < float("inf") else 0.0
    return 0.0


def _times(transfer: _Transfer, server_s: float, answered_s: float, ended_s: float) -> WireTimes:
    sending_s = transfer.started_s if transfer.sending_s is None else transfer.sending_s
    there_s = min(server_s, answered_s - sending_s)
    return WireTimes(
        connect_s=sending_s - transfer.started_s,
        send_s=answered_s - sending_s - there_s,
        server_s=there_s,
        receive_s=ended_s - answered_s,
    )


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class HttpLink:
    """A Link over HTTP/1.1 with kept-alive connections.

    Args:
        name: the peer's name in samples and messages.
        base_url: `http(s)://host:port` plus an optional path prefix.
        ssl: context for https (links.tls.client_context); None uses the system's trust for https URLs.
        sink: takes one TransferSample per exchange; must not block.
        clock: monotonic seconds (time.monotonic or a fake that follows it).
        connect_s: longest wait for a connection, TLS included.
        max_reply_bytes: longer answers raise LinkError before they are held.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        ssl: ssl_module.SSLContext | None = None,
        sink: Sink = lambda sample: None,
        clock: Clock = time.monotonic,
        connect_s: float = 10.0,
        connections: int = 16,
        keep_idle_s: float = 60.0,
        heartbeat_s: float = 20.0,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url!r} is not an http or https address", next_step="write it as http://host:port")
        self._name = name
        self._base_url = base_url.rstrip("/")
        self._ssl = ssl
        self._clock = clock
        self._connect_s = connect_s
        self._connections = connections
        self._keep_idle_s = keep_idle_s
        self._heartbeat_s = heartbeat_s
        self._max_reply_bytes = max_reply_bytes
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._log = TransferLog(name, sink, clock, _Transfer)
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def base_url(self) -> str:
        return self._base_url

    def again(self) -> HttpLink:
        """Another link to the same peer with the same identity, for another event loop; it gives no samples."""
        return HttpLink(
            self._name, self._base_url, ssl=self._ssl, clock=self._clock, connect_s=self._connect_s,
            heartbeat_s=self._heartbeat_s, max_reply_bytes=self._max_reply_bytes, headers=self._headers,
        )  # fmt: skip

    def under_way(self) -> TransferSample | None:
        """The oldest transfer that is being sent and has not been answered, or else the oldest answer that has not come
        whole; `seconds` is its age.
        """
        return self._log.under_way()

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        """One request, one whole answer. Raises LinkTimeout, LinkClosed or LinkError; any status is an answer."""
        with self._log.transfer(len(body)) as transfer, self._mapped(transfer, path):
            async with (
                asyncio.timeout(deadline_s),
                await self._respond(method, path, headers, body, transfer) as response,
            ):
                reply_headers = _lower(response.headers)
                server_s = server_seconds(reply_headers)
                self._log.answered(transfer, server_s)
                started_s = self._clock()
                with self._log.receipt(response.content_length or 0, started_s) as receipt:
                    data = await self._read(response, self._max_reply_bytes, receipt)
                ended_s = self._clock()
                self._log.arrived(len(data), started_s)
                times = _times(transfer, server_s, started_s, ended_s)
                return Reply(status=response.status, headers=reply_headers, body=data, times=times)

    async def lines(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float
    ) -> AsyncIterator[bytes]:
        """POST, then the answer's body as chunks as they arrive.

        Raises RejectedStatus (with status and body) on a status over 399, LinkTimeout when the first or a next chunk
        takes longer than `deadline_s`, LinkClosed when the peer vanishes in the middle.
        """
        with self._log.transfer(len(body)) as transfer, self._mapped(transfer, path):
            # One time-out per wait: the generator may be driven by another task after each yield.
            async with asyncio.timeout(deadline_s):
                response = await self._respond("POST", path, headers, body, transfer)
            try:
                self._log.answered(transfer, server_seconds(_lower(response.headers)))
                async with asyncio.timeout(deadline_s):
                    await self._refuse_status(response, path)
                while True:
                    async with asyncio.timeout(deadline_s):
                        chunk = await response.content.readany()
                    if not chunk:
                        break
                    yield chunk
            finally:
                response.close()

    async def open(self, path: str) -> FrameStream:
        """A WebSocket to `path`. Raises RejectedStatus when the peer refuses it."""
        with self._log.transfer(0) as transfer, self._mapped(transfer, path):
            transfer.phase = "opening a WebSocket"
            try:
                async with asyncio.timeout(self._connect_s):
                    socket = await self._client().ws_connect(
                        self._url(path),
                        autoping=False,
                        compress=0,
                        max_msg_size=MAX_FRAME_BYTES + 1,
                        headers=self._headers,
                        timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
                        ssl=self._ssl if self._ssl is not None else True,
                    )
            except aiohttp.WSServerHandshakeError as err:
                raise RejectedStatus(
                    f"{self._name} refused the frame stream {path} with status {err.status}",
                    status=err.status,
                    body=b"",
                ) from err
        return WebSocketFrames(socket, peer=self._name, heartbeat_s=self._heartbeat_s)

    async def close(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            # TLS transports need one more turn of the loop to say goodbye.
            await asyncio.sleep(0)

    def _client(self) -> aiohttp.ClientSession:
        if self._closed:
            raise LinkClosed(f"the link to {self._name} has been closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=self._keep_idle_s),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[_trace(self._clock)],
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
                read_bufsize=READ_AHEAD_BYTES,
                max_line_size=8190,
                max_field_size=16_384,
            )
        return self._session

    def _url(self, path: str) -> str:
        return path if path.startswith(("http://", "https://")) else self._base_url + path

    async def _respond(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, transfer: _Transfer
    ) -> aiohttp.ClientResponse:
        """The answer's head. A kept connection may be closed by the peer just as it is used again: a request that could
        not be written whole has not been acted upon, and goes once over another connection (RFC 9112, section 9.3.1).
        """
        for attempt in range(2):
            left = _Body(body, transfer)
            try:
                return await self._request(method, path, headers, left if body else None, transfer)
            except aiohttp.ClientOSError as err:
                refused = isinstance(err.__cause__ or err, aiohttp.ClientConnectionResetError)
                if attempt or not transfer.reused or not (refused or left.written < len(body)):
                    raise
                transfer.reused, transfer.sending_s = False, None
        raise AssertionError("the second attempt returns or raises")

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: _Body | None, transfer: _Transfer
    ) -> aiohttp.ClientResponse:
        kind = {"content-type": "application/octet-stream"} if body is not None else {}
        return await self._client().request(
            method,
            self._url(path),
            data=body,
            headers=kind | self._headers | _lower(headers),
            trace_request_ctx=transfer,
            allow_redirects=method == "GET",
            ssl=self._ssl if self._ssl is not None else True,
        )

    async def _read(self, response: aiohttp.ClientResponse, limit: int, receipt: Receipt) -> bytes:
        if (response.content_length or 0) > limit:
            raise LinkError(f"{self._name} answers with {response.content_length} bytes, at most {limit} are taken")
        chunks: list[bytes] = []
        size_bytes = 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            size_bytes += len(chunk)
            receipt.moved_bytes = size_bytes
            if size_bytes > limit:
                raise LinkError(f"{self._name} answers with more than the {limit} bytes that are taken")
        return b"".join(chunks)

    async def _refuse_status(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status < 400:
            return
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk[: MAX_ERROR_BODY_BYTES - len(body)]
            if len(body) >= MAX_ERROR_BODY_BYTES:
                break
        raise RejectedStatus(
            f"{self._name} answered {path} with status {response.status}: {bytes(body[:300]).decode(errors='replace')}",
            status=response.status,
            body=bytes(body),
            headers=_lower(response.headers),
        )

    @contextmanager
    def _mapped(self, transfer: _Transfer, path: str) -> Iterator[None]:
        """Turns everything aiohttp, the OS and OpenSSL raise into LinkErrors that name the phase."""
        where = f"{self._name} ({self._base_url}{path})"
        try:
            yield
        except asyncio.CancelledError:
            # Another arm answered first, or the client left: that the transfer took at least so long is known anyway.
            self._log.abandoned(transfer)
            raise
        except TimeoutError as err:
            self._log.abandoned(transfer)
            raise LinkTimeout(
                f"{where} did not answer in time while {transfer.phase}",
                next_step="check the network, or allow a longer deadline",
            ) from err
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError, ssl_module.SSLError) as err:
            raise tls_error(where, err) from err
        except aiohttp.ClientConnectorError as err:
            raise LinkError(
                f"cannot reach {where} while {transfer.phase}: {err.strerror or err.os_error}",
                next_step="check that the peer runs and that its address is right",
            ) from err
        except _CLOSED as err:
            self._log.abandoned(transfer)
            raise LinkClosed(f"{where} closed the connection while {transfer.phase}") from err
        except (aiohttp.ClientError, OSError) as err:
            raise LinkError(f"{where} failed while {transfer.phase}: {err or type(err).__name__}") from err
