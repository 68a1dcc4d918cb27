"""Who posts a message sends it where nobody else is writing; the order of frames and the end of a stream stay."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from engines.frame_parts import FRAGMENT_BYTES, Outgoing
from engines.frame_sender import FrameSender
from protocol.errors import LinkClosed
from protocol.tensor_frames import Ask, Cancel, TensorHead, decode


class Stream:
    """Keeps frames; `full` holds up whoever sends, after the frame was taken."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.full = False
        self.room = asyncio.Event()
        self.broken = False

    async def send(self, frame: bytes) -> None:
        if self.broken:
            raise LinkClosed("gone")
        self.frames.append(frame)
        if self.full:
            await self.room.wait()

    async def receive(self) -> bytes | None:
        return None

    async def close(self) -> None:
        return None

    def sent(self) -> list[tuple[int, str]]:
        return [(found.request, type(found.frame).__name__) for found in map(decode, self.frames)]


def message(request: int, size_bytes: int) -> Outgoing:
    data = memoryview(bytes(size_bytes))
    heads = (TensorHead("x", "UINT8", (size_bytes,), size_bytes),)
    return Outgoing(request, lambda part: Ask("m", "", 1, heads, 0, part), deque([data]))


async def running(stream: Stream) -> tuple[FrameSender, asyncio.Task[None]]:
    sender = FrameSender(stream)
    task = asyncio.create_task(sender.run())
    await asyncio.sleep(0)
    return sender, task


async def test_a_message_leaves_in_the_turn_in_which_it_is_posted_behind_small_frames() -> None:
    stream = Stream()
    sender, task = await running(stream)
    sender.say(1, Cancel())
    await sender.post(message(2, 10))
    assert stream.sent() == [(1, "Cancel"), (2, "Ask")]
    task.cancel()


async def test_the_rest_of_a_large_message_is_sent_by_the_writer() -> None:
    stream = Stream()
    sender, task = await running(stream)
    await sender.post(message(2, 2 * FRAGMENT_BYTES + 1))
    assert stream.sent() == [(2, "Ask")]
    async with asyncio.timeout(1):
        while sender.waiting:
            await asyncio.sleep(0)
    assert stream.sent() == [(2, "Ask"), (2, "Data"), (2, "Data")]
    task.cancel()


async def test_one_writes_at_a_time_and_who_leaves_holds_nobody_up() -> None:
    stream = Stream()
    sender, task = await running(stream)
    stream.full = True
    first = asyncio.create_task(sender.post(message(2, 10)))
    await asyncio.sleep(0)
    await sender.post(message(3, 10))
    sender.say(4, Cancel())
    await asyncio.sleep(0)
    assert stream.sent() == [(2, "Ask")], "the first one waits for room"
    stream.full = False
    first.cancel()
    async with asyncio.timeout(1):
        while sender.waiting:
            await asyncio.sleep(0)
    assert stream.sent() == [(2, "Ask"), (4, "Cancel"), (3, "Ask")]
    task.cancel()


async def test_a_stream_that_breaks_ends_the_run_and_not_whoever_posts() -> None:
    stream = Stream()
    sender, task = await running(stream)
    stream.broken = True
    await sender.post(message(2, 10))
    with pytest.raises(LinkClosed, match="gone"):
        async with asyncio.timeout(1):
            await task


async def test_what_is_posted_before_the_run_waits_for_it() -> None:
    stream = Stream()
    sender = FrameSender(stream)
    await sender.post(message(2, 10))
    assert stream.frames == []
    task = asyncio.create_task(sender.run())
    async with asyncio.timeout(1):
        while sender.waiting:
            await asyncio.sleep(0)
    assert stream.sent() == [(2, "Ask")]
    task.cancel()
