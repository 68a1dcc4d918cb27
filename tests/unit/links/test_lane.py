"""The reader lane: frames handled in a thread of its own, back-pressure to the sender, orderly and broken ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.lane import ReaderLane
from links.port import FrameRoute, FrameStream, Request
from protocol.errors import LinkClosed, LinkError

FRAMES = 400
SIZE = 20_000


class Sender:
    """Sends FRAMES frames on `/burst` and counts how many it got rid of; echoes on `/echo`."""

    def __init__(self) -> None:
        self.sent = 0

    async def burst(self, request: Request, stream: FrameStream) -> None:
        for number in range(FRAMES):
            await stream.send(number.to_bytes(4, "big") + bytes(SIZE))
            self.sent += 1

    async def echo(self, request: Request, stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame)


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
async def server(sender: Sender) -> AsyncIterator[RunningServer]:
    routes = [FrameRoute("/burst", sender.burst), FrameRoute("/echo", sender.echo)]
    running = await serve([], routes)
    yield running
    await running.close(grace_s=0.1)


def _opener(port: int, path: str) -> tuple[Callable[[], Awaitable[FrameStream]], Callable[[], Awaitable[None]]]:
    links: list[HttpLink] = []

    async def open_stream() -> FrameStream:
        links.append(HttpLink("c", f"http://127.0.0.1:{port}"))
        return await links[0].open(path)

    async def after() -> None:
        for link in links:
            await link.close()

    return open_stream, after


async def test_frames_are_handled_in_order_by_one_foreign_thread(server: RunningServer) -> None:
    seen: list[int] = []
    threads: set[str] = set()
    ended = threading.Event()

    def on_frame(frame: bytes) -> None:
        seen.append(int.from_bytes(frame[:4], "big"))
        threads.add(threading.current_thread().name)

    open_stream, after = _opener(server.port, "/burst")
    lane = ReaderLane(open_stream, on_frame, on_end=lambda error: ended.set(), after=after, name="lane under test")
    await asyncio.to_thread(lane.start)
    assert await asyncio.to_thread(ended.wait, 10)
    await asyncio.to_thread(lane.close)
    assert seen == list(range(FRAMES))
    assert threads == {"lane under test"}
    assert lane.frames == FRAMES
    assert not lane.running


async def test_a_callback_that_blocks_slows_the_sender_down(server: RunningServer, sender: Sender) -> None:
    gate = threading.Event()
    handled: list[bytes] = []

    def on_frame(frame: bytes) -> None:
        gate.wait(10)
        handled.append(frame)

    open_stream, after = _opener(server.port, "/burst")
    lane = ReaderLane(open_stream, on_frame, after=after)
    await asyncio.to_thread(lane.start)
    await asyncio.sleep(0.4)
    held_at = sender.sent
    await asyncio.sleep(0.2)
    assert sender.sent == held_at < FRAMES
    assert handled == []
    gate.set()
    async with asyncio.timeout(10):
        while len(handled) < FRAMES:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(lane.close)


async def test_other_threads_can_send(server: RunningServer) -> None:
    got: list[bytes] = []
    open_stream, after = _opener(server.port, "/echo")
    lane = ReaderLane(open_stream, got.append, after=after)
    await asyncio.to_thread(lane.start)
    for number in range(10):
        await asyncio.to_thread(lane.send, bytes([number]))
    async with asyncio.timeout(5):
        while len(got) < 10:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(lane.close)
    assert got == [bytes([number]) for number in range(10)]
    with pytest.raises(LinkClosed):
        await asyncio.to_thread(lane.send, b"too late")


async def test_closing_waits_for_the_frame_at_hand_and_no_longer(server: RunningServer) -> None:
    started = threading.Event()

    def on_frame(frame: bytes) -> None:
        started.set()
        time.sleep(0.2)

    open_stream, after = _opener(server.port, "/burst")
    lane = ReaderLane(open_stream, on_frame, after=after)
    await asyncio.to_thread(lane.start)
    assert await asyncio.to_thread(started.wait, 5)
    began_s = time.monotonic()
    await asyncio.to_thread(lane.close)
    assert time.monotonic() - began_s < 3
    assert not lane.running
    assert lane.frames < FRAMES


async def test_opening_that_fails_is_told_to_the_starter(free_port: Callable[[], int]) -> None:
    open_stream, after = _opener(free_port(), "/none")
    lane = ReaderLane(open_stream, lambda frame: None, after=after)
    with pytest.raises(LinkError):
        await asyncio.to_thread(lane.start)
    await asyncio.to_thread(lane.close)


async def test_an_error_of_the_callback_ends_the_lane_and_is_told(server: RunningServer) -> None:
    ends: list[Exception | None] = []
    done = threading.Event()

    def on_frame(frame: bytes) -> None:
        raise ValueError("a bug")

    def on_end(error: Exception | None) -> None:
        ends.append(error)
        done.set()

    open_stream, after = _opener(server.port, "/burst")
    lane = ReaderLane(open_stream, on_frame, on_end=on_end, after=after)
    await asyncio.to_thread(lane.start)
    assert await asyncio.to_thread(done.wait, 5)
    await asyncio.to_thread(lane.close)
    assert [type(error) for error in ends] == [ValueError]


async def test_a_second_close_does_not_cut_short_the_clean_up_of_the_first(server: RunningServer) -> None:
    cleaning, cleaned = threading.Event(), threading.Event()
    open_stream, close_link = _opener(server.port, "/echo")

    async def after() -> None:
        cleaning.set()
        await asyncio.sleep(0.3)
        await close_link()
        cleaned.set()

    lane = ReaderLane(open_stream, lambda frame: None, after=after)
    await asyncio.to_thread(lane.start)
    first = asyncio.create_task(asyncio.to_thread(lane.close))
    assert await asyncio.to_thread(cleaning.wait, 5)
    await asyncio.to_thread(lane.close)
    await first
    assert cleaned.is_set()
    assert not lane.running
