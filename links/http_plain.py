"""The server's side of plain HTTP/1.1 on bare asyncio: the requests that clients of APIs send, and nothing besides.

Plain is a whole request of moderate size with an ordinary request line, each header once, and a length where there is
a body. Whatever else comes on a connection is given on, from its first byte, to the full server
(`links/http_server.py`), which keeps the connection from there on: chunked bodies, upgrades, queries, slow senders and
what is no HTTP at all are its matter alone, so no message is ever read by two rules. See ADR 0004.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from attrs import frozen

from links.http_front import CLOSING_STATUSES, Front
from links.port import Request, Response
from links.turns import Turns

log = logging.getLogger("midstream.links.http_server")

MAX_HEAD_BYTES = 8000
MAX_PLAIN_BYTES = 256 << 10
HOLD_HEAD_S = 0.002
"""The head of a stream waits so long for its first part, to leave with it: a packet less for both sides."""

PATIENCE_S = 0.25
"""A request that is not whole after this is the full server's, with its limits for slow senders."""

UNSENT_POLL_S = 0.02
"""At a stop, between looks whether clients have taken what was written."""

MAX_KNOWN_NAMES, MAX_KNOWN_CHARS = 512, 64
"""Names of headers that are kept, so that each is looked at once: clients send the same ones all the time."""

_START = re.compile(r"(GET|POST|PUT|PATCH|DELETE) (/|(?:/[\w~:-][\w.~:-]*)+) HTTP/1\.1", re.ASCII)
_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_NOT_PLAIN = frozenset({"transfer-encoding", "upgrade", "expect", "trailer", "te", "sec-websocket-key"})
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_NO_BODY = frozenset({204, 304})
_TYPE, _LENGTH = "content-type", "content-length"
_LENGTH_CHARS = len(_LENGTH)


@frozen
class Head:
    """A plain request's head. size_bytes: of head and body together."""

    method: str
    path: str
    headers: Mapping[str, str]
    body_at: int
    size_bytes: int
    keeps: bool


def head_of(data: bytes) -> Head | None:
    """The head of a plain request, None for what is not plain. `data` holds the whole head."""
    end = data.find(b"\r\n\r\n")
    block = data[:end]
    if end > MAX_HEAD_BYTES or not block.isascii():
        return None
    first, *lines = block.decode("ascii").split("\r\n")
    start = _START.fullmatch(first)
    if start is None:
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        lower = _lower_names.get(name) or _lower_name(name)
        if not (colon and lower and (value.isprintable() or value.replace("\t", " ").isprintable())):
            return None
        headers[lower] = value.strip(" \t")
    if len(headers) != len(lines) or not _NOT_PLAIN.isdisjoint(headers) or "host" not in headers:
        return None
    length = headers.get("content-length", "0")
    keeps = headers.get("connection", "keep-alive").lower()
    if not length.isdigit() or len(length) > 9 or keeps not in ("keep-alive", "close"):
        return None
    return Head(start[1], start[2], headers, end + 4, end + 4 + int(length), keeps != "close")


def _lower_name(name: str) -> str:
    """A header's name in lower case, empty for what is none; names that came before are known at once."""
    if _NAME.fullmatch(name) is None:
        return ""
    lower = name.lower()
    if len(_lower_names) < MAX_KNOWN_NAMES and len(name) <= MAX_KNOWN_CHARS:
        _lower_names[name] = lower
    return lower


_lower_names: dict[str, str] = {}


def head_bytes(status: int, headers: Mapping[str, str], size_bytes: int | None, keeps: bool) -> bytes:
    """The head of an answer. size_bytes: None for a body in chunks, unless a header already says its length.

    Raises ValueError for a line break or a NUL in a header.
    """
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
    if not "".join(headers).islower():
        headers = {name.lower(): value for name, value in headers.items()}
    typed, measured = _TYPE in headers, _LENGTH in headers
    if measured and size_bytes is not None:
        headers = {name: value for name, value in headers.items() if name != _LENGTH}
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if status not in _NO_BODY:
        if not typed:
            lines.append("content-type: application/octet-stream")
        if size_bytes is not None:
            lines.append(f"content-length: {size_bytes}")
        elif not measured:
            lines.append("transfer-encoding: chunked")
    if not keeps:
        lines.append("connection: close")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise ValueError("a header of an answer holds a line break")
    return (text + "\r\n\r\n").encode("utf-8", "replace")


def _declared(headers: Mapping[str, str]) -> int | None:
    """The length of a stream that its handler knows beforehand, as for a file."""
    for name, value in headers.items():
        if len(name) == _LENGTH_CHARS and name.lower() == _LENGTH:
            return int(value)
    return None


