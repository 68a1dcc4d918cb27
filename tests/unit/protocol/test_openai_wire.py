"""Answers as the unmodified openai client reads them, errors, and the way back from an upstream."""

from __future__ import annotations

import base64
import importlib
import json
import struct
from typing import Any

import pytest

from protocol import sse
from protocol.chat import ChatRequest
from protocol.errors import (
    BadRequest,
    ContextOverflow,
    EngineCrashed,
    EngineError,
    Full,
    LinkError,
    LinkTimeout,
    MidstreamError,
    NotAllowed,
    NotFound,
    ProtocolError,
)
from protocol.openai_upstream import OpenAICodec, parse_chunk
from protocol.openai_wire import (
    AnswerHead,
    chunk,
    data_event,
    dump,
    embeddings_response,
    error_body,
    error_event,
    head_for,
    logprobs_object,
    models_list,
    parse_chat,
    response,
    usage_chunk,
)
from protocol.text import Message, Sampling, TextRequest, Token, Usage
from protocol.upstream import error_for

CHAT = AnswerHead("id1", "m", 5)
TEXT = AnswerHead("id1", "m", 5, "completion")
USAGE = Usage(3, 2, cached_tokens=1)
# An emoji split over two tokens: each piece alone is no character.
TOKENS = (
    Token(0, 1, "😀".encode()[:2], logprob=-0.5, alternatives=((b"a", -0.5), (b"b", -2.0))),
    Token(1, 2, "😀".encode()[2:], logprob=-float("inf"), alternatives=((b"c", -0.1),)),
    Token(2, 3, b"", finish="stop"),
)


class TestStockClient:
    """The types of the unmodified openai package, checked strictly."""

    def test_chat(self) -> None:
        types = importlib.import_module("openai.types.chat")
        logprobs = logprobs_object("chat", TOKENS, 2)
        whole = response(CHAT, "😀", "stop", USAGE, logprobs=logprobs, extra={"midstream": {"side": "device"}})
        found = types.ChatCompletion.model_validate_json(dump(whole), strict=True)
        assert found.choices[0].message.content == "😀"
        assert found.usage.total_tokens == 5
        assert found.usage.prompt_tokens_details.cached_tokens == 1
        entries = found.choices[0].logprobs.content
        assert b"".join(bytes(e.bytes) for e in entries).decode() == "😀"
        assert [len(e.top_logprobs) for e in entries] == [2, 1]
        assert entries[1].logprob == -9999.0

    def test_chat_chunks(self) -> None:
        types = importlib.import_module("openai.types.chat")
        first = types.ChatCompletionChunk.model_validate_json(dump(chunk(CHAT, "", role=True)), strict=True)
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        last = types.ChatCompletionChunk.model_validate_json(dump(chunk(CHAT, finish="length")), strict=True)
        assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
        usage = types.ChatCompletionChunk.model_validate_json(dump(usage_chunk(CHAT, USAGE)), strict=True)
        assert (usage.choices, usage.usage.completion_tokens) == ([], 2)

    def test_completions(self) -> None:
        types = importlib.import_module("openai.types")
        logprobs = logprobs_object("completion", TOKENS, 1)
        whole = response(TEXT, "😀", "stop", USAGE, logprobs=logprobs)
        found = types.Completion.model_validate_json(dump(whole), strict=True)
        assert found.choices[0].text == "😀"
        assert found.choices[0].logprobs.text_offset[0] == 0
        part = types.Completion.model_validate_json(dump(chunk(TEXT, "x", finish="stop")), strict=True)
        assert part.choices[0].text == "x"

    def test_models_and_embeddings(self) -> None:
        types = importlib.import_module("openai.types")
        listed = models_list([("m", "midstream", 5)])
        assert types.Model.model_validate(listed["data"][0], strict=True).id == "m"
        found = types.CreateEmbeddingResponse.model_validate(embeddings_response("m", [[0.5, 1.0]], 3, False))
        assert found.data[0].embedding == [0.5, 1.0]
        packed = embeddings_response("m", [[0.5, 1.0]], 3, True)["data"][0]["embedding"]
        assert struct.unpack("<2f", base64.b64decode(packed)) == (0.5, 1.0)


