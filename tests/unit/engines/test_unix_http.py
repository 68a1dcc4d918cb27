"""The few lines of HTTP to a server on a Unix socket: requests of any size leave whole, bodies come however cut."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engines.unix_http import local_request
from protocol.errors import LinkClosed, LinkError

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE_BYTES = 4 << 20


class FakeServer:
    """Keeps the request and answers with `pieces`, one write each."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.body = b""
        self.done = asyncio.Event()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except ConnectionError:
            pass  # the test had seen enough
        finally:
            writer.close()
            self.done.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        sizes = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        self.body = await reader.readexactly(int(sizes[0].split(b":")[1])) if sizes else b""
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[tuple[FakeServer, str]]:
    with tempfile.TemporaryDirectory(prefix="midstream-unix-") as folder:
        server, path = FakeServer(pieces), str(Path(folder) / "a.sock")
        listener = await asyncio.start_unix_server(server.talk, path)
        try:
            yield server, f"unix://{path}"
        finally:
            listener.close()
            await server.done.wait()
            await asyncio.sleep(0)  # transports close in the next turn of the loop


async def body_of(*pieces: bytes) -> bytes:
    async with answering(*pieces) as (_, address), local_request(address, "/x", b"{}", "key") as reply:
        return await reply.body()


def cut(data: bytes, size_bytes: int) -> list[bytes]:
    return [data[at : at + size_bytes] for at in range(0, len(data), size_bytes)]


@pytest.mark.parametrize("size_bytes", [1, 2, 3, 5, 7, 1000])
async def test_chunks_are_whole_however_the_bytes_come(size_bytes: int) -> None:
    body = b"3\r\nabc\r\n0A;name=value\r\n0123456789\r\n2\r\n\r\n\r\n0\r\n\r\n"
    assert await body_of(*cut(CHUNKED + body, size_bytes)) == b"abc0123456789\r\n"


async def test_chunks_that_came_together_are_given_together() -> None:
    pieces = (CHUNKED + b"1\r\na\r\n1\r\nb\r\n4\r\ncd", b"ef\r\n0\r\n\r\n")
    async with answering(*pieces) as (_, address), local_request(address, "/x", None, "key") as reply:
        assert [chunk async for chunk in reply.chunks()] == [b"ab", b"cdef"]


async def test_a_request_larger_than_the_socket_holds_leaves_whole() -> None:
    sent = bytes(range(256)) * (LARGE_BYTES // 256)
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with answering(whole) as (server, address), local_request(address, "/x", sent, "key") as reply:
        assert (reply.status, await reply.body()) == (200, b"ok")
    assert server.body == sent


@pytest.mark.parametrize("body", [b"", b"5\r\nabc", b"3\r\nabc\r\n", b"3\r\nabc\r\n0\r\n"])
async def test_a_server_that_vanishes_within_the_body_is_told(body: bytes) -> None:
    with pytest.raises(LinkClosed, match="in the middle of an answer"):
        await body_of(CHUNKED + body)


@pytest.mark.parametrize("body", [b"x" * 300, b"zz\r\nabc\r\n", b"-1\r\n", b"FFFFFFFFFF\r\n"])
async def test_sizes_that_are_none_are_refused(body: bytes) -> None:
    with pytest.raises(LinkError):
        await body_of(CHUNKED + body)


async def test_nobody_at_the_address() -> None:
    with pytest.raises(LinkClosed, match="does not answer"):
        async with local_request("unix:///nonexistent/a.sock", "/x", None, "key"):
            pass