class Dates:
    """The `date` of answers, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def now(self) -> str:
        """Now, as HTTP writes it."""
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


class PlainConnections:
    """The plain connections of one server."""

    def __init__(self, front: Front, full: Callable[[], asyncio.Protocol], others: Callable[[], int]) -> None:
        self.front = front
        self.full = full
        self.dates = Dates()
        self.open: set[PlainConnection] = set()
        self.closing = False
        self.turns = Turns()
        self._others = others

    def __call__(self) -> asyncio.Protocol:
        """For a socket that was accepted."""
        return PlainConnection(self)

    @property
    def too_many(self) -> bool:
        """More connections are open than the server takes, those of the full server among them."""
        return len(self.open) + self._others() > self.front.limits.connections

    def stop(self) -> None:
        """Let running requests end; close the rest."""
        self.closing = True
        for connection in tuple(self.open):
            connection.finish()

    async def end(self, grace_s: float) -> None:
        """Wait up to `grace_s` for running requests, then cancel them; what is written may leave meanwhile."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        running = [connection.running for connection in self.open if connection.running is not None]
        if running:
            _, late = await asyncio.wait(running, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        while loop.time() < until_s and any(connection.unsent for connection in self.open):
            await asyncio.sleep(UNSENT_POLL_S)
        for connection in tuple(self.open):
            connection.abort()


_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class PlainConnection(asyncio.Protocol):
    """One connection, one request at a time. Its handler is cancelled when the client leaves."""

    def __init__(self, owner: PlainConnections) -> None:
        self.running: asyncio.Task[None] | None = None
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._peer: tuple[str | None, bytes | None, str | None] = (None, None, None)
        self._buffer = b""
        self._head: Head | None = None
        self._idle_since_s: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._paused = False
        self._drained: asyncio.Future[None] | None = None
        self._held = b""
        """Of a stream's answer: its head, until it leaves."""
        self._alone: asyncio.Handle | None = None

    def finish(self) -> None:
        """Close it, now or after the request that runs."""
        if self.running is None:
            self._close()

    def _close(self) -> None:
        """Once: asyncio's TLS transport loses its own parts when it is closed a second time."""
        if not self._transport.is_closing():
            self._transport.close()

    @property
    def unsent(self) -> bool:
        """Part of an answer waits for its client."""
        return bool(self._transport.get_write_buffer_size())

    def abort(self) -> None:
        """Hang up."""
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        owner = self._owner
        owner.open.add(self)
        if owner.closing:
            self._transport.abort()
            return
        if owner.too_many:
            self._transport.write(_TOO_MANY)
            self._close()
            return
        self._peer = peer_of(transport)
        self._idle_timer = self._loop.call_later(owner.front.limits.header_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._drop_held()
        if self.running is not None:
            self.running.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return  # over TLS data still comes while the connection is closed: no request is begun then
        self._buffer = self._buffer + data if self._buffer else data
        if self.running is None:
            self._next()
        elif len(self._buffer) > MAX_PLAIN_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # Requests.

    def _next(self) -> None:
        """Begin the request that is in the buffer, if it is whole."""
        head = self._head
        if head is None:
            if b"\r\n\r\n" not in self._buffer:
                self._wait(len(self._buffer) > MAX_HEAD_BYTES)
                return
            head = self._head = head_of(self._buffer)
            if head is None:
                self._give_on()
                return
        if len(self._buffer) < head.size_bytes:
            self._wait(head.size_bytes > MAX_PLAIN_BYTES)
            return
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        body = self._buffer[head.body_at : head.size_bytes]
        self._buffer, self._head = self._buffer[head.size_bytes :], None
        request = Request(head.method, head.path, head.headers, {}, {}, body, *self._peer)
        self.running = self._loop.create_task(self._run(request, head.keeps))

    def _wait(self, too_long: bool) -> None:
        if too_long:
            self._give_on()
        elif self._patience is None:
            self._patience = self._loop.call_later(PATIENCE_S, self._give_on)

    def _give_on(self) -> None:
        """From here on the connection is the full server's."""
        if self._transport.is_closing():
            return
        self._leave()
        self._read_on()
        full = self._owner.full()
        self._transport.set_protocol(full)
        full.connection_made(self._transport)
        full.data_received(self._buffer)

    async def _run(self, request: Request, keeps: bool) -> None:
        owner, began_s = self._owner, time.monotonic()
        try:
            await owner.turns.mine()
            answer = await owner.front.answer(request)
            took_ms = 1000 * (time.monotonic() - began_s)
            headers = {"server": "midstream", "date": owner.dates.now(), **answer.headers}
            headers["server-timing"] = f"app;dur={took_ms:.3f}"
            keeps = keeps and not owner.closing and answer.status not in CLOSING_STATUSES
            await self._send(answer, headers, keeps)
        except (ConnectionError, TimeoutError):
            self._transport.abort()  # the client left or stopped reading: there is nobody to tell
        except Exception:
            log.exception("answer to %s %s failed", request.method, request.path)
            self._transport.abort()
        except BaseException:
            self._transport.abort()  # cancelled, perhaps by the handler's own doing: no client waits for ever
            raise
        self._ended(keeps)

    async def _send(self, answer: Response, headers: Mapping[str, str], keeps: bool) -> None:
        body = answer.body
        if isinstance(body, bytes):
            head = head_bytes(answer.status, headers, len(body), keeps)
            self._transport.write(head if answer.status in _NO_BODY else head + body)
            await self._written()
            return
        try:
            if answer.status in _NO_BODY:
                self._transport.write(head_bytes(answer.status, headers, 0, keeps))
            else:
                await self._stream(body, head_bytes(answer.status, headers, None, keeps), _declared(headers))
        finally:
            close = getattr(body, "aclose", None)
            if close is not None:
                await close()

    async def _stream(self, body: AsyncIterator[bytes], head: bytes, declared: int | None) -> None:
        self._held, sent = head, 0
        self._alone = self._loop.call_soon(self._hold)  # a first part that is there already needs no timer
        try:
            async for part in body:
                if part:
                    sent += len(part)
                    if declared is not None and sent > declared:
                        break
                    self._let_go(part if declared is not None else b"%x\r\n%b\r\n" % (len(part), part))
                    await self._written()
            if declared is not None and sent != declared:
                raise ValueError(f"a body of {declared} bytes was declared, at least {sent} came")
            self._let_go(b"0\r\n\r\n" if declared is None else b"")
            await self._written()
        finally:
            self._drop_held()

    def _hold(self) -> None:
        """The first part is not there yet: the head waits a moment for it."""
        self._alone = self._loop.call_later(HOLD_HEAD_S, self._let_go)

    def _let_go(self, part: bytes = b"") -> None:
        if held := self._held:
            self._drop_held()
            part = held + part
        if part:
            self._transport.write(part)

    def _drop_held(self) -> None:
        self._held = b""
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    async def _written(self) -> None:
        """Return when there is room for more. Raises TimeoutError for a client that does not read, however little."""
        while (drained := self._drained) is not None:
            left_bytes = self._transport.get_write_buffer_size()
            done, _ = await asyncio.wait([drained], timeout=self._owner.front.limits.write_s)
            if not done and self._transport.get_write_buffer_size() >= left_bytes:
                raise TimeoutError

    def _ended(self, keeps: bool) -> None:
        self.running = None
        self._idle_since_s = self._loop.time()
        if self._transport.is_closing():
            return
        if not keeps or self._owner.closing:
            self._close()
            return
        if self._buffer:
            self._next()
        self._read_on()

    def _read_on(self) -> None:
        """Unless requests enough wait for the end of the one that runs."""
        if self._paused and (self.running is None or len(self._buffer) <= MAX_PLAIN_BYTES):
            self._paused = False
            self._transport.resume_reading()

    # Time.

    def _look(self) -> None:
        """Close the connection when no request has come for long; one timer serves all requests."""
        limits = self._owner.front.limits
        rest_s = limits.keep_idle_s
        if self.running is None and self._patience is None:
            rest_s = self._idle_since_s + limits.keep_idle_s - self._loop.time() if self._idle_since_s else 0.0
        if rest_s > 0:
            self._idle_timer = self._loop.call_later(rest_s, self._look)
        elif self._transport.is_closing() or self._transport.get_write_buffer_size():
            self._transport.abort()  # the client has not taken the end of its answer for all this time
        else:
            self._close()

    def _leave(self) -> None:
        self._owner.open.discard(self)
        for timer in (self._idle_timer, self._patience):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._patience = None


def peer_of(transport: asyncio.BaseTransport) -> tuple[str | None, bytes | None, str | None]:
    """Of the client: common name and DER of its verified certificate, and its address; None for what it has not."""
    tls, address = transport.get_extra_info("ssl_object"), transport.get_extra_info("peername")
    remote = str(address[0]) if isinstance(address, tuple) else None
    if tls is None:
        return None, None, remote
    subject = (transport.get_extra_info("peercert") or {}).get("subject", ())
    names = [str(value) for rdn in subject for key, value in rdn if key == "commonName"]
    return names[0] if names else None, tls.getpeercert(binary_form=True), remote
