"""The front doors as bytes on the wire, over fakes: every API's fields, events, errors and headers."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import frozen

from engines.fakes_text import FakeTextEngine
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http import HttpLink
from links.port import Reply
from protocol.errors import LinkClosed
from protocol.text import CallDelta
from tests.route.text_house import house

Json = dict[str, Any]
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n....").decode()


def bytewise(text: str, size: int = 5) -> list[bytes]:
    raw = text.encode()
    return [raw[at : at + size] for at in range(0, len(raw), size)]


@frozen
class Client:
    link: HttpLink

    async def ask(self, path: str, body: Json, **headers: str) -> Reply:
        sent = {"content-type": "application/json", **headers}
        return await self.link.exchange(path, sent, json.dumps(body).encode(), 10.0)

    async def told(self, path: str, body: Json, status: int = 200, **headers: str) -> Any:
        reply = await self.ask(path, body, **headers)
        assert reply.status == status, reply.body
        return json.loads(reply.body)

    async def stream(self, path: str, body: Json) -> str:
        sent = {"content-type": "application/json"}
        chunks = [c async for c in self.link.lines(path, sent, json.dumps(body).encode(), 10.0)]
        return b"".join(chunks).decode()


@asynccontextmanager
async def door(
    engine: FakeTextEngine, *, local: bool = True, settings: GatewaySettings | None = None, **ports: Any
) -> AsyncIterator[Client]:
    """A front door over one fake engine with the model `m`."""
    target = Target("device" if local else "cloud", local, engine, frozenset({"m"}))
    async with house([target], settings=settings, ports=ports) as one:
        link = HttpLink("front", one.base_url)
        try:
            yield Client(link)
        finally:
            await link.close()


def says(text: str, **more: Any) -> FakeTextEngine:
    return FakeTextEngine(says=bytewise(text), **more)


def events(stream: str) -> list[Json]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def lines(stream: str) -> list[Json]:
    return [json.loads(line) for line in stream.splitlines()]


def chat(**more: Any) -> Json:
    return {"model": "m", "messages": [USER], "max_tokens": 64, **more}


# OpenAI


async def test_openai_tool_deltas_have_their_exact_shape() -> None:
    """T1: id on the call, name once, type, empty first arguments; then arguments alone; role in the first delta."""
    async with door(says("Let me see.\n" + CALL)) as client:
        stream = await client.stream("/v1/chat/completions", chat(tools=[TOOL], stream=True))
    deltas = [event["choices"][0]["delta"] for event in events(stream)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    id_ = calls[0][0]["id"]
    assert id_.startswith("call_")
    first = {"index": 0, "id": id_, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert calls[0] == [first]
    assert all(
        set(call[0]) == {"index", "function"} and set(call[0]["function"]) == {"arguments"} for call in calls[1:]
    )
    assert "".join(call[0]["function"]["arguments"] for call in calls) == '{"city": "Bern"}'
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see.\n"
    finishes = [event["choices"][0]["finish_reason"] for event in events(stream)]
    assert finishes[-1] == "tool_calls"
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    assert stream.endswith("data: [DONE]\n\n")


async def test_openai_tool_calls_of_a_whole_answer() -> None:
    async with door(says(CALL)) as client:
        answer = await client.told("/v1/chat/completions", chat(tools=[TOOL]))
    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Bern"}'})


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_arguments_are_marked_and_never_a_crash(stream: bool) -> None:
    """T2: the answer was cut by max_tokens inside the JSON of a call."""
    async with door(says(CALL)) as client:
        body = chat(tools=[TOOL], max_tokens=11, stream=stream)
        if stream:
            told = events(await client.stream("/v1/chat/completions", body))
            calls = [c for event in told for c in event["choices"][0]["delta"].get("tool_calls", ())]
            arguments, last = "".join(call["function"]["arguments"] for call in calls), told[-1]
        else:
            last = await client.told("/v1/chat/completions", body)
            arguments = last["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert '{"city": "Bern"}'.startswith(arguments)
    assert 0 < len(arguments) < len('{"city": "Bern"}')
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["midstream"]["broken_calls"] == [0]


async def test_an_engine_that_tells_calls_apart_is_given_the_tools_as_they_are() -> None:
    pieces: list[bytes | CallDelta] = [
        b"ok <tool_call>",
        CallDelta(0, "call_x", "weather"),
        CallDelta(0, arguments='{"a":'),
        CallDelta(0, arguments="1}"),
    ]
    engine = FakeTextEngine(says=pieces, tools=True)
    async with door(engine) as client:
        answer = await client.told("/v1/chat/completions", chat(tools=[TOOL], tool_choice="required"))
    message = answer["choices"][0]["message"]
    assert message["content"] == "ok <tool_call>", "text of such an engine is text"
    assert message["tool_calls"][0] == {
        "id": "call_x",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"a":1}'},
    }
    assert (engine.prepared[0].tools[0]["function"]["name"], engine.prepared[0].tool_choice) == ("weather", "required")


async def test_a_forced_call_ends_the_answer_and_needs_an_engine_that_can_be_held_to_a_schema() -> None:
    text = '{"name": "weather", "arguments": {}} and then some'
    async with door(says(text, grammar=True)) as client:
        answer = await client.told("/v1/chat/completions", chat(tools=[TOOL], tool_choice="required"))
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert answer["choices"][0]["message"]["content"] is None
        assert answer["usage"]["completion_tokens"] < len(bytewise(text))
    async with door(says(text)) as client:
        refused = await client.told("/v1/chat/completions", chat(tools=[TOOL], tool_choice="required"), 400)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("unsupported_parameter", "tool_choice")


async def test_images_go_to_targets_that_take_them_and_are_refused_otherwise() -> None:
    parts = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    ]
    body = chat(messages=[{"role": "user", "content": parts}])
    engine = says("a dog", images=True)
    async with door(engine) as client:
        answer = await client.told("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == "a dog"
    assert engine.prepared[0].prompt[0].parts[1].media_type == "image/png"  # type: ignore[union-attr]
    async with door(says("a dog")) as client:
        refused = await client.told("/v1/chat/completions", body, 400)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("unsupported_parameter", "messages")


async def test_a_response_format_needs_an_engine_that_can_be_held_to_it() -> None:
    form = {"type": "json_object"}
    engine = says("{}", grammar=True)
    async with door(engine) as client:
        await client.told("/v1/chat/completions", chat(response_format=form))
    assert engine.prepared[0].sampling.json_schema == {"type": "object"}
    async with door(says("{}")) as client:
        refused = await client.told("/v1/chat/completions", chat(response_format=form), 400)
    assert refused["error"]["param"] == "response_format"


async def test_plain_completions_keep_a_format_and_refuse_tools() -> None:
    engine = says("{}", grammar=True)
    async with door(engine) as client:
        form = {"type": "json_object"}
        await client.told("/v1/completions", {"model": "m", "prompt": "p", "response_format": form})
        refused = await client.told("/v1/completions", {"model": "m", "prompt": "p", "tools": [TOOL]}, 400)
    assert (engine.prepared[0].prompt, engine.prepared[0].sampling.json_schema) == ("p", {"type": "object"})
    assert (refused["error"]["code"], refused["error"]["param"]) == ("unsupported_parameter", "tools")


async def test_streams_have_the_headers_that_proxies_need() -> None:
    async with door(says("hello")) as client:
        reply = await client.ask("/v1/chat/completions", chat(stream=True))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-store", "no")
    assert "content-length" not in reply.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_a_cut_stream_ends_with_an_error_and_without_an_end_mark(path: str) -> None:
    """S2: truncated is told from whole in every API."""
    engine = FakeTextEngine()
    engine.fail("token", LinkClosed("gone"), index=5)
    async with door(engine, settings=GatewaySettings(max_losses=0)) as client:
        stream = await client.stream(path, chat(stream=True))
    last = [line for line in stream.splitlines() if line.strip()][-1].removeprefix("data: ")
    assert "error" in json.loads(last)
    assert not any(mark in stream for mark in ("[DONE]", "message_stop", '"done":true', '"finish_reason":"stop"'))


# Usage


@pytest.mark.parametrize("asked", [True, False])
async def test_usage_of_a_stream_is_the_engines_own_and_only_for_who_asked(asked: bool) -> None:
    """U1, U2, U3: counted whether asked for or not, told only when asked, equal to the whole answer's."""
    options = {"stream_options": {"include_usage": True}} if asked else {}
    async with door(FakeTextEngine(answer_tokens=7)) as client:
        whole = await client.told("/v1/chat/completions", chat())
        told = events(await client.stream("/v1/chat/completions", chat(stream=True, **options)))
    assert whole["usage"]["completion_tokens"] == 7
    found = [event["usage"] for event in told if event.get("usage")]
    assert found == ([whole["usage"]] if asked else [])
    assert [event for event in told if not event["choices"]] == (told[-1:] if asked else [])
    assert all(("usage" in event) is asked for event in told)


