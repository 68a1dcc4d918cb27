"""Whole text requests over HTTP: slow, lying and dying engines, privacy, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from engines.fakes_text import FakeTextEngine, fake_answer
from engines.port import Continuation, EngineLoad
from gateway.settings import GatewaySettings
from gateway.targets import Target
from protocol.errors import EngineError, LinkClosed, MidstreamError, ProtocolError
from protocol.events import HandedOver, SourceLost
from protocol.policy import DispatchPolicy, LimitsPolicy, MigrationPolicy, Policy, PrivacyPolicy, RoutingPolicy
from protocol.text import Message, TextCapabilities, TextRequest
from tests.route.openai_scenarios import client as stock_client
from tests.route.text_house import House, house

QUESTION = "what runs past the mill"
PROMPT = (Message(role="user", content=QUESTION),)
COUNT = 60
CLOUD_FIRST = Policy(dispatch=DispatchPolicy(start="cloud"), migration=MigrationPolicy(enabled=False, stall_s=0.1))
MOVES_SOON = Policy(
    migration=MigrationPolicy(min_tokens=8, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=0.2)
)


class UntouchableEngine:
    """Fails the test when anything is asked of it."""

    def __init__(self) -> None:
        self.touched: list[str] = []

    def _touch(self, name: str) -> AssertionError:
        self.touched.append(name)
        return AssertionError(f"{name}() of a remote engine was called under local_only")

    async def capabilities(self) -> TextCapabilities:
        raise self._touch("capabilities")

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        raise self._touch("prepare")

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        raise self._touch("tokenize")

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        raise self._touch("embed")

    def load(self) -> EngineLoad:
        raise self._touch("load")

    async def close(self) -> None:
        raise self._touch("close")


def device(engine: Any) -> Target:
    return Target("device", True, engine, frozenset({"fake"}))


def cloud(engine: Any, tokens_per_s: float | None = None) -> Target:
    return Target("cloud", False, engine, frozenset({"fake"}), tokens_per_s=tokens_per_s)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": COUNT, **more}


def answer_text(count: int = COUNT) -> str:
    return fake_answer(PROMPT, count).decode()


@asynccontextmanager
async def raw(one: House) -> AsyncIterator[openai.DefaultAsyncHttpxClient]:
    """A bare HTTP client, to see what the openai client hides."""
    async with openai.DefaultAsyncHttpxClient(base_url=one.base_url, timeout=20.0) as client:
        yield client


async def events(client: openai.DefaultAsyncHttpxClient, document: dict[str, Any]) -> tuple[int, list[str]]:
    """Status and the lines of a streamed answer, empty ones left out."""
    async with client.stream("POST", "/v1/chat/completions", json={**document, "stream": True}) as reply:
        return reply.status_code, [line async for line in reply.aiter_lines() if line]


def chunks(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def text_of(lines: Sequence[str]) -> str:
    deltas = [choice["delta"] for chunk in chunks(lines) for choice in chunk.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


def assert_complete(lines: Sequence[str], count: int = COUNT) -> None:
    assert text_of(lines) == answer_text(count)
    assert lines[-1] == "data: [DONE]"
    finishes = [choice["finish_reason"] for chunk in chunks(lines) for choice in chunk["choices"]]
    assert [finish for finish in finishes if finish] == ["length"]


def cut_cloud() -> FakeTextEngine:
    engine = FakeTextEngine(name="cloud")
    engine.fail("token", LinkClosed("connection reset"), index=40)
    return engine


def silent_cloud() -> FakeTextEngine:
    engine = FakeTextEngine(name="cloud")
    engine.fail("start", None)
    return engine


def stalling_cloud() -> FakeTextEngine:
    engine = FakeTextEngine(name="cloud")
    engine.fail("token", None, index=40)
    return engine


def lying_cloud() -> FakeTextEngine:
    """200 and an error event as the first thing in the stream."""
    engine = FakeTextEngine(name="cloud")
    engine.fail("start", EngineError("overloaded"))
    return engine


def garbling_cloud() -> FakeTextEngine:
    engine = FakeTextEngine(name="cloud")
    engine.fail("token", ProtocolError("an event is not JSON", field="data"), index=23)
    return engine


def refusing_cloud() -> FakeTextEngine:
    return FakeTextEngine(name="cloud", capacity=0)


@pytest.mark.parametrize("make", [cut_cloud, silent_cloud, stalling_cloud, lying_cloud, garbling_cloud, refusing_cloud])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_cloud_ends_with_a_complete_answer_from_the_device(make: Any, stream: bool) -> None:
    """S1, S4, S5, N1."""
    remote, local = make(), FakeTextEngine(name="device")
    async with house([device(local), cloud(remote)], policy=CLOUD_FIRST) as one, raw(one) as client:
        if stream:
            status, lines = await events(client, body())
            assert status == 200
            assert_complete(lines)
        else:
            reply = await client.post("/v1/chat/completions", json=body())
            assert reply.json()["choices"][0]["message"]["content"] == answer_text()
        assert one.done()[0].sides[-1][0] == "device"
        assert sum(tokens for _, tokens in one.done()[0].sides) == COUNT
    assert (local.load().running, remote.load().running) == (0, 0)


async def test_the_client_sees_which_side_made_each_token_of_a_moved_answer() -> None:
    local, remote = FakeTextEngine(tokens_per_s=1000), FakeTextEngine()
    async with house([device(local), cloud(remote, 1e9)], policy=MOVES_SOON) as one, raw(one) as client:
        _, lines = await events(client, body())
        assert_complete(lines)
        [moved] = [event for event in one.emit.events if isinstance(event, HandedOver)]
        marks = [chunk["midstream"] for chunk in chunks(lines) if "midstream" in chunk]
        assert [mark["side"] for mark in marks if mark["index"] < moved.index] == ["device"] * sum(
            mark["index"] < moved.index for mark in marks
        )
        assert {mark["side"] for mark in marks if mark["index"] >= moved.index} == {"cloud"}
        assert sum(mark["tokens"] for mark in marks) == COUNT
        assert one.done()[0].sides == (("device", moved.index), ("cloud", COUNT - moved.index))


async def test_a_stop_string_across_the_seam_never_shows() -> None:
    local, remote = FakeTextEngine(tokens_per_s=1000), FakeTextEngine()
    async with house([device(local), cloud(remote, 1e9)], policy=MOVES_SOON) as one, raw(one) as client:
        await events(client, body())
        [moved] = [event for event in one.emit.events if isinstance(event, HandedOver)]
        before = fake_answer(PROMPT, moved.index).decode()
        stop = answer_text()[len(before) - 4 : len(before) + 4]
        _, stopped = await events(client, body(stop=[stop]))
        expected = answer_text().split(stop)[0]
        assert text_of(stopped) == expected
        assert stopped[-1] == "data: [DONE]"
        finishes = [choice["finish_reason"] for chunk in chunks(stopped) for choice in chunk["choices"]]
        assert [finish for finish in finishes if finish] == ["stop"]


@pytest.mark.parametrize("stream", [True, False])
async def test_local_only_touches_no_remote_engine(stream: bool) -> None:
    remote, local = UntouchableEngine(), FakeTextEngine()
    local.fail("token", LinkClosed("worker gone"), index=12)
    policy = Policy(
        privacy=PrivacyPolicy(local_only=True),
        dispatch=DispatchPolicy(start="race"),
        migration=MigrationPolicy(min_tokens=1, min_remaining_tokens=1, stall_s=0.1),
    )
    async with house([cloud(remote, 1e9), device(local)], policy=policy) as one, raw(one) as client:
        reply = await client.post("/v1/chat/completions", json=body(stream=stream))
        assert reply.status_code == 200
        embedded = await client.post("/v1/embeddings", json={"model": "fake", "input": "river"})
        assert embedded.status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["owned_by"] == "device"
        assert one.done()[0].sides == (("device", COUNT),)
    assert remote.touched == []


async def test_local_only_without_a_local_model_says_so() -> None:
    remote = UntouchableEngine()
    policy = Policy(privacy=PrivacyPolicy(local_only=True))
    async with house([cloud(remote)], policy=policy) as one, raw(one) as client:
        reply = await client.post("/v1/chat/completions", json=body())
        assert reply.status_code == 403
        assert "local_only" in reply.json()["error"]["message"]
    assert remote.touched == []


async def test_routing_targets_bound_the_allowed_set() -> None:
    policy = Policy(routing=RoutingPolicy(targets=("cloud",)))
    async with house([device(UntouchableEngine()), cloud(FakeTextEngine())], policy=policy) as one, raw(one) as client:
        assert_complete((await events(client, body()))[1])
        assert one.done()[0].sides == (("cloud", COUNT),)


async def test_a_truncated_answer_ends_with_an_error_event_and_without_done() -> None:
    """S2: nobody is left to continue."""
    local = FakeTextEngine(tokens_per_s=500)
    async with house([device(local)]) as one, raw(one) as client:
        lines: list[str] = []
        async with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as reply:
            async for line in reply.aiter_lines():
                lines += [line] if line else []
                if len(lines) == 10:
                    local.kill()
        error = chunks(lines)[-1]["error"]
        assert error["code"] == "stream_truncated"
        assert "[DONE]" not in lines[-1]
        assert not any(choice["finish_reason"] for chunk in chunks(lines) for choice in chunk.get("choices", ()))
        assert answer_text().startswith(text_of(lines))
        assert one.done()[0].status == "stream_truncated"
        local.revive()
        whole = asyncio.create_task(client.post("/v1/chat/completions", json=body()))
        await asyncio.sleep(0.03)
        local.kill()
        assert (await whole).status_code == 502


@pytest.mark.parametrize(
    ("error", "status"), [(LinkClosed("no route"), 502), (EngineError("no memory"), 500), (None, 504)]
)
async def test_a_failure_before_the_first_content_keeps_its_status(error: MidstreamError | None, status: int) -> None:
    """S3, S5: headers wait for the first content of any attempt."""
    local = FakeTextEngine()
    local.fail("start", error)
    async with house([device(local)], settings=GatewaySettings(deadline_s=0.2, drain_s=0.1)) as one, raw(one) as client:
        got, lines = await events(client, body())
        assert got == status
        assert "error" in json.loads("".join(lines))


async def test_a_full_house_is_503_with_retry_after() -> None:
    async with house([device(FakeTextEngine(capacity=0, retry_after_s=7))]) as one, raw(one) as client:
        reply = await client.post("/v1/chat/completions", json=body(stream=True))
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "7"
        assert reply.json()["error"]["code"] == "over_capacity"


async def test_more_answers_than_the_house_takes_are_refused() -> None:
    local = FakeTextEngine(tokens_per_s=100)
    settings = GatewaySettings(max_concurrent=1, drain_s=0.1)
    async with house([device(local)], settings=settings) as one, raw(one) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=body(max_tokens=20)))
        await asyncio.sleep(0.05)
        assert (await client.post("/v1/chat/completions", json=body())).status_code == 503
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=body(max_tokens=2))).status_code == 200


async def test_a_long_silence_before_the_first_token_carries_pings() -> None:
    """S6."""
    local = FakeTextEngine(prefill_tokens_per_s=20)
    settings = GatewaySettings(hold_headers_s=0.02, ping_every_s=0.03, drain_s=0.1)
    async with house([device(local)], settings=settings) as one, raw(one) as client:
        status, lines = await events(client, body(max_tokens=5))
        assert status == 200
        assert lines[0] == lines[1] == ": ping"
        assert_complete([line for line in lines if line != ": ping"], 5)


async def test_a_failure_after_pings_is_an_error_event() -> None:
    local = FakeTextEngine()
    local.fail("start", None)
    settings = GatewaySettings(hold_headers_s=0.02, ping_every_s=0.05, deadline_s=0.2, drain_s=0.1)
    async with house([device(local)], settings=settings) as one, raw(one) as client:
        status, lines = await events(client, body())
        assert status == 200
        assert chunks(lines)[-1]["error"]["code"] == "upstream_timeout"
        assert "[DONE]" not in lines[-1]


async def _gone(engine: FakeTextEngine) -> None:
    for _ in range(150):
        if engine.load().running == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the generation still runs")


@pytest.mark.parametrize("phase", ["prepare", "start", "token"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_own_generation_only(phase: Any, stream: bool) -> None:
    """C1, C2, C3, C4: before the first token, in prefill, mid-stream; whole and streamed."""
    local = FakeTextEngine()
    async with house([device(local)]) as one, raw(one) as client:
        other = asyncio.create_task(client.post("/v1/chat/completions", json=body(max_tokens=3)))
        await other
        local.fail(phase, None, index=5)
        leaving = asyncio.create_task(
            events(client, body()) if stream else client.post("/v1/chat/completions", json=body())
        )
        await asyncio.sleep(0.1)
        assert local.load().running == 1
        bystander = asyncio.create_task(client.post("/v1/chat/completions", json=body()))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.wait({leaving})
        await _gone(local)
        assert (await bystander).json()["choices"][0]["message"]["content"] == answer_text()
        assert [done.status for done in one.done()].count("cancelled") == 1


async def test_usage_is_sent_only_when_asked() -> None:
    """U2."""
    async with house([device(FakeTextEngine())]) as one, raw(one) as client:
        _, unasked = await events(client, body())
        assert not any("usage" in chunk for chunk in chunks(unasked))
        _, asked = await events(client, body(stream_options={"include_usage": True}))
        assert chunks(asked)[-1]["choices"] == []
        assert chunks(asked)[-1]["usage"]["completion_tokens"] == COUNT


async def test_overflow_is_400_with_numbers_and_drops_nothing() -> None:
    """O1."""
    local = FakeTextEngine(context_tokens=64)
    async with house([device(local)]) as one, raw(one) as client:
        long = body(messages=[{"role": "user", "content": "river " * 500}])
        for stream in (True, False):
            reply = await client.post("/v1/chat/completions", json={**long, "stream": stream})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert (error["code"], error["type"]) == ("context_length_exceeded", "exceed_context_size_error")
            assert error["n_prompt_tokens"] > error["n_ctx"] == 64
        assert local.prepared == []


async def test_policy_limits_bound_prompt_and_answer() -> None:
    policy = Policy(limits=LimitsPolicy(max_prompt_bytes=100, max_answer_tokens=7))
    async with house([device(FakeTextEngine())], policy=policy) as one, raw(one) as client:
        reply = await client.post("/v1/chat/completions", json=body(max_tokens=5000))
        assert reply.json()["usage"]["completion_tokens"] == 7
        assert reply.headers["x-midstream-max-tokens"] == "7"
        long = body(messages=[{"role": "user", "content": "x" * 101}])
        refused = await client.post("/v1/chat/completions", json=long)
        assert refused.status_code == 413
        assert "max_prompt_bytes" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("document", "status", "param"),
    [
        (b"", 400, None),
        (b"\xff\xfe not json", 400, None),
        (b"[]", 400, None),
        (b'{"model": "fake"}', 400, "messages"),
        (b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404, "model"),
        (b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "n": 3}', 400, "n"),
        (
            b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
            400,
            "temperature",
        ),
    ],
)
async def test_garbage_gets_an_openai_error(document: bytes, status: int, param: str | None) -> None:
    async with house([device(FakeTextEngine())]) as one, raw(one) as client:
        reply = await client.post("/v1/chat/completions", content=document)
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == param
        assert (await client.post("/v1/chat/completions", json=body(max_tokens=1))).status_code == 200


async def test_an_oversized_body_is_refused_before_it_is_read() -> None:
    settings = GatewaySettings(max_body_bytes=1000, drain_s=0.1)
    async with house([device(FakeTextEngine())], settings=settings) as one, raw(one) as client:
        reply = await client.post("/v1/chat/completions", content=b"x" * 1001)
        assert reply.status_code == 413


async def test_unknown_models_are_told_what_is_there() -> None:
    async with house([device(FakeTextEngine())]) as one, raw(one) as client:
        for reply in (
            await client.post("/v1/completions", json={"model": "gpt-9", "prompt": "x"}),
            await client.get("/v1/models/gpt-9"),
        ):
            assert reply.status_code == 404
            assert "fake" in reply.json()["error"]["message"]


async def test_embeddings_come_from_an_engine_that_embeds() -> None:
    async with house([device(FakeTextEngine())]) as one, raw(one) as client:
        reply = await client.post("/v1/embeddings", json={"model": "fake", "input": ["river", "mill"]})
        assert [len(item["embedding"]) for item in reply.json()["data"]] == [16, 16]
        assert reply.json()["usage"]["prompt_tokens"] == 2


async def test_stopping_the_house_tells_the_readers() -> None:
    local = FakeTextEngine(tokens_per_s=20)
    async with openai.DefaultAsyncHttpxClient(timeout=20.0) as client:
        async with house([device(local)], settings=GatewaySettings(drain_s=0.05)) as one:
            url = f"{one.base_url}/v1/chat/completions"
            reading = asyncio.create_task(client.post(url, json=body(stream=True)))
            await asyncio.sleep(0.15)
        lines = [line for line in (await reading).text.splitlines() if line]
    assert "stopping" in chunks(lines)[-1]["error"]["message"]
    assert local.load().running == 0


async def test_a_second_loss_is_survived_too_and_told_in_order() -> None:
    """N1: an answer that loses the cloud and then the device's engine once."""
    remote, local = cut_cloud(), FakeTextEngine(name="device")
    local.fail("token", EngineError("worker died"), index=50)
    async with house([device(local), cloud(remote)], policy=CLOUD_FIRST) as one, raw(one) as client:
        assert_complete((await events(client, body()))[1])
        lost = [event for event in one.emit.events if isinstance(event, SourceLost)]
        assert [(event.source, event.index) for event in lost] == [("cloud", 40), ("device", 50)]


async def test_the_openai_client_raises_on_a_truncated_stream() -> None:
    """S2 as the user of the stock client sees it."""
    local = FakeTextEngine(tokens_per_s=500)
    async with house([device(local)]) as one, stock_client(one.base_url) as api:
        stream = await api.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": QUESTION}], max_tokens=COUNT, stream=True
        )
        seen = 0
        with pytest.raises(openai.APIError, match="cut at token"):
            async for _ in stream:
                seen += 1
                if seen == 8:
                    local.kill()
