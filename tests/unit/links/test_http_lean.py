"""The lean client: framing however the network cuts it, answers that are none, and connections that are used again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from links.http_lean import LeanHttpLink
from links.http_wire import HttpWire
from protocol.errors import ConfigError, LinkClosed, LinkError, LinkTimeout

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Pipe:
    """Stands for a transport."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        """Goes nowhere."""

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """Nothing to pause."""

    def resume_reading(self) -> None:
        """Nothing to resume."""


def fed(data: bytes, step: int, *, ended: bool = False) -> tuple[HttpWire, bytes]:
    """A connection that got `data` in parts, and the body so far."""
    wire = HttpWire("peer")
    wire.connection_made(Pipe())  # type: ignore[arg-type]
    wire.begin(b"GET")
    body = b""
    for at in range(0, len(data), step):
        wire.data_received(data[at : at + step])
        body += wire.ready()
    if ended:
        wire.connection_lost(None)
    return wire, body


@settings(max_examples=60)
@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.integers(1, 50),
    st.sampled_from(["length", "chunks", "close"]),
)
def test_a_body_reads_the_same_however_it_is_framed_and_cut(parts: list[bytes], step: int, framing: str) -> None:
    whole = b"".join(parts)
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    if framing == "length":
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole
    elif framing == "chunks":
        coded = b"".join(b"%X;a=b\r\n%s\r\n" % (len(part), part) for part in parts)
        data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\nx-trailer: 1\r\n\r\n"
    else:
        data = b"HTTP/1.0 200 OK\r\n\r\n" + whole
    wire, body = fed(early + data, step, ended=framing == "close")
    assert (wire.status, body) == (200, whole)
    assert wire.keeps is (framing != "close")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 200 OK\r\nx: 1\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx : 1\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\nbody",
        b"x" * 70_000,
    ],
)
def test_an_answer_that_is_none_ends_the_connection(data: bytes) -> None:
    wire, _ = fed(data, 1000)
    assert not wire.keeps and not wire.open
    with pytest.raises(LinkError):
        asyncio.run(_again(wire))


async def _again(wire: HttpWire) -> None:
    await wire.begun()
    while await wire.read():
        pass
    raise wire._error or AssertionError("it was taken for an answer")


@asynccontextmanager
async def server(serve: Serve, **how: Any):  # type: ignore[no-untyped-def]
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    link = LeanHttpLink("peer", f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/base", **how)
    try:
        yield link, writers
    finally:
        await link.close()
        listening.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.01)


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or b"0")
    return head + (await reader.readexactly(length) if length else b"")


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_a_connection_is_used_again_and_carries_the_whole_request() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await request(reader))
            writer.write(OK)

    async with server(serve) as (link, writers):
        for _ in range(3):
            assert (await link.exchange("/x", {"a": "b"}, b"body", 5.0)).body == b"ok"
        assert len(writers) == 1
        assert seen[0].startswith(b"POST /base/x HTTP/1.1\r\nhost: 127.0.0.1:") and b"\r\na: b\r\n" in seen[0]
        assert seen[0].endswith(b"content-length: 4\r\n\r\nbody")


async def test_a_kept_connection_that_went_away_is_replaced_once() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)
        await request(reader)  # and hangs up on the second one

    async with server(serve) as (link, writers):
        for _ in range(3):
            assert (await link.exchange("/x", {}, b"b", 5.0)).status == 200
        assert len(writers) == 3


async def test_a_fresh_connection_that_closes_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)

    async with server(serve) as (link, writers):
        with pytest.raises(LinkClosed):
            await link.exchange("/x", {}, b"b", 5.0)
        assert len(writers) == 1


async def test_an_idle_connection_is_closed_by_itself() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)
        assert await reader.read() == b""
        gone.set()

    async with server(serve, keep_idle_s=0.1) as (link, _):
        await link.exchange("/x", {}, b"b", 5.0)
        await asyncio.wait_for(gone.wait(), 2.0)


async def test_a_body_over_the_limit_and_one_that_is_cut() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/cut" in await request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n" + bytes(9000))

    async with server(serve, max_reply_bytes=1000) as (link, _):
        with pytest.raises(LinkError, match="more than the 1000 bytes"):
            await link.exchange("/large", {}, b"", 5.0)
        with pytest.raises(LinkClosed):
            await link.exchange("/cut", {}, b"", 5.0)


async def test_connections_are_bounded_and_waited_for() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            await asyncio.sleep(0.02)
            writer.write(OK)

    async with server(serve, connections=2) as (link, writers):
        await asyncio.gather(*(link.exchange("/x", {}, b"b", 5.0) for _ in range(8)))
        assert len(writers) == 2
        with pytest.raises(LinkTimeout):
            await asyncio.gather(*(link.exchange("/x", {}, b"b", 0.03) for _ in range(8)))


@pytest.mark.parametrize("headers", [{"a": "b\r\nx: y"}, {"a\nb": "c"}, {"a": "b\n"}])
async def test_no_header_smuggles_another(headers: dict[str, str]) -> None:
    async with server(lambda reader, writer: request(reader)) as (link, writers):  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError):
            await link.exchange("/x", headers, b"b", 1.0)
        with pytest.raises(ConfigError):
            await link.exchange("/x y", {}, b"b", 1.0)
        assert not writers


async def test_nobody_listens() -> None:
    link = LeanHttpLink("peer", "http://127.0.0.1:9")
    with pytest.raises(LinkError, match="cannot reach"):
        await link.exchange("/x", {}, b"", 1.0)
    await link.close()
    with pytest.raises(ConfigError):
        LeanHttpLink("peer", "ftp://x")
