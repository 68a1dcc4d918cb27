"""Many streams on one channel: credit, turns, liveness, ends. In memory, so that the network can be held and cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from attrs import define, field

from agent.cloud_link import TIMEOUTS_BEFORE_TROUBLE, CloudLink
from links.channel_link import ChannelFrames, ChannelLink
from links.channel_messages import FRAGMENT_BYTES, Bye, Data, Head, Open, decode_message, encode_message
from links.channel_server import ChannelServer, Peer
from links.channel_session import Session, SessionSettings
from links.channel_stream import WINDOW_COST, Stream
from links.port import FrameRoute, FrameStream, Request, Response, Route
from protocol.errors import LinkClosed, LinkError, LinkTimeout
from tests.unit.links.data_channels import MemoryChannel, memory_channels

QUICK = SessionSettings(ping_s=0.05, silent_s=0.3, streams=4, bye_s=0.2)


@define
class Ends:
    """Both ends of a session; `taken` are the streams that the far side was asked for."""

    ours: MemoryChannel
    theirs: MemoryChannel
    near: Session
    far: Session
    taken: list[tuple[Stream, Open]] = field(factory=list)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ours, theirs = memory_channels()
    taken: list[tuple[Stream, Open]] = []
    far = Session(theirs, "device", accept=lambda stream, opening: taken.append((stream, opening)), settings=QUICK)
    found = Ends(ours, theirs, Session(ours, "cloud", settings=QUICK), far, taken)
    yield found
    await found.near.close()
    await found.far.close()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_reader_that_does_not_read_stops_the_sender_within_its_window(ends: Ends) -> None:
    stream = await ends.near.open(Open("POST", "/"))
    sending = asyncio.ensure_future(stream.send(bytes(3 * WINDOW_COST), last=True))
    await until(lambda: ends.taken)
    await asyncio.sleep(0.1)
    assert not sending.done()
    sent = sum(len(m) for m in ends.ours.sent)
    assert WINDOW_COST * 0.9 < sent <= WINDOW_COST
    far, _ = ends.taken[0]
    read = 0
    while (part := await far.receive()) is not None:
        read += len(part.data)
    assert read == 3 * WINDOW_COST
    await sending


async def test_more_than_the_window_ends_the_session_and_not_the_memory(ends: Ends) -> None:
    stream = await ends.near.open(Open("POST", "/"))
    for _ in range(WINDOW_COST // FRAGMENT_BYTES + 1):
        ends.ours.send(encode_message(stream.number, Data(bytes(FRAGMENT_BYTES))))
    assert "broke the protocol" in await ends.far.closed()


async def test_streams_take_turns(ends: Ends) -> None:
    first, second = await ends.near.open(Open("POST", "/1")), await ends.near.open(Open("POST", "/2"))
    await asyncio.gather(first.send(bytes(20 * FRAGMENT_BYTES)), second.send(bytes(20 * FRAGMENT_BYTES)))
    order = [number for number, message in map(decode_message, ends.ours.sent) if isinstance(message, Data)]
    then = order[10:30]  # the first to come has filled the channel's buffer
    assert abs(then.count(first.number) - then.count(second.number)) <= 2
    assert ends.ours.most_waiting <= 12, "what waits in the channel is in everybody's way"


async def test_a_silent_peer_is_gone(ends: Ends) -> None:
    stream = await ends.near.open(Open("POST", "/"))
    ends.theirs.held = True
    with pytest.raises(LinkClosed, match="said nothing"):
        await stream.receive()
    assert "said nothing" in await ends.near.closed()


async def test_a_slow_link_whose_buffer_drains_is_not_a_silent_peer(ends: Ends) -> None:
    """The pings wait behind what was sent before them: nothing comes back for longer than the peer may be silent."""
    ends.theirs.held = True
    stream = await ends.near.open(Open("POST", "/"))
    ends.ours.held = True
    sending = asyncio.ensure_future(stream.send(bytes(60 * FRAGMENT_BYTES)))
    for _ in range(20):
        await asyncio.sleep(QUICK.silent_s / 10)
        ends.ours.held = False
        ends.ours.flush()
        ends.ours.held = True
    assert ends.near.why == ""
    assert await ends.near.closed(), "with a buffer that does not drain one side or the other notices"
    await asyncio.gather(sending, return_exceptions=True)


async def test_a_loop_that_stood_still_is_not_taken_for_a_dead_peer(ends: Ends) -> None:
    stream = await ends.near.open(Open("POST", "/"))
    await until(lambda: ends.taken)
    time.sleep(2 * QUICK.silent_s)  # noqa: ASYNC251 - the very thing to be survived
    await asyncio.sleep(0.1)
    assert (ends.near.why, ends.far.why) == ("", "")
    assert await stream.send(b"x")


async def test_everything_sent_before_a_goodbye_arrives(ends: Ends) -> None:
    stream = await ends.near.open(Open("GET", "/", frames=True))
    frames = ChannelFrames(stream, "cloud")
    for number in range(6):
        await frames.send(bytes([number]) * 30_000)
    await ends.near.close()
    far = ChannelFrames(ends.taken[0][0], "device")
    assert [(await far.receive() or b"")[:1] for _ in range(6)] == [bytes([n]) for n in range(6)]
    with pytest.raises(LinkClosed):
        await far.receive()
    assert await ends.far.closed() == "device left"


async def test_one_stream_too_many_waits_for_its_turn(ends: Ends) -> None:
    streams = [await ends.near.open(Open("POST", "/")) for _ in range(QUICK.streams)]
    waiting = asyncio.ensure_future(ends.near.open(Open("POST", "/late")))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    streams[0].leave()
    (await waiting).leave()


async def test_a_peer_that_opens_without_end_is_bounded(ends: Ends) -> None:
    for number in range(1, 3 * QUICK.streams):
        ends.ours.send(encode_message(number, Open("POST", "/")))
    await until(lambda: len(ends.theirs.sent) >= QUICK.streams)
    assert len(ends.taken) == 2 * QUICK.streams


async def test_a_client_may_not_be_called_by_the_server(ends: Ends) -> None:
    ends.theirs.send(encode_message(1, Open("POST", "/")))
    assert "broke the protocol" in await ends.near.closed()


async def test_the_last_of_what_was_sent_is_followed_by_probes_until_it_is_known_to_have_come(ends: Ends) -> None:
    await asyncio.sleep(0.02)
    ends.theirs.held = True  # nothing is confirmed
    stream = await ends.near.open(Open("POST", "/"))
    await stream.send(b"the last")
    await until(lambda: [m for m in ends.ours.sent if m[0] == 6][3:], 2)
    ends.theirs.held = False
    ends.theirs.flush()


async def test_a_frame_given_up_half_way_breaks_its_stream_and_no_other(ends: Ends) -> None:
    stream, other = await ends.near.open(Open("GET", "/", frames=True)), await ends.near.open(Open("POST", "/"))
    frames = ChannelFrames(stream, "cloud")
    await frames.send(bytes(WINDOW_COST - 200_000))
    cut = asyncio.ensure_future(frames.send(bytes(400_000)))
    await asyncio.sleep(0.05)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    with pytest.raises(LinkClosed):
        await frames.send(b"next")
    far = ChannelFrames(ends.taken[0][0], "device")
    assert len(await far.receive() or b"") == WINDOW_COST - 200_000
    with pytest.raises(LinkClosed):
        await far.receive()
    assert await other.send(b"x", last=True)


@pytest.fixture
async def served() -> AsyncIterator[tuple[ChannelLink, Ends, dict[str, object]]]:
    """A link to a server over memory channels, and what its handlers saw."""
    ours, theirs = memory_channels()
    seen: dict[str, object] = {}

    async def who(request: Request) -> Response:
        seen.update(peer=request.peer, der=request.peer_der, query=dict(request.query))
        return Response(200, {"X-Upper": "y"}, request.body)

    async def broken(request: Request) -> Response:
        raise ValueError("a bug")

    async def lost(request: Request) -> Response:
        raise LinkClosed("the server behind is gone")

    async def endless(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(100_000)
            finally:
                seen["closed"] = True

        return Response(200, {}, parts())

    async def slow(request: Request) -> Response:
        await asyncio.sleep(10)
        return Response(200)

    async def frames(request: Request, stream: FrameStream) -> None:
        try:
            await stream.receive()
        finally:
            seen["ended"] = True

    routes = [
        Route("POST", "/who", who, 1000), Route("POST", "/broken", broken), Route("POST", "/lost", lost),
        Route("POST", "/endless", endless), Route("POST", "/slow", slow),
    ]  # fmt: skip
    server = ChannelServer(routes, [FrameRoute("/frames", frames)], Peer("pi-1", b"der"))
    far = Session(theirs, "pi-1", accept=server.accept, settings=QUICK)
    near = Session(ours, "cloud", settings=QUICK)
    link = ChannelLink("cloud", near, max_reply_bytes=1 << 20)
    yield link, Ends(ours, theirs, near, far), seen
    await link.close()
    await far.close()
    await server.close()


Served = tuple[ChannelLink, Ends, dict[str, object]]


async def test_handlers_know_who_asks(served: Served) -> None:
    link, _, seen = served
    reply = await link.exchange("/who?a=1&b=", {}, b"x", 5)
    assert (reply.status, reply.headers["x-upper"], "server-timing" in reply.headers) == (200, "y", True)
    assert seen == {"peer": "pi-1", "der": b"der", "query": {"a": "1", "b": ""}}


async def test_errors_of_handlers_are_answers(served: Served) -> None:
    link, _, _ = served
    assert [(await link.exchange(p, {}, b"", 5)).status for p in ("/broken", "/lost", "/none")] == [500, 502, 404]
    assert (await link.exchange("/who?" + "&".join("abc"[i % 3] for i in range(200)), {}, b"", 5)).status == 400


async def test_an_answer_without_end_is_left_and_closed(served: Served) -> None:
    link, _, seen = served
    with pytest.raises(LinkError, match="more than"):
        await link.exchange("/endless", {}, b"", 5)
    await until(lambda: seen.get("closed"))


async def test_a_session_that_ends_ends_its_handlers(served: Served) -> None:
    link, ends, seen = served
    await link.open("/frames")
    ends.ours.held = ends.theirs.held = True
    await until(lambda: seen.get("ended"))
    with pytest.raises(LinkClosed):
        await link.exchange("/who", {}, b"", 5)


async def test_a_deadline_while_the_link_is_stuck_is_a_timeout_and_leaves_a_sample(served: Served) -> None:
    link, ends, _ = served
    await link.exchange("/who", {}, b"x", 5)
    ends.ours.held = True
    with pytest.raises(LinkTimeout):
        await link.exchange("/who", {}, bytes(900), 0.1)
    assert link.under_way() is None


async def test_headers_that_are_too_long_are_a_link_error(served: Served) -> None:
    link, _, _ = served
    with pytest.raises(LinkError, match="headers"):
        await link.exchange("/who", {"x": "y" * 40_000}, b"", 5)


async def test_a_head_of_nonsense_ends_the_session(ends: Ends) -> None:
    stream = await ends.near.open(Open("POST", "/"))
    await until(lambda: ends.taken)
    ends.taken[0][0].answer(Head(200))
    ends.theirs.send(encode_message(stream.number, Head(200)))
    assert "broke the protocol" in await ends.near.closed()


class Early(MemoryChannel):
    """A channel on which messages came before anyone listened."""

    def __init__(self, *messages: bytes) -> None:
        super().__init__()
        self.came = messages

    def listen(self, on_message: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        super().listen(on_message, on_closed)
        for message in self.came:
            on_message(message)


@pytest.mark.parametrize(("message", "why"), [(encode_message(0, Bye()), "left"), (b"\xff", "broke the protocol")])
async def test_a_peer_that_ended_it_before_it_began_is_a_session_that_has_ended(message: bytes, why: str) -> None:
    channel = Early(message)
    session = Session(channel, "device", settings=QUICK)
    assert why in await session.closed()
    assert channel.closed
    with pytest.raises(LinkClosed):
        await session.open(Open("POST", "/"))


async def test_slow_answers_of_a_peer_that_says_it_is_there_are_no_trouble_of_the_link(served: Served) -> None:
    link, ends, _ = served
    troubles: list[LinkError] = []
    cloud = CloudLink(troubles.append, "webrtc")
    await cloud.point_to(link)
    for _ in range(2 * TIMEOUTS_BEFORE_TROUBLE):
        with pytest.raises(LinkTimeout):
            await cloud.exchange("/slow", {}, b"", 0.02)
    assert troubles == []
    await until(link.heard_lately)
    ends.theirs.held = True
    async with asyncio.timeout(10):
        while not troubles:
            with pytest.raises(LinkError):
                await cloud.exchange("/slow", {}, b"", 0.02)
    await until(lambda: not link.heard_lately())