# Anthropic


async def test_anthropic_events_in_their_order() -> None:
    async with door(says("See.\n" + CALL)) as client:
        body = {"tools": [{"name": "weather", "input_schema": {"type": "object"}}], "stream": True}
        told = events(await client.stream("/v1/messages", chat(**body)))
    kinds = [event["type"] for event in told if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", "content_block_stop", "content_block_start", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert told[0]["message"]["usage"]["input_tokens"] > 0
    starts = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    texts = [e["delta"]["text"] for e in told if e["type"] == "content_block_delta" and "text" in e["delta"]]
    inputs = [
        e["delta"]["partial_json"] for e in told if e["type"] == "content_block_delta" and "partial_json" in e["delta"]
    ]
    assert ("".join(texts), json.loads("".join(inputs))) == ("See.\n", {"city": "Bern"})
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] > 0


async def test_anthropic_whole_answers_with_system_tools_and_stop_sequences() -> None:
    engine = says(CALL)
    async with door(engine) as client:
        body = chat(
            system=[{"type": "text", "text": "be short"}],
            tools=[{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
            messages=[
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "rain", "is_error": True},
                        {"type": "text", "text": "so?"},
                    ],
                },
            ],
        )
        answer = await client.told("/v1/messages", body)
    [block] = answer["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Bern"})
    assert answer["stop_reason"] == "tool_use"
    roles = [(turn.role, turn.content) for turn in engine.prepared[0].prompt]  # type: ignore[union-attr]
    assert roles[0][1].startswith("be short\n\n")
    assert [role for role, _ in roles] == ["system", "user", "assistant", "user", "user"]
    assert roles[3][1] == "<tool_response>\nerror: rain\n</tool_response>"
    async with door(says("one two three")) as client:
        answer = await client.told("/v1/messages", chat(stop_sequences=[" two"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " two")
    assert answer["content"] == [{"type": "text", "text": "one"}]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"top_k": 5}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages[0].content",
        ),
    ],
)
async def test_anthropic_refusals_name_the_field(changes: Json, field: str) -> None:
    async with door(says("x")) as client:
        reply = await client.ask("/v1/messages", chat(**changes))
    document = json.loads(reply.body)
    assert reply.status == 400
    assert document["type"] == "error"
    assert document["error"]["type"] == "invalid_request_error"
    assert field.split("[")[0].split(".")[0] in document["error"]["message"] or field


