"""Every vendor's codec: one recorded conversation each, requests field by field, errors, and round trips as laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import (
    BadRequest,
    ContextOverflow,
    EngineError,
    Full,
    MidstreamError,
    ProtocolError,
    Unsupported,
)
from protocol.openai_upstream import merged, system_first
from protocol.openai_wire import dump
from protocol.provider_kinds import KINDS, base_url_of, codec_of
from protocol.text import CallDelta, ImagePart, Message, Sampling, TextPart, TextRequest, Token, Usage
from protocol.upstream import UpstreamDelta, UpstreamReader, error_from, retry_after_s, text_of

STREAMS = Path(__file__).parent / "provider_streams"
RECORDED = [*sorted(STREAMS.glob("*"))]
REFUSALS = json.loads((Path(__file__).parent / "provider_refusals.json").read_text())
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
TALK = (
    Message("system", "Be brief."),
    Message("user", "Weather in Paris?"),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "18 C", tool_call_id="c1"),
    Message("system", "Metric units."),
    Message("user", "And this?", parts=(TextPart("And this?"), ImagePart("image/png", b"\x89PNG"))),
)
ASK = TextRequest("m", TALK, Sampling(temperature=0.5, top_p=0.9, seed=7, max_tokens=50), tools=(WEATHER,))


def body_of(kind: str, request: TextRequest, *, stream: bool = True) -> Any:
    return json.loads(codec_of(kind).call("big", request, stream=stream).body)


def read(reader: UpstreamReader, data: bytes, step: int) -> list[UpstreamDelta]:
    found: list[UpstreamDelta] = []
    for at in range(0, len(data), step):
        found += reader.feed(data[at : at + step])
    return found


def joined(deltas: list[UpstreamDelta]) -> dict[str, Any]:
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        for call in delta.calls:
            known = calls.get(call.index, CallDelta(call.index))
            calls[call.index] = CallDelta(
                call.index, known.id or call.id, known.name or call.name, known.arguments + call.arguments
            )
    return {
        "text": "".join(delta.text for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": [(call.name, json.loads(call.arguments)) for call in calls.values()],
        "ids": all(call.id for call in calls.values()),
        "finish": [delta.finish for delta in deltas if delta.finish],
        "usage": [delta.usage for delta in deltas if delta.usage][-1],
    }


@pytest.mark.parametrize("step", [1, 17, 100_000])
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_recorded_answer_means_the_same_at_every_vendor(file: Path, step: int) -> None:
    reader = codec_of(file.stem).reader(ASK)
    found = joined(read(reader, file.read_bytes(), step))
    assert found["text"] == "Let me look."
    assert found["reasoning"] == ("" if file.stem == "openai" else "The user wants weather.")
    assert found["calls"] == [("get_weather", {"city": "Paris"})] and found["ids"]
    assert found["finish"] == ["tool_calls"]
    assert found["usage"] == Usage(25, 41, 0 if file.stem == "ollama" else 3)
    assert reader.ended is (file.stem != "gemini")


def test_every_kind_has_a_recording() -> None:
    assert {file.stem for file in RECORDED} == set(KINDS) - {"openai_compat"}
    assert {kind for kind in KINDS if not base_url_of(kind)} == {"openai_compat", "vllm", "llama_server"}


# Requests.


def test_anthropic_takes_the_system_prompt_apart_and_joins_turns() -> None:
    body = body_of("anthropic", ASK)
    assert body["system"] == "Be brief.\n\nMetric units."
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    use, last = body["messages"][1]["content"], body["messages"][2]["content"]
    assert use == [{"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}]
    assert [block["type"] for block in last] == ["tool_result", "text", "image"]
    assert last[2]["source"] == {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}
    assert body["max_tokens"] == 50 and body["tools"][0]["input_schema"] == WEATHER["function"]["parameters"]  # type: ignore[index]
    forced = body_of("anthropic", evolve(ASK, tool_choice="function:get_weather", parallel_tool_calls=False))
    assert forced["tool_choice"] == {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    call = codec_of("anthropic").call("big", ASK, stream=True)
    assert (call.path, call.headers["anthropic-version"]) == ("/v1/messages", "2023-06-01")
    assert codec_of("anthropic").authorize("k") == {"x-api-key": "k"}


def test_gemini_calls_the_assistant_model_and_names_results_by_function() -> None:
    body = body_of("gemini", ASK)
    assert body["systemInstruction"] == {"parts": [{"text": "Be brief.\n\nMetric units."}]}
    assert [content["role"] for content in body["contents"]] == ["user", "model", "user"]
    parts = body["contents"][2]["parts"]
    assert parts[0] == {"functionResponse": {"name": "get_weather", "response": {"result": "18 C"}}}
    assert parts[2] == {"inlineData": {"mimeType": "image/png", "data": "iVBORw=="}}
    assert body["generationConfig"] == {"temperature": 0.5, "topP": 0.9, "maxOutputTokens": 50, "seed": 7}
    call = codec_of("gemini").call("models/x", ASK, stream=True)
    assert call.path == "/v1beta/models/models%2Fx:streamGenerateContent?alt=sse"
    forced = body_of("gemini", evolve(ASK, tool_choice="function:get_weather"))["toolConfig"]["functionCallingConfig"]
    assert forced == {"mode": "ANY", "allowedFunctionNames": ["get_weather"]}


def test_ollama_never_loses_the_front_of_a_prompt() -> None:
    """O1 ollama/ollama#3839: truncation is switched off, so an over-long prompt is refused."""
    body = body_of("ollama", ASK)
    assert body["truncate"] is False and body["shift"] is False
    assert body["options"] == {"temperature": 0.5, "top_p": 0.9, "num_predict": 50, "seed": 7}
    assert body["messages"][3] == {"role": "tool", "content": "18 C", "tool_name": "get_weather"}
    assert body["messages"][5]["images"] == ["iVBORw=="]
    raw = codec_of("ollama").call("m", TextRequest("m", "Once upon"), stream=True)
    assert raw.path == "/api/generate" and json.loads(raw.body)["raw"] is True


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("openai", ["system", "user", "assistant", "tool", "system", "user"]),
        ("qwen", ["system", "user", "assistant", "tool", "user"]),
        ("vllm", ["system", "user", "assistant", "tool", "user"]),
        ("zhipu", ["system", "user", "assistant", "tool", "user"]),
        ("moonshot", ["system", "user", "assistant", "tool", "system", "user"]),
    ],
)
def test_where_the_system_prompt_stands(kind: str, roles: list[str]) -> None:
    messages = body_of(kind, ASK)["messages"]
    assert [message["role"] for message in messages] == roles
    assert "Metric units." in " ".join(str(m["content"]) for m in messages if m["role"] == "system")


