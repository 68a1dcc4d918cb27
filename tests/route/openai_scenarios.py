"""What an unmodified openai client does, as functions over a base URL: the same for gateway, agent and coordinator.

Each takes the base URL (without /v1), an httpx client (for its TLS and headers) and a model that chats greedily.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

HttpClient = openai.DefaultAsyncHttpxClient
Idle = Callable[[], Awaitable[bool]]
QUESTION = "Name three rivers of Europe and say one sentence about each."
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


@asynccontextmanager
async def client(base_url: str, http_client: HttpClient | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """The stock client, without retries of its own."""
    made = openai.AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key="not-checked-on-loopback",
        max_retries=0,
        timeout=45.0,
        http_client=http_client,
    )
    async with made as one:
        yield one


async def read(stream: openai.AsyncStream[ChatCompletionChunk]) -> list[ChatCompletionChunk]:
    """All chunks of a stream that ends in order."""
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    """The answer that the deltas make."""
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def models_are_listed(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """List and single retrieval."""
    async with client(base_url, http_client) as api:
        assert model in [one.id async for one in await api.models.list()]
        assert (await api.models.retrieve(model)).id == model


async def chat_and_stream_say_the_same(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """One finish reason, role in the first delta only, and the text of the whole answer."""
    async with client(base_url, http_client) as api:
        whole = await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
        chunks = await read(
            await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0, stream=True)
        )
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert text_of(chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


async def stop_strings_end_the_answer(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """A stop string that spans tokens never shows, not even in part."""
    async with client(base_url, http_client) as api:
        free = await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=32, temperature=0)
        text = free.choices[0].message.content or ""
        stop = text[12:17]
        assert len(stop) == 5
        whole = await api.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=32, temperature=0, stop=[stop, "never said"]
        )
        chunks = await read(
            await api.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=32, temperature=0, stop=stop, stream=True
            )
        )
    expected = text[: text.index(stop)]
    assert whole.choices[0].message.content == expected
    assert text_of(chunks) == expected
    assert (whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason) == ("stop", "stop")


async def usage_comes_only_when_asked(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """U2: asked, it is one chunk without choices before the end, equal to the whole answer's; unasked, absent."""
    async with client(base_url, http_client) as api:
        whole = await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0)
        asked = await read(
            await api.chat.completions.create(
                model=model,
                messages=MESSAGES,
                max_tokens=16,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        unasked = await read(
            await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0, stream=True)
        )
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > 0
    assert 0 < whole.usage.completion_tokens <= 16
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert asked[-1].choices == []
    assert asked[-1].usage is not None
    assert asked[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert asked[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in asked[:-1])
    assert all(chunk.usage is None and chunk.choices for chunk in unasked)


async def logprobs_line_up_with_the_text(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """Bytes of the entries join to the text, one entry a token, values are log probabilities, best ones first."""
    async with client(base_url, http_client) as api:
        whole = await api.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
        )
        chunks = await read(
            await api.chat.completions.create(
                model=model,
                messages=MESSAGES,
                max_tokens=12,
                temperature=0,
                logprobs=True,
                top_logprobs=3,
                stream=True,
            )
        )
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert whole.usage is not None
    assert len(entries) == whole.usage.completion_tokens
    text = b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "replace")
    assert text == whole.choices[0].message.content
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    for entry in entries:
        assert -9999.0 < entry.logprob <= 0.0
        values = [one.logprob for one in entry.top_logprobs]
        assert 1 <= len(values) <= 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0], abs=1e-3)


async def legacy_completions_answer(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """/v1/completions, whole and streamed, with its own form of logprobs."""
    async with client(base_url, http_client) as api:
        whole = await api.completions.create(
            model=model, prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=1
        )
        stream = await api.completions.create(
            model=model, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
        )
        text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert whole.choices[0].text == text
    assert whole.choices[0].logprobs is not None
    assert "".join(whole.choices[0].logprobs.tokens or []).startswith(text[:3])


async def refusals_are_openai_errors(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """Unknown models, what cannot be honoured, and a prompt over the context (O1), each with the client's own class."""
    async with client(base_url, http_client) as api:
        with pytest.raises(openai.NotFoundError, match=model):
            await api.chat.completions.create(model="no-such-model", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as several:
            await api.chat.completions.create(model=model, messages=MESSAGES, n=2)
        with pytest.raises(openai.BadRequestError) as long:
            await api.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "river " * 30_000}], max_tokens=4
            )
        assert (several.value.code, several.value.param) == ("unsupported_parameter", "n")
        assert long.value.code == "context_length_exceeded"
        assert isinstance(long.value.body, dict)
        assert long.value.body["n_prompt_tokens"] > long.value.body["n_ctx"] > 0


async def cancelling_frees_the_engine(base_url: str, http_client: HttpClient | None, model: str, idle: Idle) -> None:
    """C1, C2: a client that leaves mid-stream ends the generation; `idle` tells when nothing generates any more."""
    async with client(base_url, http_client) as api:
        stream = await api.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=400, temperature=0, stream=True
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 4:
                break
        assert not await idle()
        await stream.close()
        for _ in range(300):
            if await idle():
                break
            await asyncio.sleep(0.02)
        assert await idle()
        again = await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, temperature=0)
        assert again.choices[0].message.content


