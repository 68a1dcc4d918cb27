"""The OpenAI-compatible engine against servers that cut, stall, babble, refuse and overload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engines.upstream import UpstreamEngine
from protocol.errors import (
    ContextOverflow,
    EngineError,
    Full,
    LinkClosed,
    LinkError,
    LinkTimeout,
    MidstreamError,
    NotAllowed,
    ProtocolError,
    Unsupported,
)
from protocol.text import Message, Sampling, TextRequest, Token
from tests.unit.engines.openai_upstream import DONE, USAGE, Upstream, chunk

TALK = (Message("user", "hello"),)
GOOD: list[Any] = [chunk("one"), chunk(" two"), chunk("", "stop"), USAGE, DONE]


def engine_at(upstream: Upstream, **how: Any) -> UpstreamEngine:
    return UpstreamEngine(upstream.link, "big", "secret", **how)


def ask(prefix: tuple[Token, ...] = ()) -> TextRequest:
    return TextRequest("m", TALK, Sampling(max_tokens=20), prefix=prefix)


async def collect(engine: UpstreamEngine, request: TextRequest) -> list[Token]:
    continuation = await engine.prepare(request, 5)
    tokens: list[Token] = []
    try:
        async for token in continuation.start(len(request.prefix), 100):
            tokens.append(token)
    except MidstreamError as err:
        err.tokens = tokens  # type: ignore[attr-defined]
        raise
    finally:
        await continuation.close()
    return tokens


async def test_tokens_are_chunks_and_usage_is_the_upstreams() -> None:
    upstream = Upstream(GOOD)
    engine = engine_at(upstream)
    continuation = await engine.prepare(ask(), 5)
    tokens = [token async for token in continuation.start(0, 100)]
    assert [(t.index, t.data, t.finish) for t in tokens] == [(0, b"one", None), (1, b" two", None), (2, b"", "stop")]
    assert continuation.prompt_tokens == 7
    assert upstream.bodies[0]["stream_options"] == {"include_usage": True}
    assert engine.load().running == 0


@pytest.mark.parametrize(
    ("script", "error", "kept"),
    [
        ([chunk("a"), chunk("b")], LinkClosed, 2),
        ([chunk("a"), DONE], LinkClosed, 1),
        ([chunk("a"), b'data: {"choices": [tru\n\n'], ProtocolError, 1),
        ([chunk("a"), b'data: {"error": {"message": "overloaded", "type": "overloaded_error"}}\n\n'], Full, 1),
        ([chunk("a"), b'data: {"error": {"message": "CUDA error"}}\n\n'], EngineError, 1),
        ([chunk("a"), 5.0, chunk("b")], LinkTimeout, 1),
        ([], LinkClosed, 0),
        ([b": ping\n\n", b'data: {"error": {"message": "busy", "type": "overloaded_error"}}\n\n'], Full, 0),
    ],
)
async def test_every_way_to_break_a_stream_is_an_error_after_what_came(
    script: list[Any], error: type[MidstreamError], kept: int
) -> None:
    engine = engine_at(Upstream(script), silence_s=0.2)
    with pytest.raises(error) as caught:
        await collect(engine, ask())
    tokens = getattr(caught.value, "tokens", [])
    assert len(tokens) == kept and all(token.finish is None for token in tokens)
    assert engine.load().running == 0


async def test_a_stream_without_done_but_with_a_finish_reason_is_whole() -> None:
    tokens = await collect(engine_at(Upstream([chunk("a"), chunk("", "length")])), ask())
    assert [token.finish for token in tokens] == [None, "length"]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (429, b'{"error": {"message": "slow down", "type": "rate_limit_exceeded"}}', Full),
        (503, b"<html>", Full),
        (401, b"{}", NotAllowed),
        (400, b'{"error": {"code": "context_length_exceeded", "n_prompt_tokens": 9, "n_ctx": 4}}', ContextOverflow),
        (500, b"", EngineError),
        (502, b"", LinkError),
    ],
)
async def test_a_refusal_shows_in_prepare(status: int, body: bytes, error: type[MidstreamError]) -> None:
    engine = engine_at(Upstream([], status=status, error=body))
    with pytest.raises(error):
        await engine.prepare(ask(), 5)
    assert engine.load().running == 0


async def test_closing_hangs_up_on_the_upstream_in_wait_and_in_stream() -> None:
    upstream = Upstream([chunk("a"), 30.0, chunk("b")])
    engine = engine_at(upstream)
    continuation = await engine.prepare(ask(), 5)
    await continuation.close()
    await asyncio.sleep(0.01)
    assert upstream.closed == 1
    silent = Upstream([30.0])
    with pytest.raises(LinkTimeout):
        await engine_at(silent).prepare(ask(), 0.1)
    await asyncio.sleep(0.01)
    assert silent.closed == 1


@pytest.mark.parametrize(("how", "expected"), [("goes on", "text"), ("ignores", "no"), ("refuses", "no")])
async def test_whether_an_answer_can_be_continued_is_probed(how: str, expected: str) -> None:
    upstream = Upstream(GOOD, continues=how)
    engine = engine_at(upstream)
    capabilities = await engine.capabilities()
    assert capabilities.continues == expected
    assert capabilities.context_tokens == 4096
    prefix = (Token(0, None, b"zero"), Token(1, None, b" and"))
    if expected == "no":
        with pytest.raises(Unsupported):
            await engine.prepare(ask(prefix), 5)
        return
    tokens = await collect(engine, ask(prefix))
    assert [token.index for token in tokens] == [2, 3, 4]
    sent = upstream.bodies[-1]
    assert sent["messages"][-1] == {"role": "assistant", "content": "zero and"}
    assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
    assert sent["max_tokens"] == 18


async def test_a_fast_upstream_is_read_no_further_than_the_buffer() -> None:
    upstream = Upstream([chunk("x")] * 5000 + [chunk("", "stop")])
    engine = engine_at(upstream)
    continuation = await engine.prepare(ask(), 5)
    stream = continuation.start(0, 2)
    await anext(stream)
    await asyncio.sleep(0.05)
    assert len(continuation._ready) <= 64  # type: ignore[attr-defined]
    await continuation.close()


async def test_embeddings_and_capacity() -> None:
    engine = engine_at(Upstream([chunk("a"), 30.0]), max_open=1)
    assert await engine.embed(["abc"]) == [(3.0, 1.0)]
    first = await engine.prepare(ask(), 5)
    with pytest.raises(Full):
        await engine.prepare(ask(), 5)
    await first.close()
    with pytest.raises(Unsupported):
        await engine.tokenize(b"x")


@pytest.mark.parametrize("embeds", [True, False])
async def test_whether_it_embeds_is_seen_by_trying(embeds: bool) -> None:
    upstream = Upstream([chunk("a")])
    upstream.embeds = embeds
    assert (await engine_at(upstream).capabilities()).embeds is embeds