async def test_anthropic_counts_tokens_with_the_models_own_tokenizer() -> None:
    async with door(FakeTextEngine()) as client:
        counted = await client.told("/v1/messages/count_tokens", {"model": "m", "messages": [USER]})
        answer = await client.told("/v1/messages", chat())
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
    async with door(FakeTextEngine(), local=False) as client:
        await client.told("/v1/messages/count_tokens", {"model": "m", "messages": [USER]}, 400)


async def test_anthropics_clients_get_their_list_of_models() -> None:
    async with door(says("x")) as client:
        theirs = {"anthropic-version": "2023-06-01"}
        listed = json.loads((await client.link.exchange("/v1/models", theirs, b"", 5.0, method="GET")).body)
        one = json.loads((await client.link.exchange("/v1/models/m", theirs, b"", 5.0, method="GET")).body)
        ours = json.loads((await client.link.exchange("/v1/models", {}, b"", 5.0, method="GET")).body)
    assert (listed["data"], listed["has_more"], listed["first_id"], listed["last_id"]) == ([one], False, "m", "m")
    assert (one["type"], one["id"]) == ("model", "m")
    assert ours["data"][0]["object"] == "model"


# Ollama


async def test_ollama_chat_lines_end_with_done_and_counts() -> None:
    async with door(says("hello there")) as client:
        told = lines(await client.stream("/api/chat", {"model": "m:latest", "messages": [USER]}))
        whole = await client.told("/api/chat", {"model": "m", "messages": [USER], "stream": False})
    assert "".join(line["message"]["content"] for line in told) == "hello there"
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    assert (told[-1]["done_reason"], told[-1]["eval_count"]) == ("stop", whole["eval_count"])
    assert whole["message"] == {"role": "assistant", "content": "hello there"}
    assert whole["prompt_eval_count"] > 0


async def test_ollama_generate_tools_format_and_options() -> None:
    engine = says(CALL, grammar=True)
    async with door(engine) as client:
        told = lines(await client.stream("/api/chat", {"model": "m", "messages": [USER], "tools": [TOOL]}))
        generated = await client.told(
            "/api/generate",
            {
                "model": "m",
                "prompt": "p",
                "system": "s",
                "format": "json",
                "stream": False,
                "options": {"num_predict": 3},
            },
        )
        raw = await client.told("/api/generate", {"model": "m", "prompt": "p", "raw": True, "stream": False})
    [call] = [call for line in told for call in line["message"].get("tool_calls", ())]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Bern"}}
    assert (generated["done_reason"], generated["eval_count"]) == ("length", 3)
    assert engine.prepared[1].sampling.json_schema == {"type": "object"}
    assert engine.prepared[2].prompt == "p"
    assert raw["response"] == CALL


async def test_ollama_lists_shows_and_embeds() -> None:
    async with door(FakeTextEngine()) as client:
        tags = json.loads((await client.link.exchange("/api/tags", {}, b"", 5.0, method="GET")).body)
        version = json.loads((await client.link.exchange("/api/version", {}, b"", 5.0, method="GET")).body)
        shown = await client.told("/api/show", {"model": "m"})
        many = await client.told("/api/embed", {"model": "m", "input": ["a", "b"]})
        one = await client.told("/api/embeddings", {"model": "m", "prompt": "a"})
    assert [model["name"] for model in tags["models"]] == ["m"]
    assert version["version"]
    assert shown["model_info"]["midstream.context_length"] == 4096
    assert len(many["embeddings"]) == 2
    assert one["embedding"] == many["embeddings"][0]


async def test_ollama_errors_are_texts() -> None:
    async with door(says("x")) as client:
        unknown = await client.told("/api/chat", {"model": "no", "messages": [USER]}, 404)
        option = await client.told("/api/chat", {"model": "m", "messages": [USER], "options": {"mirostat": 2}}, 400)
    assert "no" in unknown["error"]
    assert "mirostat" in option["error"]
