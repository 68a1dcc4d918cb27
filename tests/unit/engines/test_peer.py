"""The handoff protocol between PeerEngine and serve_stream, over memory streams that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engines.fakes_text import FakeTextEngine, fake_answer, fake_token
from engines.peer import PeerEngine
from engines.peer_host import HostedStreams, serve_stream
from links.memory import memory_stream_pair
from links.port import FrameStream
from protocol.errors import (
    EngineError,
    Full,
    LinkClosed,
    LinkTimeout,
    NotAllowed,
    NotFound,
    ProtocolError,
)
from protocol.handoff import Ack, Finish, Prepare, Ready, Refuse, Resume, Start, Stop, Tokens
from protocol.handoff_headers import HandoffReader, whole_frame
from protocol.text import Sampling, TextRequest, Token
from tests.contract.text_engines import MemoryPeers

PROMPT = "tell me of the river"
STREAM = bytes(range(16))


def ask(count: int = 40) -> TextRequest:
    return TextRequest("m", PROMPT, Sampling(max_tokens=count))


@pytest.fixture
async def host() -> AsyncIterator[FakeTextEngine]:
    engine = FakeTextEngine(tokens_per_s=500, answer_tokens=30)
    yield engine
    await engine.close()


@pytest.fixture
async def peers(host: FakeTextEngine) -> AsyncIterator[MemoryPeers]:
    made = MemoryPeers(host, HostedStreams(keep_s=0.5))
    yield made
    await made.close()


@pytest.fixture
async def peer(peers: MemoryPeers) -> AsyncIterator[PeerEngine]:
    engine = PeerEngine(peers.open, resume_s=0.3, silence_s=5.0)
    yield engine
    await engine.close()


@pytest.mark.parametrize("cut_after", [0, 1, 7, 29])
async def test_a_lost_connection_is_resumed_without_loss_or_doubling(
    peer: PeerEngine, peers: MemoryPeers, cut_after: int
) -> None:
    continuation = await peer.prepare(ask(), 5)
    taken: list[Token] = []
    stream = continuation.start(0, 5)
    if cut_after == 0:
        peers.cut()
    async for token in stream:
        taken.append(token)
        if len(taken) == cut_after:
            peers.cut()
        continuation.acknowledge(token.index)
    assert [token.index for token in taken] == list(range(31))
    assert b"".join(token.data for token in taken) == fake_answer(PROMPT, 30, 30)
    assert len(peers.opened) == 2


@pytest.mark.parametrize("ahead_tokens", [1, 5])
@pytest.mark.parametrize("cut_after", [None, 0, 1, 7])
async def test_a_first_token_that_came_with_ready_is_given_once(
    peer: PeerEngine, peers: MemoryPeers, host: FakeTextEngine, cut_after: int | None, ahead_tokens: int
) -> None:
    host.speaks_early = True
    continuation = await peer.prepare(ask(), 5)
    await asyncio.sleep(0.01)
    early = continuation.spoken()
    assert early is not None and early.data == fake_token(PROMPT, 0, 30).data
    stream = continuation.start(0, ahead_tokens)
    # It is there before the host has heard of the start.
    taken = [await asyncio.wait_for(anext(stream), 0.001)]
    if cut_after == 0:
        peers.cut()
    continuation.acknowledge(0)
    async for token in stream:
        taken.append(token)
        if len(taken) == cut_after:
            peers.cut()
        continuation.acknowledge(token.index)
    assert [token.index for token in taken] == list(range(31))
    assert b"".join(token.data for token in taken) == fake_answer(PROMPT, 30, 30)


async def test_an_extension_makes_an_early_token_void(peer: PeerEngine, host: FakeTextEngine) -> None:
    host.speaks_early = True
    continuation = await peer.prepare(ask(), 5)
    await continuation.extend([fake_token(PROMPT, index, 30) for index in range(3)])
    taken = [token async for token in continuation.start(3, 1000)]
    assert [token.index for token in taken] == list(range(3, 31))
    assert b"".join(token.data for token in taken) == fake_answer(PROMPT, 30, 30)[-sum(len(t.data) for t in taken) :]


async def test_an_owner_that_did_not_ask_gets_nothing_before_its_start(host: FakeTextEngine) -> None:
    host.speaks_early = True
    client = Raw(host, HostedStreams())
    await client.say(Prepare(ask(3)))
    assert isinstance(await client.hear(), Ready)
    await client.say(Start(0, 10))
    frame = await client.hear()
    assert isinstance(frame, Tokens) and frame.first == 0
    await client.end()


async def test_a_dead_host_ends_the_stream_at_the_exact_index(peer: PeerEngine, peers: MemoryPeers) -> None:
    continuation = await peer.prepare(ask(), 5)
    taken: list[Token] = []
    with pytest.raises(LinkClosed):
        async for token in continuation.start(0, 4):
            taken.append(token)
            if token.index == 9:
                peers.down = True
                peers.cut()
            continuation.acknowledge(token.index)
    assert [token.index for token in taken] == list(range(len(taken)))
    assert 10 <= len(taken) <= 14
    assert [token.data for token in taken] == [fake_token(PROMPT, i, 30).data for i in range(len(taken))]
    assert peer.load().running == 0


async def test_the_host_frees_a_stream_whose_owner_does_not_come_back(
    peer: PeerEngine, peers: MemoryPeers, host: FakeTextEngine
) -> None:
    continuation = await peer.prepare(ask(), 5)
    await anext(continuation.start(0, 3))
    peers.down = True
    peers.cut()
    await asyncio.sleep(0.1)
    assert host.load().running == 1, "a lost connection must leave time to resume"
    assert host.generated_count <= 4, "no more is generated than there is credit for"
    await asyncio.sleep(0.7)
    assert host.load().running == 0
    await continuation.close()


async def test_an_owner_that_leaves_in_order_stops_the_generation_at_once(
    peer: PeerEngine, host: FakeTextEngine
) -> None:
    continuation = await peer.prepare(ask(), 5)
    await anext(continuation.start(0, 3))
    await peer.close()
    await asyncio.sleep(0.05)
    assert host.load().running == 0


async def test_errors_of_the_host_arrive_as_what_they_are(peer: PeerEngine, host: FakeTextEngine) -> None:
    host.fail("prepare", Full("no room", retry_after_s=7.0))
    with pytest.raises(Full) as full:
        await peer.prepare(ask(), 5)
    assert full.value.retry_after_s == 7.0
    host.fail("token", EngineError("the engine broke"), index=6)
    continuation = await peer.prepare(ask(), 5)
    taken = []
    with pytest.raises(EngineError, match="the engine broke"):
        async for token in continuation.start(0, 100):
            taken.append(token.index)
    assert taken == list(range(6))
    host.fail("extend", EngineError("cannot read that"))
    continuation = await peer.prepare(ask(), 5)
    # It is not waited for, so that a start saves the round trip: the error comes with what follows.
    await continuation.extend([fake_token(PROMPT, 0, 30)])
    with pytest.raises(EngineError, match="cannot read that"):
        await continuation.extend([fake_token(PROMPT, 1, 30)])
    await continuation.close()
    host.fail("extend", EngineError("cannot read that either"))
    continuation = await peer.prepare(ask(), 5)
    await continuation.extend([fake_token(PROMPT, 0, 30)])
    with pytest.raises(EngineError, match="cannot read that either"):
        await anext(continuation.start(1, 4))
    await continuation.close()


async def test_a_silent_host_is_a_timeout(peers: MemoryPeers, host: FakeTextEngine) -> None:
    peer = PeerEngine(peers.open, silence_s=0.1)
    host.fail("token", None, index=2)
    continuation = await peer.prepare(ask(), 5)
    taken = []
    with pytest.raises(LinkTimeout):
        async for token in continuation.start(0, 100):
            taken.append(token.index)
    assert taken == [0, 1]
    host.fail("prepare", None)
    with pytest.raises(LinkTimeout):
        await peer.prepare(ask(), 0.1)
    await peer.close()
    host.kill()


async def test_capabilities_tokens_and_vectors_cross(peer: PeerEngine, host: FakeTextEngine) -> None:
    assert await peer.capabilities() == await host.capabilities()
    assert await peer.tokenize(b"one two") == await host.tokenize(b"one two")
    (mine,), (theirs,) = await peer.embed(["abc"]), await host.embed(["abc"])
    assert mine == pytest.approx(theirs, abs=1e-6)


async def test_views_for_models_share_one_connection(peer: PeerEngine, peers: MemoryPeers) -> None:
    first, second = peer.for_model("m"), peer.for_model("n")
    for engine in (first, second):
        await engine.capabilities()
        continuation = await engine.prepare(ask(3), 5)
        assert len([token async for token in continuation.start(0, 9)]) == 3
    await first.close()
    with pytest.raises(EngineError):
        await first.prepare(ask(), 5)
    await (await second.prepare(ask(), 5)).close()
    assert len(peers.opened) == 1
    await second.close()


async def test_a_second_hop_an_unknown_model_and_the_admit_hook_are_refused(host: FakeTextEngine) -> None:
    async def open_with(**how: object) -> PeerEngine:
        here, there = memory_stream_pair()

        def engine_for(model: str) -> FakeTextEngine:
            if model != "m":
                raise NotFound(f"no model {model}", field="model")
            return host

        def admit(frame: Prepare) -> None:
            if frame.request.sampling.max_tokens > 100:
                raise NotAllowed("too long for a guest")

        tasks.append(asyncio.create_task(serve_stream(engine_for, there, admit)))

        async def once() -> FrameStream:
            return here

        return PeerEngine(once, **how)  # type: ignore[arg-type]

    tasks: list[asyncio.Task[None]] = []
    passing_on, unknown, greedy = await open_with(hop=1), await open_with(model="x"), await open_with()
    with pytest.raises(NotAllowed, match="passed on"):
        await passing_on.prepare(ask(), 5)
    with pytest.raises(NotFound):
        await unknown.prepare(ask(), 5)
    with pytest.raises(NotFound):
        await unknown.capabilities()
    with pytest.raises(NotAllowed, match="guest"):
        await greedy.prepare(ask(101), 5)
    for engine in (passing_on, unknown, greedy):
        await engine.close()
    await asyncio.wait(tasks)


class Raw:
    """A client that speaks frames by hand, with whole headers only."""

    def __init__(self, host: FakeTextEngine, streams: HostedStreams, owner: str = "") -> None:
        self.here, there = memory_stream_pair()
        self.reader = HandoffReader()
        self.task = asyncio.create_task(serve_stream(lambda model: host, there, streams=streams, owner=owner))

    async def say(self, frame: object, epoch: int = 1, stream: bytes = STREAM) -> None:
        await self.here.send(whole_frame(stream, epoch, frame))  # type: ignore[arg-type]

    async def hear(self) -> object:
        async with asyncio.timeout(2):
            data = await self.here.receive()
        return None if data is None else self.reader.decode(data).frame

    async def hear_epoch(self) -> tuple[int, object]:
        async with asyncio.timeout(2):
            data = await self.here.receive()
        assert data is not None
        framed = self.reader.decode(data)
        return framed.epoch, framed.frame

    async def end(self) -> None:
        await self.here.close()
        await asyncio.wait([self.task])


async def test_host_resumes_only_newer_epochs_of_the_same_owner_within_what_is_kept(host: FakeTextEngine) -> None:
    streams = HostedStreams(keep_s=5.0)
    first = Raw(host, streams, "device:a")
    await first.say(Prepare(ask(30)))
    assert isinstance(await first.hear(), Ready)
    await first.say(Start(0, 3))
    got = 0
    while got < 3:
        run = await first.hear()
        assert isinstance(run, Tokens)
        got += len(run.tokens)
    stranger, second = Raw(host, streams, "device:b"), Raw(host, streams, "device:a")
    await stranger.say(Resume(0), epoch=2)
    assert (await stranger.hear()) == Refuse("model_not_found", "no such stream is kept here", field="stream")
    await second.say(Resume(0), epoch=1)
    refused = await second.hear()
    assert isinstance(refused, Refuse) and refused.field == "epoch"
    await second.say(Resume(9), epoch=2)
    refused = await second.hear()
    assert isinstance(refused, Refuse) and refused.field == "next"
    await second.say(Resume(1), epoch=2)
    epoch, run = await second.hear_epoch()
    assert epoch == 2 and isinstance(run, Tokens) and run.first == 1 and len(run.tokens) == 2
    await first.say(Ack(2, 1), epoch=1)
    await asyncio.sleep(0.05)
    assert host.generated_count == 3, "an ack of a stale epoch is no credit"
    await second.say(Ack(2, 7), epoch=2)
    run = await second.hear()
    assert isinstance(run, Tokens) and run.first == 3 and run.echo_ms == 7
    await second.say(Stop(4), epoch=2)
    await asyncio.sleep(0.05)
    assert host.load().running == 0 and not streams.open
    for client in (first, stranger, second):
        await client.end()


async def test_host_ends_with_a_finish_and_counts(host: FakeTextEngine) -> None:
    client = Raw(host, HostedStreams())
    await client.say(Prepare(ask(4)))
    await client.say(Start(0, 100))
    frames: list[object] = []
    while not isinstance(frames[-1] if frames else None, Finish):
        frames.append(await client.hear())
    last = frames[-1]
    assert isinstance(last, Finish) and (last.index, last.reason) == (4, "length")
    assert last.usage.completion_tokens == 4 and last.usage.prompt_tokens == 5
    await client.end()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00" * 30, b"GET / HTTP/1.1\r\n", whole_frame(STREAM, 1, Finish(0, "stop", None))[:-3] + b"{{{"],  # type: ignore[arg-type]
)
async def test_garbage_is_answered_and_the_connection_closed(host: FakeTextEngine, garbage: bytes) -> None:
    client = Raw(host, HostedStreams())
    await client.here.send(garbage)
    answer = await client.hear()
    assert isinstance(answer, Refuse) and answer.code == "protocol_error"
    assert await client.hear() is None
    await client.end()


async def test_frames_out_of_order_end_their_stream_only(host: FakeTextEngine) -> None:
    client = Raw(host, HostedStreams())
    await client.say(Prepare(ask()))
    assert isinstance(await client.hear(), Ready)
    await client.say(Start(5, 10))
    refused = await client.hear()
    assert isinstance(refused, Refuse) and refused.field == "at"
    await client.say(Prepare(ask(2)), stream=bytes(16)[:-1] + b"\x01")
    assert isinstance(await client.hear(), Ready)
    await client.say(Prepare(ask(2)), stream=bytes(16)[:-1] + b"\x01")
    refused = await client.hear()
    assert isinstance(refused, Refuse) and refused.field == "stream"
    await client.end()
    assert host.load().running == 0


async def test_streams_of_one_connection_are_bounded() -> None:
    host = FakeTextEngine(capacity=1000)
    streams = HostedStreams()
    client = Raw(host, streams)
    for number in range(33):
        await client.say(Prepare(ask()), stream=number.to_bytes(16, "little")[::-1] if number else b"\xff" * 16)
        answer = await client.hear()
        assert isinstance(answer, Ready if number < 32 else Refuse)
    await client.end()
    assert not streams.open and host.load().running == 0


class Liar:
    """A host that answers Prepare with Ready and then sends what a test wants."""

    def __init__(self) -> None:
        self.here, self.there = memory_stream_pair()
        self.engine = PeerEngine(self.open, silence_s=0.2, resume_s=0.0)

    async def open(self) -> FrameStream:
        return self.here

    async def started(self) -> tuple[AsyncIterator[Token], bytes]:
        preparing = asyncio.create_task(self.engine.prepare(ask(), 2))
        data = await self.there.receive()
        assert data is not None
        stream = HandoffReader().decode(data).stream
        await self.there.send(whole_frame(stream, 1, Ready(0, None, 0.0, 0.0, 3, 0)))
        return (await preparing).start(0, 4), stream


async def test_client_drops_stale_epochs_and_runs_that_do_not_begin_at_the_next_index() -> None:
    liar = Liar()
    tokens, stream = await liar.started()
    made = [Token(index=i, id=i, data=b"x") for i in range(4)]
    await liar.there.send(whole_frame(stream, 1, Tokens(0, tuple(made[:2]))))
    await liar.there.send(whole_frame(stream, 1, Tokens(0, tuple(made[:2]))))
    await liar.there.send(whole_frame(stream, 7, Tokens(2, tuple(made[2:3]))))
    await liar.there.send(whole_frame(stream, 1, Tokens(3, tuple(made[3:4]))))
    taken = []
    with pytest.raises(LinkTimeout):
        async for token in tokens:
            taken.append(token.index)
    assert taken == [0, 1]
    await liar.engine.close()


async def test_client_refuses_tokens_beyond_its_credit_and_an_end_without_a_mark() -> None:
    liar = Liar()
    tokens, stream = await liar.started()
    await liar.there.send(whole_frame(stream, 1, Tokens(0, tuple(Token(index=i, id=i, data=b"x") for i in range(9)))))
    with pytest.raises(ProtocolError, match="credit"):
        await anext(tokens)
    await liar.engine.close()


async def test_round_trips_are_seen_by_preparing_and_by_acknowledgements(
    peer: PeerEngine, host: FakeTextEngine
) -> None:
    assert peer.rtt_s is None
    host.fail("prepare", Full("no room", retry_after_s=0.1))
    with pytest.raises(Full):
        await peer.prepare(ask(), 5)
    assert peer.rtt_s is None
    continuation = await peer.prepare(ask(), 5)
    prepared_s = peer.rtt_s
    assert prepared_s is not None and 0 <= prepared_s < 1
    async for token in continuation.start(0, 2):
        continuation.acknowledge(token.index)
    assert peer.rtt_s is not None and 0 <= peer.rtt_s < 1