WEATHER: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def a_conversation_goes_on(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """System text, several turns, typed parts: what was said before changes what is said now."""
    turns: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "system", "content": "You are a guide. Answer in one short sentence."},
        {"role": "user", "content": [{"type": "text", "text": "My name is Ann. What is the capital of France?"}]},
    ]
    async with client(base_url, http_client) as api:
        first = await api.chat.completions.create(model=model, messages=turns, max_tokens=24, temperature=0)
        assert first.usage is not None
        said = first.choices[0].message.content
        assert said
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And of Spain?"}]
        second = await api.chat.completions.create(model=model, messages=turns, max_tokens=24, temperature=0)
    assert second.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def tools_are_called_and_their_results_taken(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """T1: a forced call, whole and streamed, fits its schema; the turn with its result is answered in words."""
    turns: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Weather in Bern?"}]
    async with client(base_url, http_client) as api:
        whole = await api.chat.completions.create(
            model=model, messages=turns, tools=[WEATHER], tool_choice="required", max_tokens=64, temperature=0
        )
        chunks = await read(
            await api.chat.completions.create(
                model=model,
                messages=turns,
                tools=[WEATHER],
                tool_choice={"type": "function", "function": {"name": "weather"}},
                max_tokens=64,
                temperature=0,
                stream=True,
            )
        )
        [call] = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        deltas = [d for chunk in chunks for choice in chunk.choices for d in choice.delta.tool_calls or []]
        assert [d.id for d in deltas if d.id], "one call"
        assert deltas[0].function is not None
        assert (deltas[0].type, deltas[0].function.name, deltas[0].function.arguments) == ("function", "weather", "")
        streamed = "".join(d.function.arguments or "" for d in deltas if d.function is not None)
        for arguments in (call.function.arguments, streamed):
            assert json.loads(arguments)["city"] in ("Bern", "Oslo")
        assert (whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason) == ("tool_calls", "tool_calls")
        turns += [
            {"role": "assistant", "tool_calls": [call.to_dict()]},  # type: ignore[misc, list-item]
            {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"},
        ]
        answer = await api.chat.completions.create(
            model=model, messages=turns, tools=[WEATHER], max_tokens=24, temperature=0
        )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


async def truncated_calls_are_marked(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """T2: max_tokens ends the answer inside a call's JSON; the client gets what came, and a mark instead of a crash."""
    long = json.loads(json.dumps(WEATHER))
    long["function"]["parameters"]["properties"]["city"]["enum"] = [
        "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysilio"
    ]
    asked: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Weather?"}]
    async with client(base_url, http_client) as api:
        whole = await api.chat.completions.create(
            model=model, messages=asked, tools=[long], tool_choice="required", max_tokens=24, temperature=0
        )
        chunks = await read(
            await api.chat.completions.create(
                model=model,
                messages=asked,
                tools=[long],
                tool_choice="required",
                max_tokens=24,
                temperature=0,
                stream=True,
            )
        )
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    deltas = [d for chunk in chunks for choice in chunk.choices for d in choice.delta.tool_calls or []]
    streamed = "".join(d.function.arguments or "" for d in deltas if d.function is not None)
    for arguments in (call.function.arguments, streamed):
        assert arguments.startswith("{")
        with pytest.raises(ValueError):
            json.loads(arguments)
    assert (whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason) == ("length", "length")
    for told in (whole, chunks[-1]):
        assert told.to_dict()["midstream"]["broken_calls"] == [0]  # type: ignore[index]


async def formats_are_kept(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """response_format: an answer that fits the schema."""
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"], "additionalProperties": False}
    async with client(base_url, http_client) as api:
        answer = await api.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=32,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "ok", "schema": schema}},
        )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)


async def embeddings_are_vectors(base_url: str, http_client: HttpClient | None, model: str) -> None:
    """Base64, as the client asks by itself, and plain floats; the same text has the same vector."""
    async with client(base_url, http_client) as api:
        packed = await api.embeddings.create(model=model, input=["a river", "a mountain", "a river"])
        plain = await api.embeddings.create(model=model, input="a river", encoding_format="float")
    vectors = [item.embedding for item in packed.data]
    assert len(vectors[0]) > 64
    assert vectors[0] == pytest.approx(plain.data[0].embedding, abs=1e-2)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-2)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
    assert packed.usage.prompt_tokens > 0


REAL_SCENARIOS = (
    a_conversation_goes_on,
    tools_are_called_and_their_results_taken,
    truncated_calls_are_marked,
    formats_are_kept,
    embeddings_are_vectors,
)
"""What needs a model that can be held to a schema, and that makes vectors."""

SCENARIOS = (
    models_are_listed,
    chat_and_stream_say_the_same,
    stop_strings_end_the_answer,
    usage_comes_only_when_asked,
    logprobs_line_up_with_the_text,
    legacy_completions_answer,
    refusals_are_openai_errors,
)
