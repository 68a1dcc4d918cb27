"""Device and cloud as two HTTP servers joined by a WebSocket: planned moves, and a cloud that vanishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import define

from engines.fakes_text import FakeTextEngine, fake_answer
from engines.peer import PeerEngine
from engines.peer_host import HostedStreams, serve_stream
from gateway.targets import Target
from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.port import FrameRoute, FrameStream, Request
from protocol.events import HandedOver, SourceLost
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy
from protocol.text import Message
from tests.route.openai_scenarios import client, read, text_of
from tests.route.text_house import House, house

PATH = "/handoff"
COUNT = 60
QUESTION = "what runs past the mill"
MESSAGES = [{"role": "user", "content": QUESTION}]
EXPECTED = fake_answer((Message(role="user", content=QUESTION),), COUNT).decode()
MOVES = MigrationPolicy(min_tokens=8, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=0.5)


@define
class Cloud:
    """A server with the handoff endpoint over one fake engine."""

    engine: FakeTextEngine
    server: RunningServer
    streams: HostedStreams

    async def vanish(self) -> None:
        """Cut every connection and listen no more."""
        await self.server.close(grace_s=0.01)


@asynccontextmanager
async def cloud(engine: FakeTextEngine) -> AsyncIterator[Cloud]:
    streams = HostedStreams()

    async def handle(request: Request, stream: FrameStream) -> None:
        await serve_stream(lambda _: engine, stream, streams=streams)

    server = await serve([], [FrameRoute(PATH, handle)])
    try:
        yield Cloud(engine, server, streams)
    finally:
        await streams.close()
        await server.close(grace_s=0.01)


@asynccontextmanager
async def device(local: FakeTextEngine, remote: Cloud, policy: Policy) -> AsyncIterator[House]:
    """The text way over a local engine and the peer behind a real link."""
    link = HttpLink("cloud", f"http://127.0.0.1:{remote.server.port}")
    peer = PeerEngine(
        lambda: link.open(PATH), name="cloud", vocabulary=(await local.capabilities()).vocabulary, resume_s=0.2
    )
    targets = [
        Target("device", True, local, frozenset({"fake"})),
        Target("cloud", False, peer, frozenset({"fake"}), tokens_per_s=1e9),
    ]
    try:
        async with house(targets, policy=policy) as one:
            yield one
    finally:
        await peer.close()
        await link.close()


async def ask(one: House) -> str:
    """The streamed answer, by the openai client."""
    async with client(one.base_url) as api:
        stream = await api.chat.completions.create(
            model="fake",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=COUNT,
            stream=True,
        )
        return text_of(await read(stream))


async def test_an_answer_begins_here_and_ends_there() -> None:
    local, remote = FakeTextEngine(tokens_per_s=300), FakeTextEngine()
    async with cloud(remote) as there, device(local, there, Policy(migration=MOVES)) as one:
        assert await ask(one) == EXPECTED
        [moved] = [event for event in one.emit.events if isinstance(event, HandedOver)]
        assert (moved.source, moved.target) == ("device", "cloud")
        assert one.done()[0].sides == (("device", moved.index), ("cloud", COUNT - moved.index))
    assert (local.load().running, remote.load().running) == (0, 0)


async def test_a_cloud_that_vanishes_mid_answer_leaves_a_complete_answer() -> None:
    local, remote = FakeTextEngine(), FakeTextEngine(tokens_per_s=100)
    policy = Policy(dispatch=DispatchPolicy(start="cloud"), migration=MigrationPolicy(enabled=False, stall_s=0.5))
    async with cloud(remote) as there, device(local, there, policy) as one:
        asking = asyncio.create_task(ask(one))
        while remote.generated_count < 20:
            await asyncio.sleep(0.005)
        await there.vanish()
        assert await asking == EXPECTED
        [lost] = [event for event in one.emit.events if isinstance(event, SourceLost)]
        assert (lost.source, lost.target) == ("cloud", "device")
        assert lost.index >= 15
        assert one.done()[0].status == "ok"


async def test_a_client_that_leaves_ends_the_generation_at_the_cloud() -> None:
    local, remote = FakeTextEngine(), FakeTextEngine(tokens_per_s=50)
    policy = Policy(dispatch=DispatchPolicy(start="cloud"), migration=MigrationPolicy(enabled=False))
    async with cloud(remote) as there, device(local, there, policy) as one:
        asking = asyncio.create_task(ask(one))
        while remote.generated_count < 5:
            await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.wait({asking})
        for _ in range(100):
            if remote.load().running == 0:
                break
            await asyncio.sleep(0.02)
        assert remote.load().running == 0
        assert local.prepared == []


async def test_no_cloud_at_all_is_an_answer_from_the_device() -> None:
    local, remote = FakeTextEngine(), FakeTextEngine()
    policy = Policy(dispatch=DispatchPolicy(start="cloud"))
    async with cloud(remote) as there, device(local, there, policy) as one:
        await there.vanish()
        assert await ask(one) == EXPECTED
        assert one.done()[0].sides == (("device", COUNT),)
