"""Frame streams over WebSocket: the heartbeat keeps quiet streams, drops dead ones, and leaves slow readers alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from links.http import HttpLink
from links.http_front import ServerLimits
from links.http_server import serve
from links.port import FrameRoute, FrameStream, Request
from protocol.errors import LinkClosed, LinkError
from tests.raw_peer import accept_websocket, raw_server

BEAT_S = 0.1


@asynccontextmanager
async def stream_to(
    handle: Callable[[Request, FrameStream], object], *, server_beat_s: float = BEAT_S
) -> AsyncIterator[FrameStream]:
    """A client stream to a server whose handler is `handle`."""
    routes = [FrameRoute("/f", handle)]  # type: ignore[arg-type]
    server = await serve([], routes, limits=ServerLimits(heartbeat_s=server_beat_s))
    link = HttpLink("desk", f"http://127.0.0.1:{server.port}", heartbeat_s=BEAT_S)
    stream = await link.open("/f")
    yield stream
    await stream.close()
    await link.close()
    await server.close(grace_s=0.1)


async def _echo(request: Request, stream: FrameStream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


async def test_a_quiet_stream_outlives_many_heartbeats() -> None:
    async with stream_to(_echo) as stream:
        receiving = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(BEAT_S * 8)
        assert not receiving.done()
        await stream.send(b"still here")
        assert await receiving == b"still here"


async def test_a_reader_that_is_busy_is_not_taken_for_dead() -> None:
    async def burst(request: Request, stream: FrameStream) -> None:
        for number in range(20):
            await stream.send(bytes([number]) * 30_000)
        assert await stream.receive() == b"done"

    async with stream_to(burst, server_beat_s=2.0) as stream:
        await asyncio.sleep(BEAT_S * 5)
        first = await stream.receive()
        await asyncio.sleep(BEAT_S * 5)
        rest = [await stream.receive() for _ in range(19)]
        assert first is not None
        assert [frame[0] for frame in rest if frame] == list(range(1, 20))
        await stream.send(b"done")
        assert await stream.receive() is None


async def test_giving_up_waiting_loses_no_frame() -> None:
    async with stream_to(_echo) as stream:
        for number in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await stream.receive()
            await stream.send(bytes([number]))
            assert await stream.receive() == bytes([number])


@asynccontextmanager
async def _silent_after(then: bytes) -> AsyncIterator[FrameStream]:
    """A stream to a peer that accepts the WebSocket, sends `then`, and never answers again."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_websocket(reader, writer)
        writer.write(then)
        await reader.read()

    async with raw_server(handle) as port:
        link = HttpLink("desk", f"http://127.0.0.1:{port}", heartbeat_s=BEAT_S)
        stream = await link.open("/f")
        yield stream
        await stream.close()
        await link.close()


async def test_a_peer_that_answers_no_heartbeat_is_gone() -> None:
    async with _silent_after(b"") as stream, asyncio.timeout(8):
        with pytest.raises(LinkClosed, match="said nothing"):
            await stream.receive()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"\x81\x02hi", "text message"),
        (b"\x82\x7f" + (1 << 40).to_bytes(8, "big"), "broke the frame stream"),
        (b"\xf2\x00", "broke the frame stream"),
        (b"\x8f\x00", "broke the frame stream"),
    ],
)
async def test_frames_against_the_rules_end_the_stream(frame: bytes, message: str) -> None:
    async with _silent_after(frame) as stream, asyncio.timeout(8):
        with pytest.raises(LinkError, match=message):
            await stream.receive()
