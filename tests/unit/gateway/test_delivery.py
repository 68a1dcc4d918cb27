"""How answers leave, without a server: closing at any moment, order of events, records."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from engines.fakes_text import FakeTextEngine
from gateway import delivery
from gateway.answer import Answer
from gateway.pipeline import TextWay
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.targets import Target
from gateway.wire_openai import OpenAIWire
from links.port import Response
from protocol.errors import EngineError, Full, LinkClosed
from protocol.events import RecordingEmit, TextDelivered, TextDone
from protocol.exposition import Exposition
from protocol.openai_wire import head_for, parse_chat, parse_completion
from protocol.policy import DeliveryPolicy, MigrationPolicy, Policy

DEFAULT = Policy()
FAST = GatewaySettings(hold_headers_s=0.05, ping_every_s=0.02, drain_s=0.05)


def wire_of(answer: Answer) -> OpenAIWire:
    return OpenAIWire(lambda: head_for(answer.request, "id", 1))


class Desk:
    """A text way over one fake, without HTTP."""

    def __init__(self, engine: FakeTextEngine, settings: GatewaySettings = FAST, policy: Policy = DEFAULT) -> None:
        self.emit = RecordingEmit()
        self.engine = engine
        targets = [Target("device", True, engine, frozenset({"fake"}))]
        ports = GatewayPorts(lambda: targets, lambda: policy, self.emit, ids=lambda: "r1")
        self.settings = settings
        self.way = TextWay(settings, ports)

    async def answer(self, **more: Any) -> Answer:
        body = {"model": "fake", "max_tokens": 12, **more}
        if "prompt" in body:
            return await self.way.answer(parse_completion(body))
        return await self.way.answer(parse_chat({"messages": [{"role": "user", "content": "x"}], **body}))

    async def streamed(self, answer: Answer) -> Response:
        return await delivery.streamed(answer, wire_of(answer), self.settings)

    def done(self) -> list[TextDone]:
        return [event for event in self.emit.events if isinstance(event, TextDone)]


async def read(response: Response) -> bytes:
    assert not isinstance(response.body, bytes)
    return b"".join([chunk async for chunk in response.body])


async def close(response: Response) -> None:
    await response.body.aclose()  # type: ignore[union-attr]


async def test_a_body_that_nobody_ever_reads_is_closed_with_its_generation() -> None:
    desk = Desk(FakeTextEngine())
    response = await desk.streamed(await desk.answer())
    assert desk.engine.load().running == 1
    await close(response)
    await close(response)
    assert desk.engine.load().running == 0
    assert [done.status for done in desk.done()] == ["cancelled"]


async def test_closing_while_the_next_piece_is_awaited() -> None:
    engine = FakeTextEngine()
    engine.fail("token", None, index=3)
    desk = Desk(engine)
    response = await desk.streamed(await desk.answer())
    reading = asyncio.create_task(read(response))
    await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.wait({reading})
    await close(response)
    assert engine.load().running == 0


async def test_cancelling_while_headers_are_held() -> None:
    engine = FakeTextEngine()
    engine.fail("prepare", None)
    desk = Desk(engine, GatewaySettings(hold_headers_s=30.0))
    waiting = asyncio.create_task(desk.streamed(await desk.answer()))
    await asyncio.sleep(0.03)
    assert engine.load().running == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.load().running == 0


async def test_a_refusal_before_content_is_raised_and_leaves_no_place_taken() -> None:
    desk = Desk(FakeTextEngine(capacity=0))
    with pytest.raises(Full):
        await desk.streamed(await desk.answer())
    with pytest.raises(Full):
        answer = await desk.answer()
        await delivery.whole(answer, wire_of(answer))
    assert [done.status for done in desk.done()] == ["over_capacity", "over_capacity"]
    assert len(desk.way.places) == 0


async def test_an_answer_without_text_still_has_role_finish_and_done() -> None:
    desk = Desk(FakeTextEngine(answer_tokens=0))
    text = (await read(await desk.streamed(await desk.answer()))).decode()
    documents = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert documents[0]["choices"][0]["delta"]["role"] == "assistant"
    assert documents[-1]["choices"][0]["finish_reason"] == "stop"
    assert text.endswith("data: [DONE]\n\n")


async def test_completions_have_no_role_and_their_offsets_count_characters() -> None:
    desk = Desk(FakeTextEngine())
    text = (await read(await desk.streamed(await desk.answer(prompt="x", logprobs=1)))).decode()
    documents = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert all("delta" not in choice for document in documents for choice in document["choices"])
    shown = 0
    for document in documents[:-1]:
        [choice] = document["choices"]
        assert choice["logprobs"]["text_offset"][0] == shown
        shown += len(choice["text"])


async def test_a_cut_answer_is_recorded_with_what_was_delivered() -> None:
    engine = FakeTextEngine()
    desk = Desk(engine)
    response = await desk.streamed(await desk.answer())
    engine.fail("token", LinkClosed("gone"), index=6)
    engine.fail("prepare", EngineError("worker does not start"))
    text = (await read(response)).decode()
    assert '"stream_truncated"' in text
    assert "[DONE]" not in text
    [done] = desk.done()
    assert (done.status, done.completion_tokens, done.sides) == ("stream_truncated", 6, (("device", 6),))


async def test_stopping_waits_for_answers_and_refuses_new_ones() -> None:
    desk = Desk(FakeTextEngine(tokens_per_s=400), GatewaySettings(drain_s=5.0))
    reading = asyncio.create_task(read(await desk.streamed(await desk.answer())))
    stopping = asyncio.create_task(desk.way.stop())
    await asyncio.sleep(0)
    with pytest.raises(Full, match="stopping"):
        await desk.streamed(await desk.answer())
    assert b"[DONE]" in await reading
    await stopping


async def test_a_listener_gets_the_answer_at_his_rate_and_the_figures_are_told() -> None:
    policy = Policy(delivery=DeliveryPolicy(mode="listening", listening_tokens_per_s=40.0))
    desk = Desk(FakeTextEngine(), policy=policy)
    began_s = time.monotonic()
    body = await read(await desk.streamed(await desk.answer()))
    # Eleven tokens follow the first one.
    assert time.monotonic() - began_s >= 11 / 40.0
    assert body.endswith(b"data: [DONE]\n\n")
    [told] = [event for event in desk.emit.events if isinstance(event, TextDelivered)]
    assert (told.mode, told.tokens_per_s, told.tokens, told.delayed_tokens) == ("listening", 40.0, 12, 0)
    assert sum(told.paced.counts) == sum(told.raw.counts) == 11
    assert told.raw.sum_s < told.paced.sum_s


async def test_raw_delivery_tells_the_delays_that_a_reader_would_have_had() -> None:
    engine = FakeTextEngine(tokens_per_s=100)
    desk = Desk(engine, policy=Policy(migration=MigrationPolicy(consume_tokens_per_s=1000.0)))
    await read(await desk.streamed(await desk.answer()))
    [told] = [event for event in desk.emit.events if isinstance(event, TextDelivered)]
    assert (told.mode, told.tokens, told.delayed_tokens) == ("raw", 12, 11)
    exposition = Exposition()
    exposition(told)
    assert exposition.value("midstream_delayed_tokens_total", mode="raw") == 11
    page = exposition.render()
    assert 'midstream_text_tbt_seconds_count{at="paced",mode="raw",model="fake"} 11' in page
    assert 'midstream_text_tbt_seconds_bucket{at="raw",mode="raw",model="fake",le="+Inf"} 11' in page


async def test_a_client_that_leaves_a_paced_answer_ends_its_generation() -> None:
    policy = Policy(delivery=DeliveryPolicy(mode="reading", reading_tokens_per_s=0.5))
    desk = Desk(FakeTextEngine(), policy=policy)
    response = await desk.streamed(await desk.answer(max_tokens=2000))
    reading = asyncio.create_task(read(response))
    await asyncio.sleep(0.05)
    assert desk.engine.load().running == 1
    # What waits for its reader is bounded, here and in the engine.
    assert desk.engine.generated_count <= 2 * 32 + 3
    reading.cancel()
    await asyncio.wait({reading})
    await close(response)
    assert desk.engine.load().running == 0
    assert [done.status for done in desk.done()] == ["cancelled"]
