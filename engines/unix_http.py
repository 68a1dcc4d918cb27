"""The few lines of HTTP/1.1 that a server of our own, on a Unix socket or on loopback, is spoken to with.

One request per connection; closing the connection is how the server learns that nobody listens any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from attrs import define

from protocol.errors import LinkClosed, LinkError

MAX_BODY_BYTES = 64 << 20


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
        while size := _number((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)


@asynccontextmanager
async def local_request(address: str, path: str, body: bytes | None, bearer: str) -> AsyncGenerator[LocalReply, None]:
    """POST `body`, or GET when it is None, to `unix:///path` or `http://host:port`; leaving the context hangs up."""
    try:
        reader, writer = await _connect(address)
    except OSError as err:
        raise LinkClosed(f"the local server at {address} does not answer") from err
    try:
        writer.write(_head(path, body, bearer) + (body or b""))
        yield await _reply(reader)
    finally:
        writer.close()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix://"):
        return await asyncio.open_unix_connection(address.removeprefix("unix://"))
    host, _, port = address.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


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