def test_deepseek_joins_neighbours_of_one_role() -> None:
    turns = (Message("user", "a"), Message("user", "b"), Message("assistant", "c"), Message("user", "d"))
    messages = body_of("deepseek", TextRequest("m", turns))["messages"]
    assert [(m["role"], m["content"]) for m in messages] == [("user", "a\n\nb"), ("assistant", "c"), ("user", "d")]


@pytest.mark.parametrize(
    ("kind", "wanted", "sent"),
    [
        ("openai", 0.0, {"temperature": 0.0}),
        ("openai", 1.7, {"temperature": 1.7}),
        ("qwen", 2.0, {"temperature": 1.99}),
        ("zhipu", 0.0, {"do_sample": False}),
        ("zhipu", 1.7, {"temperature": 1.0}),
        ("moonshot", 1.7, {"temperature": 1.0}),
        ("anthropic", 1.7, {"temperature": 1.0}),
    ],
)
def test_temperatures_keep_to_the_vendors_scale(kind: str, wanted: float, sent: dict[str, Any]) -> None:
    body = body_of(kind, TextRequest("m", TALK[:2], Sampling(temperature=wanted)))
    assert {key: body[key] for key in ("temperature", "do_sample") if key in body} == sent


def test_openais_reasoning_models_get_no_sampling_parameters() -> None:
    call = codec_of("openai").call("o3-mini", TextRequest("m", TALK[:2]), stream=True)
    body = json.loads(call.body)
    assert "temperature" not in body and "top_p" not in body
    assert body["max_completion_tokens"] == 256 and "max_tokens" not in body


@pytest.mark.parametrize(
    ("kind", "path", "mark"),
    [
        ("qwen", "/v1/chat/completions", {"partial": True}),
        ("moonshot", "/v1/chat/completions", {"partial": True}),
        ("deepseek", "/beta/chat/completions", {"prefix": True}),
    ],
)
def test_a_partial_answer_is_continued_in_the_vendors_way(kind: str, path: str, mark: dict[str, Any]) -> None:
    request = TextRequest("m", TALK[:2], Sampling(max_tokens=9), prefix=(Token(0, None, b"It is"), Token(1, 5, b" 18")))
    call = codec_of(kind).call("big", request, stream=True)
    body = json.loads(call.body)
    assert call.path == path
    assert body["messages"][-1] == {"role": "assistant", "content": "It is 18", **mark}
    assert body["max_tokens"] == 7


