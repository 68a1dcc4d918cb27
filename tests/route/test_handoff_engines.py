"""The handoff law over PeerEngines: no token lost, none doubled, wherever the cut is and whoever dies when."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from attrs import evolve, frozen

from engines.fakes_text import FakeTextEngine, fake_answer
from engines.peer import PeerEngine
from engines.peer_host import HostedStreams
from engines.port import TextEngine
from protocol.errors import EngineError, LinkError
from protocol.text import Sampling, TextRequest, Token
from tests.contract.text_engines import MemoryPeers

PROMPT = "the handoff law"
COUNT = 40
LOST = (LinkError, EngineError)


@frozen
class Side:
    """A peer whose host can be killed."""

    host: FakeTextEngine
    peers: MemoryPeers
    engine: PeerEngine

    def kill(self) -> None:
        """As when the machine loses power: the connection breaks and nobody answers any more."""
        self.peers.down = True
        self.peers.cut()
        self.host.kill()


@asynccontextmanager
async def side(vocabulary: str = "fake-vocabulary") -> AsyncIterator[Side]:
    host = FakeTextEngine(tokens_per_s=4000, prefill_tokens_per_s=50_000, answer_tokens=COUNT, vocabulary=vocabulary)
    peers = MemoryPeers(host, HostedStreams(keep_s=0.2))
    engine = PeerEngine(peers.open, resume_s=0.05, silence_s=2.0, vocabulary="fake-vocabulary")
    try:
        yield Side(host, peers, engine)
    finally:
        await engine.close()
        host.kill()
        await peers.close()


class Owner:
    """The side that holds the reader: keeps what was delivered and asks for what comes next."""

    def __init__(self) -> None:
        self.taken: list[Token] = []

    async def prepare(self, engine: TextEngine, prefix: Sequence[Token]):  # type: ignore[no-untyped-def]
        sampling = Sampling(max_tokens=COUNT + 10)
        plain = tuple(evolve(token, finish=None) for token in prefix)
        return await engine.prepare(TextRequest("m", PROMPT, sampling, prefix=plain), 5)

    async def read(self, continuation, until: int | None = None) -> None:  # type: ignore[no-untyped-def]
        """Deliver tokens until the end or until `until` of them are there."""
        async for token in continuation.start(len(self.taken), 16):
            assert token.index == len(self.taken), "a token was lost or doubled"
            self.taken.append(token)
            continuation.acknowledge(token.index)
            if until is not None and len(self.taken) >= until:
                return

    def check(self) -> None:
        """The law, for engines whose answer is a function of prompt and index."""
        assert [token.index for token in self.taken] == list(range(COUNT + 1))
        assert self.taken[-1].finish == "stop"
        assert b"".join(token.data for token in self.taken) == fake_answer(PROMPT, COUNT, COUNT)


@pytest.mark.parametrize("vocabulary", ["fake-vocabulary", "another"])
async def test_a_planned_move_keeps_the_law_at_any_cut(vocabulary: str) -> None:
    draw = random.Random(7)
    async with side() as source, side(vocabulary) as target:
        for _ in range(25):
            cut = draw.randint(2, COUNT - 1)
            cut -= cut % 10 == 9  # never inside the fake's two-byte character
            early = draw.randint(0, cut)
            owner = Owner()
            first = await owner.prepare(source.engine, ())
            await owner.read(first, cut)
            await first.close()
            second = await owner.prepare(target.engine, owner.taken[:early])
            middle = draw.randint(early, cut)
            await second.extend(owner.taken[early:middle])
            await second.extend(owner.taken[middle:cut])
            await owner.read(second)
            owner.check()
        assert source.host.load().running == target.host.load().running == 0
        prefixes = [token for request in target.host.prepared for token in request.prefix]
        assert all((token.id is None) == (vocabulary == "another") for token in prefixes)


@pytest.mark.parametrize("phase", ["prepare", "extend", "cut-over", "after"])
async def test_a_target_that_dies_in_any_phase_costs_nothing(phase: str) -> None:
    draw = random.Random(phase)
    for _ in range(20):
        async with side() as source, side() as target:
            cut = draw.randint(2, COUNT - 6)
            owner = Owner()
            first = await owner.prepare(source.engine, ())
            await owner.read(first, cut)
            with pytest.raises(LOST):
                if phase == "prepare":
                    target.kill()
                second = await owner.prepare(target.engine, owner.taken[: cut - 1])
                if phase == "extend":
                    target.kill()
                await second.extend(owner.taken[cut - 1 :])
                if phase == "cut-over":
                    target.kill()
                await owner.read(second, cut + 3)
                target.kill()
                again = await owner.prepare(target.engine, owner.taken)
                await owner.read(again)
            back = await owner.prepare(source.engine, owner.taken)
            await owner.read(back)
            owner.check()


@pytest.mark.parametrize("after_s", [0.0, 0.002])
async def test_a_target_that_dies_while_it_generates_ends_at_the_exact_index(after_s: float) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        async with side() as source, side() as target:
            owner = Owner()
            second = await owner.prepare(target.engine, ())
            dies_at = draw.randint(0, COUNT - 8)
            with pytest.raises(LOST):
                async for token in second.start(0, draw.randint(1, 8)):
                    assert token.index == len(owner.taken)
                    owner.taken.append(token)
                    if token.index == dies_at:
                        target.kill()
                    second.acknowledge(token.index)
            back = await owner.prepare(source.engine, owner.taken)
            await owner.read(back)
            owner.check()


@pytest.mark.parametrize("phase", ["prepare", "extend", "cut-over", "after"])
async def test_a_source_that_dies_in_any_phase_costs_nothing(phase: str) -> None:
    draw = random.Random(phase)
    for _ in range(20):
        async with side() as source, side() as target:
            cut = draw.randint(2, COUNT - 6)
            owner = Owner()
            first = await owner.prepare(source.engine, ())
            await owner.read(first, cut)
            if phase == "prepare":
                source.kill()
            second = await owner.prepare(target.engine, owner.taken[: cut // 2])
            if phase == "extend":
                source.kill()
            await second.extend(owner.taken[cut // 2 :])
            if phase == "cut-over":
                source.kill()
            await first.close()
            await owner.read(second, cut + 2)
            if phase == "after":
                source.kill()
            rest = await owner.prepare(target.engine, owner.taken)
            await owner.read(rest)
            owner.check()


async def test_the_connection_to_the_target_breaks_again_and_again() -> None:
    draw = random.Random(3)
    async with side() as target:
        owner = Owner()
        only = await owner.prepare(target.engine, ())
        async for token in only.start(0, 6):
            assert token.index == len(owner.taken)
            owner.taken.append(token)
            if draw.random() < 0.3:
                target.peers.cut()
            only.acknowledge(token.index)
        owner.check()
        assert len(target.peers.opened) > 5
