"""One HTTP/1.1 connection of a client, on bare asyncio: a request goes out, its answer comes in, then the next.

Message syntax and framing after RFC 9112. Whatever is not plain (folded headers, two lengths, bytes after an answer)
ends the connection with an error; nothing is guessed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

from links.turns import Arrivals
from protocol.errors import LinkClosed, LinkError

MAX_HEAD_BYTES = 64 << 10
MAX_SIZE_LINE_BYTES = 1024
READ_AHEAD_BYTES = 512 << 10
"""Of an answer that nobody takes, before reading is paused."""

_NO_BODY = frozenset({204, 304})


class HttpWire(asyncio.Protocol):
    """A connection. `begin` a request, await `begun`, then `read` until it gives b"". Then it may be used again."""

    def __init__(self, peer: str) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.used = 0
        """Requests that were begun on it."""
        self.idle_since_s = 0.0
        self._peer = peer
        self._transport: Any = None
        self._error: LinkError | None = None
        self._state = "idle"
        self._rest = b""
        self._left = 0
        self._parts: deque[bytes] = deque()
        self._held_bytes = 0
        self._paused = False
        self._keeps = False
        self._news: asyncio.Future[None] | None = None
        self._until_s = inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """It may carry another request."""
        return self._error is None and self._state == "idle" and not self._transport.is_closing()

    @property
    def answered(self) -> bool:
        """Some byte of the answer has come."""
        return self._state != "head" or bool(self._rest)

    def begin(self, request: bytes) -> None:
        """Send a request."""
        self.used += 1
        self._state, self._rest, self._left, self._keeps = "head", b"", 0, False
        self._transport.write(request)

    def limit(self, until_s: float) -> None:
        """Waits raise TimeoutError after `until_s`, by the loop's clock. One timer serves many limits, for a timer made
        and cancelled per chunk costs more than reading it."""
        self._until_s = until_s
        if self._timer is not None and self._timer.when() > until_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(until_s, self._look)

    def _look(self) -> None:
        self._timer = None
        news = self._news
        if news is None or news.done():
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until_s:
            news.set_exception(TimeoutError())
        else:
            self._timer = loop.call_at(self._until_s, self._look)

    async def begun(self) -> None:
        """Return when `status` and `headers` are those of the answer.

        A head by itself wakes nobody who waits: that is for the body's first part, or its end. Raises LinkClosed or
        LinkError.
        """
        while self._state == "head":
            await self._wait()

    def ready(self) -> bytes:
        """What has come of the body and was not taken; b"" if there is nothing now."""
        if not self._parts:
            return b""
        found = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held_bytes = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return found

    async def read(self) -> bytes:
        """The next part of the body, b"" at its end. Raises LinkClosed when it was cut."""
        while not self._parts:
            if self._state == "idle":
                return b""
            await self._wait()
        return self.ready()

    def abort(self) -> None:
        """Hang up at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until_s:
            raise TimeoutError
        if self._timer is None and self._until_s < inf:
            self._timer = loop.call_at(self._until_s, self._look)
        self._news = loop.create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _tell(self) -> None:
        news = self._news
        if news is not None and not news.done():
            Arrivals.count += 1
            news.set_result(None)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state == "until closed" and exc is None:
            self._state = "idle"
        elif self._error is None:
            self._error = LinkClosed(f"{self._peer} closed the connection")
        self._keeps = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell()

    def data_received(self, data: bytes) -> None:
        try:
            self._take(data)
        except (ValueError, LinkError) as err:
            self._error = err if isinstance(err, LinkError) else LinkError(f"{self._peer} answers nonsense: {err}")
            self._transport.abort()
        if self._parts or self._state == "idle" or self._error is not None:
            self._tell()  # else there is nothing to be done with what came

    def _take(self, data: bytes) -> None:
        if self._state == "idle":
            raise LinkError(f"{self._peer} sends what nobody asked for")
        if self._state == "head":
            data = self._rest + data
            while self._state == "head":
                head, mark, data = data.partition(b"\r\n\r\n")
                if not mark:
                    self._rest = head
                    if len(head) > MAX_HEAD_BYTES:
                        raise LinkError(f"{self._peer} sends more than {MAX_HEAD_BYTES} bytes of headers")
                    return
                self._rest = b""
                self._take_head(head)
        if data:
            self._take_body(data)

    def _take_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        if not first.startswith(b"HTTP/1."):
            raise LinkError(f"{self._peer} does not speak HTTP/1.1")
        status = int(first[9:12])
        headers: dict[str, str] = {}
        for line in lines:
            name, mark, value = line.partition(b":")
            if not mark or name[:1] in (b" ", b"\t", b"") or name.endswith(b" "):
                raise LinkError(f"{self._peer} sends a header that is none")
            key = name.decode("latin-1").lower()
            text = value.strip().decode("latin-1")
            if key == "content-length" and headers.get(key, text) != text:
                raise LinkError(f"{self._peer} sends two lengths")
            headers[key] = text
        if 100 <= status < 200 and status != 101:
            return  # the answer itself comes next
        self.status, self.headers = status, headers
        tokens = headers.get("connection", "").lower()
        self._keeps = "close" not in tokens and (first.startswith(b"HTTP/1.1") or "keep-alive" in tokens)
        self._state = self._framing(status, headers)

    def _framing(self, status: int, headers: Mapping[str, str]) -> str:
        coding = headers.get("transfer-encoding", "").lower()
        if coding:
            if coding != "chunked":
                raise LinkError(f"{self._peer} sends a body coded as {coding[:40]!r}")
            return "size"
        if status in _NO_BODY or headers.get("content-length") == "0":
            return "idle"
        if "content-length" in headers:
            text = headers["content-length"]
            if not text.isascii() or not text.isdigit():
                raise LinkError(f"{self._peer} sends a length that is none")
            self._left = int(text)
            return "length"
        self._keeps = False
        return "until closed"

    def _take_body(self, data: bytes) -> None:
        state = self._state
        if state == "length":
            if len(data) > self._left:
                raise LinkError(f"{self._peer} sends more than it announced")
            self._hold(data)
            self._left -= len(data)
            if not self._left:
                self._state = "idle"
        elif state == "until closed":
            self._hold(data)
        elif state == "idle":
            raise LinkError(f"{self._peer} sends more than its answer")
        else:
            self._take_chunks(self._rest + data if self._rest else data)

    def _take_chunks(self, data: bytes) -> None:
        """Chunks (RFC 9112, section 7.1). States: size, chunk (its data), mark (the line end after it), trailer."""
        self._rest = b""
        while data:
            if self._state == "chunk":
                part, data = data[: self._left], data[self._left :]
                self._hold(part)
                self._left -= len(part)
                if not self._left:
                    self._state = "mark"
                continue
            line, end, rest = data.partition(b"\r\n")
            if not end:
                if len(line) > MAX_SIZE_LINE_BYTES:
                    raise LinkError(f"{self._peer} sends a chunk without a size")
                self._rest = data
                return
            data = rest
            if self._state == "mark":
                if line:
                    raise LinkError(f"{self._peer} sends a chunk that is longer than its size")
                self._state = "size"
            elif self._state == "size":
                digits = line.partition(b";")[0].strip()
                if not digits or len(digits) > 8:
                    raise LinkError(f"{self._peer} sends a chunk without a size")
                self._left = int(digits, 16)
                self._state = "chunk" if self._left else "trailer"
            elif not line:
                self._state = "idle"
                if data:
                    raise LinkError(f"{self._peer} sends more than its answer")

    def _hold(self, part: bytes) -> None:
        if not part:
            return
        self._parts.append(part)
        self._held_bytes += len(part)
        if self._held_bytes > READ_AHEAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    @property
    def keeps(self) -> bool:
        """The answer is whole, was taken whole, and the server keeps the connection."""
        return self._keeps and self._state == "idle" and self._error is None and not self._parts