def test_anthropic_is_sent_no_trailing_space_and_says_none_twice() -> None:
    request = TextRequest("m", TALK[:2], Sampling(max_tokens=9), prefix=(Token(0, None, b"It is "),))
    codec = codec_of("anthropic")
    assert json.loads(codec.call("m", request, stream=True).body)["messages"][-1]["content"][0]["text"] == "It is"

    def said(text: str) -> bytes:
        event = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        return b"data: " + dump(event) + b"\n\n"

    reader = codec.reader(request)
    assert [d.text for d in read(reader, said(" 18") + said(" C"), 1000)] == ["18", " C"]
    reader = codec.reader(request)
    assert [d.text for d in read(reader, said("18") + said(" C"), 1000)] == ["18", " C"]


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("anthropic", {"sampling": Sampling(logprobs=1)}, "logprobs"),
        ("anthropic", {"response_format": {"type": "json_object"}}, "response_format"),
        ("gemini", {"sampling": Sampling(logit_bias={1: 2.0})}, "logit_bias"),
        ("gemini", {"prefix": (Token(0, None, b"x"),)}, "prefix"),
        ("openai", {"prefix": (Token(0, None, b"x"),)}, None),
        ("zhipu", {"sampling": Sampling(logprobs=1)}, "logprobs"),
        ("zhipu", {"tools": (WEATHER,), "tool_choice": "required"}, "tool_choice"),
        ("moonshot", {"sampling": Sampling(logit_bias={1: 2.0})}, "logit_bias"),
        ("deepseek", {"prompt": TALK}, "messages"),
        ("deepseek", {"response_format": {"type": "json_schema"}}, "response_format"),
        ("qwen", {"prompt": "a text"}, "prompt"),
        ("ollama", {"tools": (WEATHER,), "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_a_vendor_cannot_honour_is_refused_by_name(kind: str, change: dict[str, Any], field: str | None) -> None:
    request = evolve(TextRequest("m", TALK[:2]), **change)
    with pytest.raises(Unsupported) as caught:
        codec_of(kind).call("m", request, stream=True)
    assert caught.value.field == field


# Whole answers and errors.


def test_whole_answers() -> None:
    anthropic = {
        "type": "message",
        "content": [{"type": "text", "text": "hi"}, {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 3, "output_tokens": 4},
    }
    found = codec_of("anthropic").whole(dump(anthropic))
    assert (found.text, found.finish, found.usage) == ("hi", "tool_calls", Usage(3, 4))
    assert found.calls == (CallDelta(0, "t", "f", '{"a":1}'),)
    gemini = {"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": "MAX_TOKENS"}]}
    assert codec_of("gemini").whole(dump(gemini)).finish == "length"
    ollama = {"message": {"content": "hi"}, "done": True, "done_reason": "length", "prompt_eval_count": 2}
    assert codec_of("ollama").whole(dump(ollama)) == UpstreamDelta("hi", finish="length", usage=Usage(2, 0))


@pytest.mark.parametrize(
    ("kind", "data", "error"),
    [
        ("anthropic", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, Full),
        ("anthropic", {"type": "message_delta", "delta": {"stop_reason": "pause_turn"}}, EngineError),
        ("gemini", {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "quota"}}, Full),
        ("gemini", {"promptFeedback": {"blockReason": "SAFETY"}}, EngineError),
        ("gemini", {"candidates": [{"finishReason": "MALFORMED_FUNCTION_CALL"}]}, EngineError),
        ("deepseek", {"choices": [{"delta": {}, "finish_reason": "insufficient_system_resource"}]}, EngineError),
        ("zhipu", {"choices": [{"delta": {}, "finish_reason": "network_error"}]}, EngineError),
        ("openai", {"error": {"message": "The server had an error", "type": "server_error"}}, EngineError),
    ],
)
def test_an_error_inside_a_stream_is_one(kind: str, data: Any, error: type[MidstreamError]) -> None:
    """S4 BerriAI/litellm#6957: an overload told in the stream is an error, so that a fallback may begin."""
    with pytest.raises(error):
        list(codec_of(kind).reader(ASK).feed(b"data: " + dump(data) + b"\n\n"))


def test_an_error_in_ollamas_lines_is_one() -> None:
    with pytest.raises(EngineError):
        list(codec_of("ollama").reader(ASK).feed(b'{"error":"an error was encountered while running the model"}\n'))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"ollama"}))
def test_nonsense_in_a_stream_is_an_error(kind: str) -> None:
    with pytest.raises(ProtocolError):
        list(codec_of(kind).reader(ASK).feed(b'data: {"choices": [tru\n\n'))


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row['kind']}-{row['status']}-{row['family']}")
def test_refusals_of_each_vendor(row: dict[str, Any]) -> None:
    found = codec_of(row["kind"]).error(row["status"], {"retry-after": "7"}, dump({"error": row["error"]}))
    assert type(found).__name__ == row["family"]
    if isinstance(found, Full):
        assert found.retry_after_s == 7.0
    if isinstance(found, ContextOverflow):
        assert found.prompt_tokens > found.context_tokens > 0