def test_legacy_logprobs_have_no_alternatives_unless_asked() -> None:
    assert logprobs_object("completion", TOKENS, 0)["top_logprobs"] is None
    assert logprobs_object("completion", TOKENS, 0, text_offset=7)["text_offset"][0] == 7


def test_usage_null_marks_that_usage_will_come() -> None:
    assert chunk(CHAT, "x", null_usage=True)["usage"] is None
    assert "usage" not in chunk(CHAT, "x")


def test_a_head_follows_its_request() -> None:
    head = head_for(ChatRequest("m", "p", endpoint="completion"), "i", 9, "fp")
    assert chunk(head, "x")["object"] == "text_completion"
    assert chunk(head, "x")["system_fingerprint"] == "fp"


def test_an_event_has_one_line_of_json() -> None:
    event = data_event(chunk(CHAT, "two\nlines\r"))
    assert event.count(b"\n") == 2
    assert json.loads(sse.SseParser().feed(event)[0].data)["choices"][0]["delta"]["content"] == "two\nlines\r"


@pytest.mark.parametrize(
    ("err", "status", "kind", "code"),
    [
        (BadRequest("x", field="stop"), 400, "invalid_request_error", "invalid_value"),
        (NotFound("x"), 404, "not_found_error", "model_not_found"),
        (NotAllowed("x"), 403, "permission_error", "not_allowed"),
        (Full("x", retry_after_s=3), 503, "overloaded_error", "over_capacity"),
        (EngineCrashed("x"), 503, "server_error", "engine_crashed"),
        (LinkTimeout("x"), 504, "server_error", "upstream_timeout"),
        (ProtocolError("x"), 400, "invalid_request_error", "protocol_error"),
    ],
)
def test_errors_have_status_type_and_code(err: MidstreamError, status: int, kind: str, code: str) -> None:
    found_status, headers, body = error_body(err)
    found = json.loads(body)["error"]
    assert (found_status, found["type"], found["code"], found["param"]) == (status, kind, code, err.field)
    assert headers.get("retry-after") == ("3" if isinstance(err, Full) else None)


def test_an_overflow_speaks_both_dialects() -> None:
    """O1: an over-long prompt is refused with its numbers, never cut at its front."""
    status, _, body = error_body(ContextOverflow(prompt_tokens=900, context_tokens=512))
    found = json.loads(body)["error"]
    assert (status, found["code"], found["type"]) == (400, "context_length_exceeded", "exceed_context_size_error")
    assert (found["n_prompt_tokens"], found["n_ctx"]) == (900, 512)


def test_a_cut_stream_ends_with_an_error_and_no_done() -> None:
    """S2: truncated must be distinguishable from complete."""
    events = sse.SseParser().feed(data_event(chunk(CHAT, "x")) + error_event(LinkError("gone")))
    assert json.loads(events[-1].data)["error"]["code"] == "upstream_error"
    assert not any(event.done for event in events)


def test_half_a_surrogate_pair_never_breaks_an_answer() -> None:
    """JSON escapes can say it; a refusal that names such a field must still be sendable."""
    with pytest.raises(BadRequest) as caught:
        parse_chat(b'{"model":"m","messages":[{"role":"user","content":"x"}],"logit_bias":{"\\ud800":1}}')
    body = error_body(caught.value)[2]
    assert json.loads(body.decode("utf-8"))["error"]["param"] == "logit_bias.\ud800"
    calls = ({"id": "\ud800"},)
    request = TextRequest("m", [Message("assistant", "", tool_calls=calls)])
    assert json.loads(OpenAICodec().call("m", request, stream=True).body)


