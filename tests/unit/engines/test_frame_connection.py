"""The asking side of a stream that takes nothing: requests hear at once how theirs ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from engines.frame_connection import FrameConnection, Sink
from engines.remote_frames import used_at_once
from protocol.errors import LinkClosed, LinkTimeout
from protocol.tensor_frames import Ask, Cancel, Hello, decode, encode, heads_of
from protocol.tensors import Tensor

X = Tensor("x", "UINT8", (4,), b"abcd")


class Stream:
    """Greets, then says nothing more; without `room` it takes nothing."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()
        self._greeted = False

    async def send(self, frame: bytes) -> None:
        await self.room.wait()
        self.frames.append(frame)

    async def receive(self) -> bytes | None:
        if self._greeted:
            await asyncio.Event().wait()
        self._greeted = True
        return encode(0, Hello(max_requests=8, max_bytes=1 << 20))

    async def close(self) -> None:
        return None


@pytest.fixture
async def stream() -> Stream:
    return Stream()


@pytest.fixture
async def connection(stream: Stream) -> AsyncIterator[FrameConnection]:
    made = FrameConnection(stream, Sink("cloud", lambda sample: None, time.monotonic))
    await made.greet()
    async with asyncio.timeout(1):
        while not stream.frames:
            await asyncio.sleep(0)
    stream.frames.clear()
    stream.room.clear()
    yield made
    await made.close()


async def asks(connection: FrameConnection) -> object:
    ask = Ask("m", "", 0, heads_of([X]))
    return await connection.ask(ask, [X], time.monotonic() + 5.0, used_at_once)


async def test_who_asks_hears_that_the_stream_is_given_up_while_it_takes_nothing(connection: FrameConnection) -> None:
    asked = [asyncio.create_task(asks(connection)) for _ in range(2)]
    await asyncio.sleep(0)
    connection.abandon(LinkTimeout("silent"))
    async with asyncio.timeout(1):
        ends = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(end) for end in ends] == [LinkTimeout, LinkTimeout]
    with pytest.raises(LinkTimeout):
        await asks(connection)


async def test_a_stream_that_closes_ends_all_requests(connection: FrameConnection) -> None:
    asked = asyncio.create_task(asks(connection))
    await asyncio.sleep(0)
    await connection.close()
    with pytest.raises(LinkClosed):
        await asked


async def test_what_is_given_up_as_it_leaves_is_taken_back(stream: Stream, connection: FrameConnection) -> None:
    first = asyncio.create_task(asks(connection))
    second = asyncio.create_task(asks(connection))
    await asyncio.sleep(0)
    first.cancel()
    third = asyncio.create_task(asks(connection))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    stream.room.set()
    async with asyncio.timeout(1):
        while len(stream.frames) < 3:
            await asyncio.sleep(0)
    found = [decode(frame) for frame in stream.frames]
    assert [(framed.request, type(framed.frame)) for framed in found] == [(1, Ask), (1, Cancel), (3, Ask)]
    assert not third.done()
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
