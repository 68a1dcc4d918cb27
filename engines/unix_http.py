"""The few lines of HTTP/1.1 that a server of our own, on a Unix socket or on loopback, is spoken to with.

One request per connection; closing the connection is how the server learns that nobody listens any more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from attrs import define

from protocol.errors import LinkClosed, LinkError

MAX_BODY_BYTES = 64 << 20
READ_BYTES = 1 << 16
MAX_SIZE_LINE_BYTES = 256
BUSY_S = 0.01
"""Between two tries while a server takes no more connections."""


@define(eq=False)
class LocalReply:
    """Status and body of an answer under way."""

    status: int
    _reader: asyncio.StreamReader
    _length: int | None
    _chunked: bool

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises LinkClosed when the server vanishes before its end."""
        try:
            if self._chunked:
                async for chunk in self._chunks():
                    yield chunk
            elif self._length is not None:
                yield await self._reader.readexactly(self._length)
            else:
                while part := await self._reader.read(1 << 16):
                    yield part
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
            raise LinkClosed("the local server vanished in the middle of an answer") from err

    async def body(self) -> bytes:
        """All of the body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """All that has come whole at a time, which is often more than one chunk."""
        held = bytearray()
        ended = False
        while not ended:
            part = await self._reader.read(READ_BYTES)
            if not part:
                raise asyncio.IncompleteReadError(bytes(held[:READ_BYTES]), None)
            held += part
            whole, ended = _whole_chunks(held)
            if whole:
                yield whole


def _whole_chunks(held: bytearray) -> tuple[bytes, bool]:
    """Takes the chunks that are whole off `held`: their bytes, and whether the last one was among them."""
    found: list[bytes] = []
    at, ended = 0, False
    while not ended and (end := held.find(b"\r\n", at, at + MAX_SIZE_LINE_BYTES)) >= 0:
        size_bytes = _number(bytes(held[at:end]).split(b";")[0], 16)
        if len(held) < end + 2 + size_bytes + 2:
            break
        found.append(bytes(held[end + 2 : end + 2 + size_bytes]))
        at, ended = end + size_bytes + 4, size_bytes == 0
    else:
        if not ended and len(held) - at >= MAX_SIZE_LINE_BYTES:
            raise LinkError("the local server sent something that is not HTTP")
    del held[:at]
    return b"".join(found), ended


@asynccontextmanager
async def local_request(address: str, path: str, body: bytes | None, bearer: str) -> AsyncGenerator[LocalReply, None]:
    """POST `body`, or GET when it is None, to `unix:///path` or `http://host:port`; leaving the context hangs up."""
    try:
        reader, writer = await _sent(address, _head(path, body, bearer) + (body or b""))
    except OSError as err:
        raise LinkClosed(f"the local server at {address} does not answer") from err
    try:
        yield await _reply(reader)
    finally:
        writer.close()


async def _sent(address: str, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The connection that `request` went over."""
    if address.startswith("unix://"):
        return await _sent_at_once(address.removeprefix("unix://"), request)
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    return reader, writer


async def _sent_at_once(path: str, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The server has the request, as far as the socket takes it, before this side makes ready for the answer."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        await _connect(connected, path)
        try:
            sent_bytes = connected.send(request)
        except BlockingIOError:
            sent_bytes = 0
        reader, writer = await asyncio.open_unix_connection(sock=connected)
    except BaseException:
        connected.close()
        raise
    if sent_bytes < len(request):
        writer.write(request[sent_bytes:])
    return reader, writer


async def _connect(waiting: socket.socket, path: str) -> None:
    """A connection to a Unix socket is there at once, or refused while as many as the server takes wait already."""
    while True:
        try:
            waiting.connect(path)
        except BlockingIOError:
            await asyncio.sleep(BUSY_S)
        else:
            return


def _head(path: str, body: bytes | None, bearer: str) -> bytes:
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        f"authorization: Bearer {bearer}",
    ]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _reply(reader: asyncio.StreamReader) -> LocalReply:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
        raise LinkClosed("the local server vanished before its answer") from err
    first, *lines = head.split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length = headers.get(b"content-length")
    return LocalReply(
        status=_number(first.split(b" ")[1] if first.count(b" ") else b"", 10),
        reader=reader,
        length=None if length is None else _number(length, 10),
        chunked=headers.get(b"transfer-encoding", b"").lower() == b"chunked",
    )


def _number(text: bytes, base: int) -> int:
    try:
        value = int(text.strip(), base)
    except ValueError as err:
        raise LinkError("the local server sent something that is not HTTP") from err
    if not 0 <= value <= MAX_BODY_BYTES:
        raise LinkError(f"the local server announced {value} bytes")
    return value
