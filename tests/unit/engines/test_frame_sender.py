"""Who posts a message sends what leaves without a wait; the rest is the writer's, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest

from engines.frame_parts import FRAGMENT_BYTES, Outgoing
from engines.frame_sender import FrameSender
from protocol.errors import LinkClosed
from protocol.tensor_frames import Ask, Cancel, TensorHead, decode


class Stream:
    """Keeps frames. Without `room` whoever sends waits: before the frame is taken, as most streams do, or after it, as
    a WebSocket does. A sender that is cancelled is counted.
    """

    def __init__(self, takes_first: bool = False) -> None:
        self.frames: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()
        self.broken = False
        self.cancelled = 0
        self._takes_first = takes_first

    async def send(self, frame: bytes) -> None:
        if self.broken:
            raise LinkClosed("gone")
        if self._takes_first:
            self.frames.append(frame)
        try:
            await self.room.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if not self._takes_first:
            self.frames.append(frame)

    async def receive(self) -> bytes | None:
        return None

    async def close(self) -> None:
        return None

    def sent(self) -> list[tuple[int, str]]:
        return [(found.request, type(found.frame).__name__) for found in map(decode, self.frames)]


def message(request: int, size_bytes: int, on_end: Callable[[int], None] = lambda at: None) -> Outgoing:
    data = memoryview(bytes(size_bytes))
    heads = (TensorHead("x", "UINT8", (size_bytes,), size_bytes),)
    return Outgoing(request, lambda part: Ask("m", "", 1, heads, 0, part), deque([data]), on_end=on_end)


async def running(stream: Stream, credit_bytes: int | None = None) -> tuple[FrameSender, asyncio.Task[None]]:
    sender = FrameSender(stream, credit_bytes)
    task = asyncio.create_task(sender.run())
    await asyncio.sleep(0)
    return sender, task


async def asks(sender: FrameSender, posted: Outgoing, before: Callable[[], object]) -> None:
    """As a request does: it posts, then waits for its answer. `before` it, in the same turn, the writer is woken."""
    before()
    sender.post(posted)
    await asyncio.Event().wait()


async def all_sent(stream: Stream, frames: int) -> None:
    async with asyncio.timeout(1):
        while len(stream.frames) < frames:
            await asyncio.sleep(0)


async def test_a_message_leaves_in_the_turn_in_which_it_is_posted_behind_small_frames() -> None:
    stream = Stream()
    sender, task = await running(stream)
    sender.say(1, Cancel())
    sender.post(message(2, 10))
    assert stream.sent() == [(1, "Cancel"), (2, "Ask")]
    task.cancel()


async def test_the_rest_of_a_large_message_is_sent_by_the_writer() -> None:
    stream = Stream()
    sender, task = await running(stream)
    sender.post(message(2, 2 * FRAGMENT_BYTES + 1))
    assert stream.sent() == [(2, "Ask")]
    await all_sent(stream, 3)
    assert stream.sent() == [(2, "Ask"), (2, "Data"), (2, "Data")]
    task.cancel()


@pytest.mark.parametrize("takes_first", [False, True])
async def test_who_posts_does_not_wait_for_room_and_may_be_cancelled(takes_first: bool) -> None:
    """The first frame to leave is another's: it is neither lost nor sent twice."""
    stream = Stream(takes_first)
    sender, task = await running(stream)
    stream.room.clear()
    first = asyncio.create_task(asks(sender, message(2, 10), lambda: sender.say(1, Cancel())))
    await asyncio.sleep(0)
    sender.post(message(3, 10))
    sender.say(4, Cancel())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert (len(stream.frames), stream.cancelled) == (int(takes_first), 0)
    stream.room.set()
    await all_sent(stream, 4)
    assert stream.sent() == [(1, "Cancel"), (4, "Cancel"), (2, "Ask"), (3, "Ask")]
    task.cancel()


@pytest.mark.parametrize("takes_first", [False, True])
async def test_the_message_of_another_is_sent_and_told_to_its_end(takes_first: bool) -> None:
    ended: list[int] = []
    stream = Stream(takes_first)
    sender, task = await running(stream, credit_bytes=0)
    sender.post(message(2, 10, on_end=lambda at: ended.append(2)))
    await asyncio.sleep(0)
    stream.room.clear()
    third = message(3, 20, on_end=lambda at: ended.append(3))
    poster = asyncio.create_task(asks(sender, third, lambda: sender.grant(1_000)))
    await asyncio.sleep(0)
    poster.cancel()
    await asyncio.sleep(0)
    stream.room.set()
    await all_sent(stream, 2)
    assert (stream.sent(), ended) == ([(2, "Ask"), (3, "Ask")], [2, 3])
    task.cancel()


async def test_a_writer_that_ends_cancels_what_was_begun_and_nothing_leaves_after_it() -> None:
    stream = Stream()
    sender, task = await running(stream)
    stream.room.clear()
    sender.post(message(2, 10))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.cancelled == 1
    stream.room.set()
    sender.post(message(3, 10))
    await asyncio.sleep(0)
    assert stream.frames == []


async def test_a_stream_that_breaks_ends_the_run_and_not_whoever_posts() -> None:
    stream = Stream()
    sender, task = await running(stream)
    stream.broken = True
    sender.post(message(2, 10))
    sender.post(message(3, 10))
    with pytest.raises(LinkClosed, match="gone"):
        async with asyncio.timeout(1):
            await task


async def test_what_is_posted_before_the_run_waits_for_it() -> None:
    stream = Stream()
    sender = FrameSender(stream)
    sender.post(message(2, 10))
    assert stream.frames == []
    task = asyncio.create_task(sender.run())
    await all_sent(stream, 1)
    assert stream.sent() == [(2, "Ask")]
    task.cancel()