def test_gemini_tells_the_wait_in_its_body() -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "31.5s"}]
    body = dump({"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "x", "details": details}})
    found = codec_of("gemini").error(429, {}, body)
    assert isinstance(found, Full) and found.retry_after_s == 31.5


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"x-ms-retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "99999999"}, 86_400.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"retry-after": "-1"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


# Laws.

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
VALUES = st.dictionaries(NAMES, st.one_of(st.integers(-9, 9), WORDS), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Turns as clients send them, each call answered by its result."""
    turns: list[Message] = []
    for number in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            turns.append(Message("system", draw(WORDS.filter(bool))))
        turns.append(Message("user", draw(WORDS.filter(bool))))
        if draw(st.booleans()):
            arguments = json.dumps(draw(VALUES))
            call = {"id": f"c{number}", "type": "function", "function": {"name": draw(NAMES), "arguments": arguments}}
            turns += [
                Message("assistant", draw(WORDS), tool_calls=(call,)),
                Message("tool", draw(WORDS), tool_call_id=f"c{number}"),
            ]
    return (*turns, Message("user", draw(WORDS.filter(bool))))


@settings(max_examples=40)
@given(conversations())
def test_no_word_call_or_result_of_a_conversation_is_lost_at_any_vendor(turns: tuple[Message, ...]) -> None:
    for kind in KINDS:
        sent = body_of(kind, TextRequest("m", turns))
        said = json.dumps(sent, ensure_ascii=False)
        for turn in turns:
            assert json.dumps(turn.content, ensure_ascii=False)[1:-1] in said
            for call in turn.tool_calls:
                assert call["function"]["name"] in said
        arguments = [json.loads(call["function"]["arguments"]) for turn in turns for call in turn.tool_calls]
        assert list(_arguments(kind, sent)) == arguments


def _arguments(kind: str, sent: Any) -> Any:
    if kind == "anthropic":
        return [b["input"] for m in sent["messages"] for b in m["content"] if b["type"] == "tool_use"]
    if kind == "gemini":
        return [p["functionCall"]["args"] for c in sent["contents"] for p in c["parts"] if "functionCall" in p]
    raw = [c["function"]["arguments"] for m in sent["messages"] for c in m.get("tool_calls", ())]
    return raw if kind == "ollama" else [json.loads(text) for text in raw]


@settings(max_examples=40)
@given(st.lists(st.tuples(WORDS.filter(bool), st.booleans()), min_size=1, max_size=6), st.integers(1, 40))
def test_a_stream_reads_the_same_however_it_is_cut(pieces: list[tuple[str, bool]], step: int) -> None:
    """Answers written in each wire form come back, whatever the chunks of the network are."""
    said = "".join(text for text, thought in pieces if not thought)
    thoughts = "".join(text for text, thought in pieces if thought)
    for kind in ("openai_compat", "anthropic", "gemini", "ollama"):
        data = b"".join(_written(kind, text, thought) for text, thought in pieces)
        found = read(codec_of(kind).reader(ASK), data, step)
        assert "".join(delta.text for delta in found) == said
        assert "".join(delta.reasoning for delta in found) == thoughts


def _written(kind: str, text: str, thought: bool) -> bytes:
    document: Any
    if kind == "ollama":
        return dump({"message": {"thinking" if thought else "content": text}, "done": False}) + b"\n"
    if kind == "anthropic":
        delta = {"type": "thinking_delta", "thinking": text} if thought else {"type": "text_delta", "text": text}
        document = {"type": "content_block_delta", "index": 0, "delta": delta}
    elif kind == "gemini":
        document = {"candidates": [{"content": {"parts": [{"text": text, "thought": thought}]}}]}
    else:
        document = {"choices": [{"delta": {"reasoning_content" if thought else "content": text}}]}
    return b"data: " + dump(document) + b"\n\n"


@settings(max_examples=40)
@given(conversations())
def test_joining_turns_keeps_their_order_and_text(turns: tuple[Message, ...]) -> None:
    first = system_first(turns)
    assert [t for t in first if t.role != "system"] == [t for t in turns if t.role != "system"]
    assert sum(t.role == "system" for t in first) <= 1
    assert merged(merged(turns)) == merged(turns)
    words = "".join(t.content for t in turns)
    assert "".join(t.content for t in merged(turns)).replace("\n\n", "") == words.replace("\n\n", "")


@given(st.binary(max_size=12))
def test_the_answer_so_far_is_text_or_refused(data: bytes) -> None:
    whole = data + "é".encode()
    assert text_of((Token(0, None, data), Token(1, None, "é".encode()))) == whole.decode("utf-8", "replace")
    with pytest.raises(BadRequest):
        text_of((Token(0, None, b"x" + "é".encode()[:1]),))


@given(st.one_of(st.none(), st.integers(), st.text(), st.dictionaries(st.text(), st.integers() | st.text())))
def test_any_error_object_is_some_error(found: Any) -> None:
    for status in (0, 400, 429, 500):
        assert str(error_from(status, found))