class TestUpstream:
    """What we ask of other servers, and what we make of their answers."""

    def test_bodies_always_ask_for_usage(self) -> None:
        sampling = Sampling(seed=3, max_tokens=7, logprobs=2, logit_bias={5: 1.0})
        codec = OpenAICodec()

        def sent(prompt: Any, stream: bool = True) -> Any:
            return json.loads(codec.call("m", TextRequest("m", prompt, sampling), stream=stream).body)

        body = sent([Message("user", "hi", name="ann")])
        assert body["stream_options"] == {"include_usage": True}
        assert (body["seed"], body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (3, 7, True, 2)
        assert body["logit_bias"] == {"5": 1.0}
        assert body["messages"] == [{"role": "user", "content": "hi", "name": "ann"}]
        assert sent((1, 2), stream=False)["prompt"] == [1, 2]
        assert "stream_options" not in sent("p", stream=False)

    def test_our_own_chunks_come_back(self) -> None:
        logprobs = logprobs_object("chat", TOKENS[:1], 2)
        found = parse_chunk(dump(chunk(CHAT, "x", finish="length", logprobs=logprobs)))
        assert (found.text, found.finish) == ("x", "length")
        assert (found.pieces[0].data, found.pieces[0].logprob) == (TOKENS[0].data, -0.5)
        assert found.pieces[0].alternatives == TOKENS[0].alternatives
        assert parse_chunk(dump(usage_chunk(CHAT, USAGE))).usage == USAGE
        legacy = parse_chunk(dump(chunk(TEXT, "y", logprobs=logprobs_object("completion", TOKENS[:1], 0))))
        assert (legacy.text, legacy.pieces[0].logprob) == ("y", -0.5)
        whole = parse_chunk(dump(response(CHAT, "all", "stop", USAGE)))
        assert (whole.text, whole.finish, whole.usage) == ("all", "stop", USAGE)

    @pytest.mark.parametrize(
        "data",
        [
            '{"choices":[]}',
            "{}",
            '{"choices":null}',
            '{"choices":[{"delta":{}}]}',
            '{"choices":[{"delta":{"content":null}}]}',
            '{"choices":[{"finish_reason":"","delta":{"content":3},"logprobs":{"content":[1,{"token":2}]}}],"usage":{"x":1}}',
        ],
    )
    def test_chunks_that_say_little(self, data: str) -> None:
        assert parse_chunk(data).text == ""

    @pytest.mark.parametrize("data", ["", "[]", "x", '{"choices":["x"]}', '{"choices":[{"delta":"x"}]}'])
    def test_chunks_that_are_none(self, data: str) -> None:
        with pytest.raises(ProtocolError):
            parse_chunk(data)

    @pytest.mark.parametrize(
        ("finish", "want"),
        [("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls"), ("eos", "stop"), (None, None)],
    )
    def test_finish_reasons(self, finish: str | None, want: str | None) -> None:
        assert parse_chunk(dump({"choices": [{"text": "", "finish_reason": finish}]})).finish == want

    @pytest.mark.parametrize(
        ("status", "body", "family"),
        [
            (429, b'{"error":{"message":"slow down"}}', Full),
            (503, b"", Full),
            (401, b"{}", NotAllowed),
            (404, b'{"error":"no such model"}', NotFound),
            (400, b'{"error":{"message":"x","param":"stop"}}', BadRequest),
            (400, b'{"error":{"type":"exceed_context_size_error","n_prompt_tokens":9,"n_ctx":8}}', ContextOverflow),
            (400, b'{"error":{"code":"context_length_exceeded"}}', ContextOverflow),
            (500, b"<html>", EngineError),
            (502, b"<html>", LinkError),
        ],
    )
    def test_replies_become_errors(self, status: int, body: bytes, family: type[MidstreamError]) -> None:
        found = error_for(status, {"retry-after": "7"}, body)
        assert type(found) is family
        if isinstance(found, Full):
            assert found.retry_after_s == 7.0

    def test_an_error_inside_a_stream_is_raised(self) -> None:
        """S4: an overload that comes in-band is an error like any other, so a fallback can start."""
        with pytest.raises(Full):
            parse_chunk('{"error":{"type":"overloaded_error","message":"busy"}}')
        with pytest.raises(ContextOverflow):
            parse_chunk(sse.SseParser().feed(error_event(ContextOverflow(prompt_tokens=2, context_tokens=1)))[0].data)

    def test_overflow_numbers_survive(self) -> None:
        _, headers, body = error_body(ContextOverflow(prompt_tokens=9, context_tokens=8))
        found: Any = error_for(400, headers, body)
        assert (found.prompt_tokens, found.context_tokens) == (9, 8)


def test_a_log_probability_that_no_float_holds_is_none() -> None:
    entry = {"token": "x", "logprob": 10**400, "top_logprobs": [{"token": "y", "logprob": -(10**400)}]}
    found = parse_chunk(json.dumps({"choices": [{"text": "x", "logprobs": {"content": [entry]}}]}))
    assert [piece.logprob for piece in found.pieces] == [None]
