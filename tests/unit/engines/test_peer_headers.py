"""Short headers on connections: made in the order of sending, and honest about what was not sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from attrs import define, field

from engines.fakes_text import FakeTextEngine, fake_answer
from engines.peer import PeerEngine
from engines.peer_connection import PeerConnection
from engines.peer_host import HostedStreams
from engines.peer_session import Attachment
from links.memory import MemoryStream, memory_stream_pair
from links.port import FrameStream
from protocol.errors import LinkClosed, MidstreamError, TooLarge
from protocol.handoff import (
    MAX_FRAME_BYTES,
    NO_STREAM,
    Ack,
    Extend,
    Frame,
    Framed,
    Prepare,
    Ready,
    Refuse,
    Resume,
    Start,
    Tokens,
)
from protocol.handoff_headers import HandoffReader, header_bytes, whole_frame
from protocol.text import Sampling, TextRequest, Token
from tests.contract.text_engines import MemoryPeers

READY = Ready(0, None, 0.0, 0.0)


def stream_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def run_of(number: int) -> Tokens:
    return Tokens(number, (Token(number, number, b"x"),))


@define
class Tapped:
    """A FrameStream whose frames are kept as they cross."""

    inner: FrameStream
    up: list[bytes] = field(factory=list)
    down: list[bytes] = field(factory=list)

    async def send(self, frame: bytes) -> None:
        self.up.append(frame)
        await self.inner.send(frame)

    async def receive(self) -> bytes | None:
        frame = await self.inner.receive()
        if frame is not None:
            self.down.append(frame)
        return frame

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
async def host() -> AsyncIterator[FakeTextEngine]:
    engine = FakeTextEngine(tokens_per_s=500, answer_tokens=30, capacity=64)
    yield engine
    await engine.close()


@pytest.fixture
async def peers(host: FakeTextEngine) -> AsyncIterator[MemoryPeers]:
    made = MemoryPeers(host, HostedStreams(keep_s=0.5))
    yield made
    await made.close()


def tapping(peers: MemoryPeers) -> tuple[list[Tapped], Callable[[], object]]:
    taps: list[Tapped] = []

    async def open_stream() -> FrameStream:
        taps.append(Tapped(await peers.open()))
        return taps[-1]

    return taps, open_stream


async def answer(peer: PeerEngine, peers: MemoryPeers, prompt: str, cut_after: int | None = None) -> bytes:
    continuation = await peer.prepare(TextRequest("m", prompt, Sampling(max_tokens=40)), 5)
    said = b""
    async for token in continuation.start(0, 5):
        said += token.data
        if token.index == cut_after:
            peers.cut()
        continuation.acknowledge(token.index)
    return said


async def test_answers_cross_with_two_bytes_of_header_but_for_the_first_frame_of_each_stream(
    peers: MemoryPeers,
) -> None:
    taps, open_stream = tapping(peers)
    peer = PeerEngine(open_stream, resume_s=0.5)  # type: ignore[arg-type]
    prompts = [f"tell me of river {number}" for number in range(4)]
    said = await asyncio.gather(
        *(answer(peer, peers, prompt, 9 if prompt is prompts[0] else None) for prompt in prompts)
    )
    assert said == [fake_answer(prompt, 30, 30) for prompt in prompts]
    await peer.close()
    assert len(taps) == 2
    for tap in taps:
        for frames in (tap.up, tap.down):
            reader, known = HandoffReader(), set[tuple[bytes, int]]()
            for data in frames:
                framed = reader.decode(data)
                expected = 2 if (framed.stream, framed.epoch) in known else 5 if known else 23
                assert header_bytes(data) == expected
                known.add((framed.stream, framed.epoch))
            assert len(known) == len(prompts)


async def test_streams_of_a_connection_are_near_each_other_and_never_the_same() -> None:
    here, _ = memory_stream_pair()
    there, _ = memory_stream_pair()
    first, second = PeerConnection(here), PeerConnection(there)
    streams = [first.new_stream() for _ in range(70_000)]
    assert len({len(stream) for stream in streams}) == 1 and len(set(streams)) == len(streams)
    assert len({stream[:14] for stream in streams}) == 2, "the ends of streams were used up once"
    assert second.new_stream()[:14] not in {stream[:14] for stream in streams}
    await first.close()
    await second.close()


async def heard(stream: MemoryStream, reader: HandoffReader) -> Framed:
    data = await asyncio.wait_for(stream.receive(), 2)
    assert data is not None
    return reader.decode(data)


async def test_sends_that_are_cut_off_while_they_wait_do_not_name_their_stream() -> None:
    """As when a stream is stopped while its connection has no room; the others go on."""
    here, there = memory_stream_pair()
    attachment, reader = Attachment(there), HandoffReader()
    sends: list[tuple[bytes, Frame, asyncio.Task[None]]] = []
    for turn in range(200):
        frame = run_of(turn)
        stream = stream_of(1 + turn * turn % 23)
        sends.append((stream, frame, asyncio.create_task(attachment.send(stream, 1, frame))))
    await asyncio.sleep(0)
    # The first that waits inside of the link has its bytes made already; others still wait for their turn.
    for place in (8, 9, 30, 31, 32, 70):
        sends[place][2].cancel()
        await asyncio.sleep(0)
    found: list[tuple[bytes, Frame]] = []
    while len(found) < 194:
        framed = await heard(here, reader)
        found.append((framed.stream, framed.frame))
    assert found == [(stream, frame) for stream, frame, task in sends if not task.cancelled()]
    assert sum(task.cancelled() for _, _, task in sends) == 6


async def test_a_frame_that_cannot_be_written_leaves_the_headers_of_the_connection_as_they_were() -> None:
    here, there = memory_stream_pair()
    attachment, reader = Attachment(there), HandoffReader()
    too_long = Extend(0, tuple(Token(number, 1, b"x" * 4000) for number in range(MAX_FRAME_BYTES // 4000 + 1)))
    with pytest.raises(TooLarge):
        await attachment.send(stream_of(1), 1, too_long)
    for number in (1, 2, 1, 2):
        await attachment.send(stream_of(number), 1, READY)
        assert await heard(here, reader) == Framed(stream_of(number), 1, READY)


async def test_acknowledgements_that_replace_others_and_frames_that_are_too_long_do_not_shift_the_headers() -> None:
    here, there = memory_stream_pair()
    connection, reader, errors = PeerConnection(here), HandoffReader(), list[MidstreamError]()
    connection.attach(stream_of(9), lambda framed: None, errors.append)
    connection.post(stream_of(1), 1, Ack(0, 1))
    connection.post(stream_of(9), 1, Prepare(TextRequest("m", "x" * MAX_FRAME_BYTES)))
    connection.post(stream_of(2), 1, Start(0, 1))
    connection.post(stream_of(1), 1, Ack(1, 1))  # takes the place of the first, before the others
    connection.post(stream_of(1), 2, Resume(3))
    connection.post(stream_of(1), 1, Ack(2, 2))
    expected = [(1, 1, Ack(2, 2)), (2, 1, Start(0, 1)), (1, 2, Resume(3))]
    for number, epoch, frame in expected:
        assert await heard(there, reader) == Framed(stream_of(number), epoch, frame)
    assert [type(err) for err in errors] == [TooLarge]
    for epoch, index in ((1, 3), (2, 4)):
        connection.post(stream_of(1), epoch, Ack(index, index))
        assert await heard(there, reader) == Framed(stream_of(1), epoch, Ack(index, index))
    await connection.close()


async def test_why_a_peer_ended_the_connection_is_told() -> None:
    """A peer of another release says that it cannot read our frames."""
    here, there = memory_stream_pair()
    connection, errors = PeerConnection(here), list[MidstreamError]()
    connection.attach(stream_of(1), lambda framed: None, errors.append)
    said = Refuse("protocol_error", "frame version 2, this release speaks 1", field="version")
    await there.send(whole_frame(NO_STREAM, 0, said))
    while not errors:
        await asyncio.sleep(0)
    assert isinstance(errors[0], LinkClosed) and "this release speaks 1" in errors[0].message
    await connection.close()


async def test_a_slot_that_was_not_named_ends_the_connection_with_its_field(peers: MemoryPeers) -> None:
    stream = await peers.open()
    await stream.send(b"\x84\x07\x00\x01")
    data = await stream.receive()
    assert data is not None
    refused = HandoffReader().decode(data).frame
    assert isinstance(refused, Refuse) and (refused.code, refused.field) == ("protocol_error", "slot")
    assert await stream.receive() is None
