"""A llama-server that breaks, lies, hangs or is full, as its engine sees it: scripted, fault by fault."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engines.llama_server import LlamaServerUrlEngine
from protocol.errors import (
    ContextOverflow,
    EngineError,
    Full,
    LinkClosed,
    LinkTimeout,
    MidstreamError,
    ProtocolError,
)
from protocol.text import Message, Sampling, TextRequest, Token
from tests.unit.engines.native_server import CONTEXT_TOKENS, NativeUpstream, ended, event, made, report

BEGUN = [report(7), made(11, "one", 1), made(12, " two", 2)]
OVERFLOW = {"code": 400, "type": "exceed_context_size_error", "message": "too long", "n_prompt_tokens": 99, "n_ctx": 64}


def ask(count: int = 20, prompt: str = "count") -> TextRequest:
    return TextRequest("m", prompt, Sampling(max_tokens=count))


async def collect(engine: LlamaServerUrlEngine, request: TextRequest) -> tuple[list[Token], MidstreamError | None]:
    """Tokens of an answer, and what it ended with."""
    tokens: list[Token] = []
    try:
        continuation = await engine.prepare(request, 0.3)
        async with asyncio.timeout(1.0):
            async for token in continuation.start(0, 100):
                tokens.append(token)
                continuation.acknowledge(token.index)
    except MidstreamError as err:
        return tokens, err
    except TimeoutError:
        return tokens, LinkTimeout("silent")
    return tokens, None


@pytest.mark.parametrize(
    ("script", "error", "kept"),
    [
        ([*BEGUN], LinkClosed, 2),
        ([*BEGUN, LinkClosed("reset by peer")], LinkClosed, 2),
        ([*BEGUN, b'data: {"content": tru\n\n'], ProtocolError, 2),
        ([*BEGUN, event({"tokens": [1]})], ProtocolError, 2),
        ([*BEGUN, event({"error": {"code": 503, "type": "unavailable_error", "message": "busy"}})], Full, 2),
        ([*BEGUN, event({"error": {"code": 500, "message": "failed to decode"}})], EngineError, 2),
        ([*BEGUN, 30.0], LinkTimeout, 2),
        ([report(7), 30.0], LinkTimeout, 0),
        ([], LinkClosed, 0),
        ([event({"content": "x", "tokens": [1], "tokens_predicted": 1, "stop": False})], ProtocolError, 0),
    ],
)
async def test_every_way_to_break_a_stream_is_an_error_after_what_came(
    script: list[Any], error: type[MidstreamError], kept: int
) -> None:
    upstream = NativeUpstream(script)
    engine = LlamaServerUrlEngine(upstream.link, slots=1)
    tokens, caught = await collect(engine, ask())
    assert isinstance(caught, error)
    assert [token.index for token in tokens] == list(range(kept)) and all(token.finish is None for token in tokens)
    await asyncio.sleep(0.01)
    assert engine.load().running == 0
    upstream.scripts = [[*BEGUN, ended(2)]]
    again, caught = await collect(engine, ask())
    assert caught is None and b"".join(token.data for token in again) == b"one two"
    await engine.close()


async def test_closing_hangs_up_in_prefill_and_in_stream_and_frees_the_slot() -> None:
    upstream = NativeUpstream([report(7), 30.0])
    engine = LlamaServerUrlEngine(upstream.link, slots=1)
    preparing = asyncio.create_task(engine.prepare(ask(), 30.0))
    while not upstream.bodies:
        await asyncio.sleep(0.005)
    preparing.cancel()
    await asyncio.wait([preparing])
    await asyncio.sleep(0.01)
    assert upstream.closed == 1 and engine.load().running == 0
    upstream.scripts = [[*BEGUN, 30.0]]
    continuation = await engine.prepare(ask(), 5)
    await continuation.close()
    await asyncio.sleep(0.01)
    assert upstream.closed == 2 and engine.load().running == 0


async def test_the_prompt_goes_as_it_is_and_its_count_comes_back() -> None:
    upstream = NativeUpstream([report(7, cached=3), *BEGUN[1:], ended(2)])
    engine = LlamaServerUrlEngine(upstream.link, slots=1)
    await engine.capabilities()
    upstream.asked.clear()
    continuation = await engine.prepare(ask(), 5)
    assert (continuation.prompt_tokens, continuation.cached_tokens) == (7, 3)
    assert upstream.bodies[0]["prompt"] == "count" and upstream.asked == [], "nothing is asked before the completion"
    await continuation.close()
    continuation = await engine.prepare(TextRequest("m", (Message("user", "hi"),), Sampling(max_tokens=5)), 5)
    assert upstream.bodies[1]["prompt"] == "templated" and upstream.asked == ["/apply-template"]
    await continuation.close()


async def test_a_prompt_that_is_too_long_is_refused_with_the_engines_numbers() -> None:
    upstream = NativeUpstream([report(CONTEXT_TOKENS), 30.0])
    engine = LlamaServerUrlEngine(upstream.link, slots=1)
    _, caught = await collect(engine, ask())
    assert isinstance(caught, ContextOverflow)
    assert (caught.prompt_tokens, caught.context_tokens) == (CONTEXT_TOKENS, CONTEXT_TOKENS)
    upstream.refusal = (400, OVERFLOW)
    _, caught = await collect(engine, ask())
    assert isinstance(caught, ContextOverflow)
    assert (caught.prompt_tokens, caught.context_tokens) == (99, CONTEXT_TOKENS)


async def test_an_answer_ends_at_the_context_though_the_server_would_go_on() -> None:
    room = 3
    script = [report(CONTEXT_TOKENS - room), *[made(10 + place, "x", place) for place in range(1, 9)], ended(8)]
    engine = LlamaServerUrlEngine(NativeUpstream(script).link, slots=1)
    tokens, caught = await collect(engine, ask(count=900))
    assert caught is None
    assert [token.finish for token in tokens] == [None, None, "length"]


async def test_a_pause_goes_on_from_the_text_and_the_ids_so_far() -> None:
    going_on = [report(30), *[made(40 + place, "y", place) for place in range(1, 5)], ended(4)]
    upstream = NativeUpstream([report(7), *[made(10 + place, "x", place) for place in range(1, 12)]], going_on)
    engine = LlamaServerUrlEngine(upstream.link, slots=1)
    continuation = await engine.prepare(ask(count=20), 5)
    tokens = []
    async for token in continuation.start(0, 1):
        tokens.append(token)
        continuation.acknowledge(token.index)
        await asyncio.sleep(0.005)
    first = [token.id for token in tokens if token.id is not None and token.id < 40]
    assert upstream.bodies[1]["prompt"] == ["count", *first]
    assert upstream.bodies[1]["n_predict"] == 20 - len(first)
    assert continuation.prompt_tokens == 7
    assert [token.index for token in tokens] == list(range(len(tokens)))


async def test_tokens_hidden_in_a_character_are_asked_for_again() -> None:
    """Without the model's file nobody here knows which tokens an emoji is made of."""
    emoji = event({"content": "\U0001f600", "tokens": [23], "tokens_predicted": 4, "stop": False})
    upstream = NativeUpstream([report(7), made(11, "one", 1), emoji], [report(11), ended(1, "eos")])
    engine = LlamaServerUrlEngine(upstream.link, slots=1)
    await engine.capabilities()
    upstream.whole = {"content": "\U0001f600", "tokens": [21, 22, 23], "stop_type": "limit"}
    tokens, caught = await collect(engine, ask())
    assert caught is None
    assert [token.id for token in tokens[:4]] == [11, 21, 22, 23]
    assert b"".join(token.data for token in tokens).decode() == "one\U0001f600"
