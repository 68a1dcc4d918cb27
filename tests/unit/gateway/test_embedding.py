"""Embeddings are held to the bounds of answers: prompt size, places, deadline, stop, where they may go, records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from engines.fakes_text import FakeTextEngine
from gateway.pipeline import TextWay
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.targets import Target
from protocol.chat import EmbeddingsRequest
from protocol.errors import Full, LinkTimeout, MidstreamError, NotAllowed, TooLarge, Unsupported
from protocol.events import RecordingEmit, TextDone
from protocol.policy import LimitsPolicy, Policy, PrivacyPolicy


class SlowEmbedder(FakeTextEngine):
    """Embeds when it is let, and counts how many tokenize calls run at once."""

    def __init__(self, *, blocked: bool = False, tokenizes: bool = True) -> None:
        super().__init__()
        self.let = asyncio.Event()
        if not blocked:
            self.let.set()
        self.tokenizes = tokenizes
        self.most_at_once = 0
        self._at_once = 0

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        await self.let.wait()
        return await super().embed(texts)

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        if not self.tokenizes:
            raise Unsupported("no tokenizer here")
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        return await super().tokenize(data)


class Desk:
    def __init__(
        self, engine: FakeTextEngine, *, policy: Policy | None = None, local: bool = True, **settings: float
    ) -> None:
        self.emit = RecordingEmit()
        targets = [Target("device" if local else "cloud", local, engine, frozenset({"fake"}))]
        ports = GatewayPorts(lambda: targets, lambda: policy or Policy(), self.emit)
        self.way = TextWay(GatewaySettings(drain_s=0.05, **settings), ports)  # type: ignore[arg-type]

    async def embed(self, *texts: str) -> int:
        run = await self.way.embedding(EmbeddingsRequest("fake", texts))
        assert len(await run.vectors()) == len(texts)
        return run.prompt_tokens

    def statuses(self) -> list[str]:
        return [event.status for event in self.emit.events if isinstance(event, TextDone)]


async def test_texts_are_counted_one_after_the_other_and_recorded() -> None:
    engine = SlowEmbedder()
    desk = Desk(engine)
    assert await desk.embed("river mill", "stone", "lamp") == 4
    assert engine.most_at_once == 1
    (done,) = [event for event in desk.emit.events if isinstance(event, TextDone)]
    assert (done.status, done.prompt_tokens, done.reason) == ("ok", 4, "embeddings by device")


async def test_an_engine_without_a_tokenizer_embeds_all_the_same() -> None:
    assert await Desk(SlowEmbedder(tokenizes=False)).embed("river") == 0


async def test_the_prompt_limit_holds_for_all_texts_together() -> None:
    desk = Desk(SlowEmbedder(), policy=Policy(limits=LimitsPolicy(max_prompt_bytes=9)))
    with pytest.raises(TooLarge) as refused:
        await desk.embed("river", "stone")
    assert refused.value.field == "input"
    assert await desk.embed("river") == 1


async def test_a_prompt_that_may_not_leave_asks_nothing_of_the_cloud() -> None:
    desk = Desk(SlowEmbedder(blocked=True), policy=Policy(privacy=PrivacyPolicy(local_only=True)), local=False)
    with pytest.raises(NotAllowed):
        await desk.embed("river")


async def test_places_are_shared_with_answers_and_given_back() -> None:
    engine = SlowEmbedder(blocked=True)
    desk = Desk(engine, max_concurrent=1)
    first = asyncio.create_task(desk.embed("river"))
    await asyncio.sleep(0)
    with pytest.raises(Full):
        await desk.embed("stone")
    engine.let.set()
    await first
    await desk.embed("stone")
    assert desk.statuses() == ["over_capacity", "ok", "ok"]


async def test_the_deadline_ends_it() -> None:
    desk = Desk(SlowEmbedder(blocked=True), deadline_s=0.05)
    with pytest.raises(LinkTimeout):
        await desk.embed("river")
    assert desk.statuses() == [LinkTimeout.code]


async def test_stopping_ends_what_runs_and_takes_nothing_new() -> None:
    desk = Desk(SlowEmbedder(blocked=True))
    running = asyncio.create_task(desk.embed("river"))
    await asyncio.sleep(0)
    await desk.way.stop()
    for late in (running, desk.embed("stone")):
        with pytest.raises(MidstreamError, match="stopping"):
            await late


async def test_a_client_that_leaves_gives_its_place_back() -> None:
    desk = Desk(SlowEmbedder(blocked=True), max_concurrent=1)
    running = asyncio.create_task(desk.embed("river"))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert desk.statuses() == ["cancelled"]
    with pytest.raises(LinkTimeout):
        desk.way.settings = GatewaySettings(deadline_s=0.02)
        await desk.embed("river")
