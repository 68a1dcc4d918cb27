"""A Link for many exchanges with somebody else's server: HTTP/1.1 over kept connections, and nothing besides.

It measures nothing and follows nothing: no samples, no redirects, no cookies, no WebSocket. That is a fifth of the work
of the full client (ADR 0023), which counts where each request of a client is one to a provider.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from links.http_wire import HttpWire
from links.port import FrameStream, RejectedStatus, Reply
from links.tls import tls_error
from protocol.clock import Clock
from protocol.errors import ConfigError, LinkClosed, LinkError, LinkTimeout

MAX_REPLY_BYTES = 64 << 20
MAX_ERROR_BODY_BYTES = 64 << 10
OTHER_ADDRESS_AFTER_S = 0.25


class LeanHttpLink:
    """Exchanges and streams with one server.

    Args:
        name: the server's name in messages.
        base_url: `http(s)://host:port` plus an optional path prefix.
        ssl: context for https; None uses the system's trust.
        connect_s: longest wait for a connection, TLS included.
        connections: at once; further requests wait for one within their deadline.
        keep_idle_s: an unused connection is closed after this long.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        ssl: ssl_module.SSLContext | None = None,
        clock: Clock = time.monotonic,
        connect_s: float = 10.0,
        connections: int = 256,
        keep_idle_s: float = 20.0,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url!r} is not an http or https address", next_step="write it as http://host:port")
        self._name = name
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._host_line = _visible(parts.netloc.rpartition("@")[2])
        self._ssl = ssl
        self._clock = clock
        self._connect_s = connect_s
        self._keep_idle_s = keep_idle_s
        self._max_reply_bytes = max_reply_bytes
        self._places = asyncio.Semaphore(connections)
        self._idle: list[HttpWire] = []
        self._busy: set[HttpWire] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        """One request, one whole answer. Raises LinkTimeout, LinkClosed or LinkError; any status is an answer."""
        wire: HttpWire | None = None
        try:
            until_s = await self._place(deadline_s)
            try:
                wire = await self._begun(self._request(method, path, headers, body), until_s)
                data = await self._whole(wire, self._max_reply_bytes)
            finally:
                self._give_back(wire)
                self._places.release()
        except TimeoutError as err:
            raise self._late(path) from err
        return Reply(wire.status, wire.headers, data)

    async def lines(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float
    ) -> AsyncIterator[bytes]:
        """POST, then the answer's body as it comes.

        Raises RejectedStatus on a status over 399, LinkTimeout when the first or a next part takes longer than
        `deadline_s`, LinkClosed when the peer vanishes in the middle.
        """
        wire: HttpWire | None = None
        now_s = asyncio.get_running_loop().time
        try:
            until_s = await self._place(deadline_s)
        except TimeoutError as err:
            raise self._late(path) from err
        try:
            wire = await self._begun(self._request("POST", path, headers, body), until_s)
            wire.limit(now_s() + deadline_s)
            if wire.status > 399:
                await self._refuse(wire, path)
            while part := wire.ready() or await wire.read():
                yield part
                wire.limit(now_s() + deadline_s)
        except TimeoutError as err:
            raise self._late(path) from err
        finally:
            self._give_back(wire)
            self._places.release()

    async def open(self, path: str) -> FrameStream:
        """This link has no frame streams."""
        raise LinkError(f"{self._name} is asked by exchanges only", next_step="use the full client for frame streams")

    async def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for wire in (*self._idle, *self._busy):
            wire.abort()
        self._idle.clear()
        # Transports close in the next turns of the loop.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _place(self, deadline_s: float) -> float:
        """Take one of the places; gives the deadline by the loop's clock. Raises TimeoutError."""
        until_s = asyncio.get_running_loop().time() + deadline_s
        if self._places.locked():
            async with asyncio.timeout_at(until_s):
                await self._places.acquire()
        else:
            await self._places.acquire()
        return until_s

    async def _begun(self, request: bytes, until_s: float) -> HttpWire:
        """A connection on which the answer has begun. Raises TimeoutError after `until_s`.

        A kept connection that the server closed without a byte of an answer is replaced once: it went away as we wrote.
        """
        while True:
            wire = self._kept()
            if wire is None:
                async with asyncio.timeout_at(until_s):
                    wire = await self._dial()
            self._busy.add(wire)
            kept = wire.used > 0
            try:
                wire.limit(until_s)
                wire.begin(request)
                await wire.begun()
                return wire
            except LinkClosed:
                self._give_back(wire)
                if not kept or wire.answered:
                    raise
            except BaseException:
                self._give_back(wire)
                raise

    def _kept(self) -> HttpWire | None:
        oldest_s = self._clock() - self._keep_idle_s
        while self._idle:
            wire = self._idle.pop()
            if wire.open and wire.idle_since_s >= oldest_s:
                return wire
            wire.abort()
        return None

    async def _dial(self) -> HttpWire:
        if self._closed:
            raise LinkClosed(f"the link to {self._name} has been closed")
        loop = asyncio.get_running_loop()
        where = f"{self._name} ({self._host}:{self._port})"
        context = self._context() if self._tls else None
        # Other loops than asyncio's own try one address after the other.
        eyeballs: dict[str, Any] = {}
        if isinstance(loop, asyncio.BaseEventLoop):
            eyeballs["happy_eyeballs_delay"] = OTHER_ADDRESS_AFTER_S
        try:
            async with asyncio.timeout(self._connect_s):
                _, wire = await loop.create_connection(
                    lambda: HttpWire(self._name),
                    self._host,
                    self._port,
                    ssl=context,
                    **eyeballs,
                )
        except TimeoutError as err:
            raise LinkTimeout(
                f"{where} did not take a connection within {self._connect_s:g} s",
                next_step="check the network, or allow longer",
            ) from err
        except ssl_module.SSLError as err:
            raise tls_error(where, err) from err
        except OSError as err:
            raise LinkError(
                f"cannot reach {where}: {err.strerror or err}",
                next_step="check that the server runs and that its address is right",
            ) from err
        return wire

    def _context(self) -> ssl_module.SSLContext:
        if self._ssl is None:
            self._ssl = ssl_module.create_default_context()
        return self._ssl

    def _give_back(self, wire: HttpWire | None) -> None:
        """Keep a connection whose answer was taken whole; hang up on any other."""
        if wire is None:
            return
        self._busy.discard(wire)
        if not wire.keeps or self._closed:
            wire.abort()
            return
        wire.idle_since_s = self._clock()
        self._idle.append(wire)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._keep_idle_s, self._sweep)

    def _sweep(self) -> None:
        oldest_s = self._clock() - self._keep_idle_s
        for wire in [wire for wire in self._idle if wire.idle_since_s < oldest_s or not wire.open]:
            self._idle.remove(wire)
            wire.abort()
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(self._keep_idle_s, self._sweep) if self._idle else None

    async def _whole(self, wire: HttpWire, limit: int) -> bytes:
        parts: list[bytes] = []
        size_bytes = 0
        while part := await wire.read():
            parts.append(part)
            size_bytes += len(part)
            if size_bytes > limit:
                raise LinkError(f"{self._name} answers with more than the {limit} bytes that are taken")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _refuse(self, wire: HttpWire, path: str) -> None:
        body = b""
        while len(body) < MAX_ERROR_BODY_BYTES and (part := await wire.read()):
            body += part
        shown = body[:300].decode(errors="replace")
        raise RejectedStatus(
            f"{self._name} answered {path} with status {wire.status}: {shown}",
            status=wire.status,
            body=body[:MAX_ERROR_BODY_BYTES],
            headers=wire.headers,
        )

    def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [f"{method} {_visible(self._prefix + path)} HTTP/1.1\r\nhost: {self._host_line}"]
        for name, value in headers.items():
            lines.append(f"{name}: {value}")
        head = "\r\n".join(lines)
        if head.count("\r\n") != len(lines) or "\n" in head.replace("\r\n", ""):
            raise ConfigError("a header or a key holds a line break", next_step="correct it")
        length = f"\r\ncontent-length: {len(body)}\r\n\r\n" if body or method == "POST" else "\r\n\r\n"
        return (head + length).encode("latin-1", "replace") + body

    def _late(self, path: str) -> LinkTimeout:
        return LinkTimeout(f"{self._name} did not answer {path} in time", next_step="allow a longer deadline")


def _visible(text: str) -> str:
    """A part of a request line. Raises ConfigError for what would break it."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{text[:80]!r} is no address", next_step="correct it")
    return text
