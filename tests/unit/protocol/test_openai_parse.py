"""OpenAI request bodies: what is taken, what is refused and by which name."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.chat import ChatRequest, answer_schema, prompt_bytes
from protocol.errors import BadRequest, MidstreamError, TooLarge, Unsupported
from protocol.images import MAX_IMAGES, data_url
from protocol.openai_parse import (
    DEFAULT_MAX_TOKENS,
    MAX_BIASES,
    MAX_EMBEDDING_TEXTS,
    MAX_MESSAGES,
    MAX_PROMPT_IDS,
    MAX_STOP_CHARS,
    parse_chat,
    parse_completion,
    parse_embeddings,
)
from protocol.request_fields import MAX_BODY_BYTES
from protocol.text import ImagePart, Message, TextPart

USER = {"role": "user", "content": "hi"}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def image(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def test_the_defaults_are_those_of_the_api() -> None:
    request = chat()
    assert request.messages == (Message("user", "hi"),)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (1.0, 1.0, None)
    assert request.sampling.max_tokens == DEFAULT_MAX_TOKENS
    assert (request.stream, request.include_usage, request.stop, request.want_logprobs) == (False, False, (), False)


def test_every_supported_field_arrives() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        seed=7,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=3,
        logit_bias={"12": -100},
        user="u",
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        response_format={"type": "text"},
        metadata={"unknown": True},
    )
    assert request.sampling.max_tokens == 5
    assert request.sampling.logit_bias == {12: -100.0}
    assert (request.sampling.seed, request.sampling.top_p, request.sampling.temperature) == (7, 0.5, 0.0)
    assert (request.sampling.logprobs, request.want_logprobs, request.top_logprobs) == (3, True, 3)
    assert (request.stream, request.include_usage, request.stop, request.user) == (True, True, ("a", "b"), "u")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "stream": True},
        {"max_tokens": None, "temperature": None, "stream": False},
        {"temperature": 3},
        {"max_tokens": 0},
        {"stream": 1},
        {"model": ""},
        {"messages": []},
    ],
)
def test_a_plain_body_is_read_as_one_with_a_field_that_says_nothing(fields: dict[str, Any]) -> None:
    def read(more: dict[str, Any]) -> ChatRequest | str:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields, **more}
        try:
            return parse_chat(json.dumps(body).encode())
        except BadRequest as err:
            return f"{err} {err.field}"

    assert read({}) == read({"seed": None})


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).sampling.max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=None).sampling.max_tokens == 5


def test_null_is_absent() -> None:
    names = ("stop", "n", "temperature", "logprobs", "tools", "stream_options", "logit_bias", "response_format", "seed")
    assert chat(**dict.fromkeys(names)) == chat()


def test_logprobs_without_alternatives_still_ask_the_engine_for_one() -> None:
    request = chat(logprobs=True)
    assert (request.sampling.logprobs, request.top_logprobs) == (1, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"functions": []}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [image("data:image/png;base64,aGVsbG8=")]}, "messages[0].content[0].image_url.url"),
        ({"messages": [image("file:///etc/passwd")]}, "messages[0].content[0].image_url.url"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as caught:
        chat(**fields)
    assert caught.value.field == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"model": "x" * 257}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": "x", "name": 1}]}, "messages[1].name"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"tools": {}}, "tools"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a")], "tool_choice": "b"}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("a")], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [image("data:image/png;base64,%")]}, "messages[0].content[0].image_url.url"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.field == param


@pytest.mark.parametrize("model", [None, "", 3])
def test_who_names_no_model_is_told_where_the_names_are(model: object) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(model=model)
    assert (caught.value.field, "GET /v1/models" in caught.value.next_step) == ("model", True)


def test_values_at_their_bounds_are_taken() -> None:
    assert chat(temperature=2, top_p=1, seed=2**63 - 1, logprobs=True, top_logprobs=20).top_logprobs == 20
    assert len(chat(stop=["x" * MAX_STOP_CHARS] * 4).stop) == 4
    assert len(chat(messages=[USER] * MAX_MESSAGES).messages) == MAX_MESSAGES
    with pytest.raises(TooLarge):
        chat(messages=[USER] * (MAX_MESSAGES + 1))
    assert len(chat(logit_bias={str(n): 0 for n in range(MAX_BIASES)}).sampling.logit_bias) == MAX_BIASES
    with pytest.raises(TooLarge):
        chat(logit_bias={str(n): 0 for n in range(MAX_BIASES + 1)})


def test_roles_parts_and_tool_turns() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = chat(
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ]
    )
    assert [m.role for m in request.messages] == ["system", "user", "assistant", "tool"]
    assert [m.content for m in request.messages] == ["rules", "a\nb", "", "42"]
    assert request.messages[1].name == "ann"
    assert request.messages[2].tool_calls == (call,)
    assert request.messages[3].tool_call_id == "c1"


def test_tools_and_formats_arrive_in_one_form() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    request = chat(
        tools=[tool("weather", schema), tool("time")],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert request.tool_names == ("weather", "time")
    assert request.tools[0]["function"]["parameters"] == schema
    assert request.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert (request.tool_choice, request.parallel_tool_calls) == ("function:weather", False)
    assert request.response_format is not None
    assert answer_schema(request.response_format) == schema
    sent = request.text_request()
    assert (sent.tools, sent.tool_choice, sent.response_format) == (
        request.tools,
        "function:weather",
        request.response_format,
    )


def test_tools_that_must_not_be_used_are_no_obstacle() -> None:
    assert chat(tools=[tool("a")], tool_choice="none").tools == ()


def test_pictures_keep_their_place_among_the_texts() -> None:
    png = b"\x89PNG\r\n\x1a\n..."
    url = "data:image/jpeg;base64," + base64.b64encode(png).decode()
    parts = [{"type": "text", "text": "what is"}, *image(url)["content"], {"type": "text", "text": "this?"}]
    request = chat(messages=[{"role": "user", "content": parts}, image("https://example.org/a.png"), USER])
    first, second, third = request.messages
    assert first.content == "what is\nthis?"
    assert first.parts == (TextPart("what is"), ImagePart("image/png", png), TextPart("this?"))
    assert second.parts == (ImagePart(url="https://example.org/a.png"),)
    assert (third.parts, request.has_images) == ((), True)
    assert data_url(first.parts[1]) == "data:image/png;base64," + base64.b64encode(png).decode()  # type: ignore[arg-type]
    with pytest.raises(TooLarge):
        chat(messages=[image("https://example.org/a.png")] * (MAX_IMAGES + 1))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"\xff", b'"x"', b'{"model":"m","messages":' + b"[" * 999 + b"]" * 999 + b"}"]
)
def test_bodies_that_are_no_object(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_chat(body)


def test_an_oversized_body() -> None:
    with pytest.raises(TooLarge):
        parse_chat(b" " * (MAX_BODY_BYTES + 1))


class TestCompletion:
    """The older endpoint."""

    def test_text_and_ids(self) -> None:
        assert completion(prompt="once").prompt == "once"
        assert completion(prompt=["once"]).prompt == "once"
        assert completion(prompt=[1, 2]).prompt == (1, 2)
        assert completion(prompt=[[1, 2]]).prompt == (1, 2)
        assert completion().messages == ()

    @pytest.mark.parametrize("prompt", ["", [], None, 3, [1, "a"], [-1], [True], {"a": 1}, [2**31]])
    def test_no_prompt(self, prompt: Any) -> None:
        with pytest.raises(BadRequest):
            completion(prompt=prompt)

    def test_ids_at_the_bound(self) -> None:
        body = {"model": "m", "prompt": [1] * MAX_PROMPT_IDS}
        assert len(parse_completion(body).prompt) == MAX_PROMPT_IDS
        with pytest.raises(TooLarge):
            parse_completion({"model": "m", "prompt": [1] * (MAX_PROMPT_IDS + 1)})

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"echo": True}, "echo"),
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 2}, "best_of"),
            ({"n": 3}, "n"),
        ],
    )
    def test_what_cannot_be_honoured(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(Unsupported) as caught:
            completion(**fields)
        assert caught.value.field == param

    def test_harmless_values(self) -> None:
        assert completion(echo=False, best_of=1, suffix="").prompt == "p"

    def test_logprobs_is_a_number_here(self) -> None:
        assert completion(logprobs=0).sampling.logprobs == 1
        assert completion(logprobs=4).top_logprobs == 4
        assert not completion().want_logprobs
        with pytest.raises(BadRequest):
            completion(logprobs=True)


class TestEmbeddings:
    """Texts in, vectors out."""

    def test_one_and_many(self) -> None:
        assert parse_embeddings({"model": "m", "input": "a"}).texts == ("a",)
        found = parse_embeddings({"model": "m", "input": ["a", "b"], "encoding_format": "base64"})
        assert (found.texts, found.base64) == (("a", "b"), True)

    @pytest.mark.parametrize(
        "fields",
        [{}, {"input": []}, {"input": [1]}, {"input": ""}, {"input": ["a"] * (MAX_EMBEDDING_TEXTS + 1)},
         {"input": "a", "encoding_format": "hex"}, {"input": "\ud800"}],
    )  # fmt: skip
    def test_bad_input(self, fields: dict[str, Any]) -> None:
        with pytest.raises(BadRequest):
            parse_embeddings({"model": "m", **fields})

    def test_dimensions(self) -> None:
        with pytest.raises(Unsupported):
            parse_embeddings({"model": "m", "input": "a", "dimensions": 8})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    "model", "messages", "prompt", "input", "stop", "n", "seed", "logprobs", "top_logprobs", "logit_bias", "tools",
    "stream_options", "max_tokens", "temperature", "response_format", "tool_choice", "user", "modalities",
]  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_object_gives_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    for base in ({}, {"model": "m", "messages": [USER], "prompt": "p", "input": "i"}):
        for parse in (parse_chat, parse_completion, parse_embeddings):
            try:
                parse({**base, **body})
            except MidstreamError as err:
                assert err.http_status in (400, 413)


def test_prompt_sizes() -> None:
    assert prompt_bytes("ä") == 2
    assert prompt_bytes((1, 2)) == 8
    assert prompt_bytes((Message("user", "abc"), Message("user", "ä"))) == 5
