"""Bodies of all front doors: whatever JSON comes in, a request or a refusal that names its field comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.context import LOCAL
from gateway.naming import MAX_CHARS, MAX_LABELS, named
from protocol import anthropic_parse, ollama_parse, openai_parse
from protocol.errors import BadRequest, MidstreamError

PARSERS: dict[str, Callable[[Any], Any]] = {
    "chat": openai_parse.parse_chat,
    "completion": openai_parse.parse_completion,
    "embeddings": openai_parse.parse_embeddings,
    "messages": anthropic_parse.parse_messages,
    "ollama chat": ollama_parse.parse_chat,
    "generate": ollama_parse.parse_generate,
    "embed": ollama_parse.parse_embed,
}
KEYS = (
    "model", "messages", "prompt", "input", "role", "content", "type", "text", "source", "data", "url", "tools", "name",
    "function", "parameters", "input_schema", "tool_choice", "tool_calls", "arguments", "id", "tool_use_id", "options",
    "num_predict", "stop", "stop_sequences", "system", "max_tokens", "images", "image_url", "format", "stream",
    "metadata", "user", "intent", "conversation_id", "response_format", "json_schema", "schema", "thinking", "top_k",
)  # fmt: skip
WORDS = (
    "m", "user", "assistant", "tool", "system", "text", "image", "tool_use", "tool_result", "function", "base64", "url",
    "auto", "any", "required", "none", "json", "json_object", "json_schema", "object", "image_url", "custom",
    "", "\ud800", "data:image/png;base64,iVBORw0KGgo=", "iVBORw0KGgo=",
)  # fmt: skip
leaves = st.none() | st.booleans() | st.integers(-2, 3) | st.floats(allow_nan=False) | st.sampled_from(WORDS)
documents = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=25,
)
turn = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": documents})
bodies = st.dictionaries(st.sampled_from(KEYS), documents, max_size=8).flatmap(
    lambda more: st.fixed_dictionaries({"model": st.just("m"), "max_tokens": st.just(3)}).map(
        lambda base: {**base, **more}
    )
)


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS)
@settings(max_examples=40)
@example({"model": "m", "max_tokens": 3, "tool_choice": {"type": []}}, [{"role": "user", "content": "x"}])
@given(body=bodies, turns=st.none() | st.lists(turn, min_size=1, max_size=3))
def test_any_json_is_a_request_or_a_refusal(parse: Callable[[Any], Any], body: dict[str, Any], turns: Any) -> None:
    if turns is not None:
        body = {**body, "messages": turns}
    try:
        parse(body)
    except MidstreamError as err:
        assert err.http_status in (400, 413)
        assert err.message


@settings(max_examples=40)
@given(body=bodies)
def test_any_json_names_somebody_or_is_refused(body: dict[str, Any]) -> None:
    try:
        caller = named(LOCAL, {}, body)
    except BadRequest as err:
        assert err.field
        return
    texts = (caller.user, caller.conversation_id, caller.intent, *caller.labels, *caller.labels.values())
    assert all(text is None or len(text) <= MAX_CHARS for text in texts)


def test_names_are_bounded_and_headers_win() -> None:
    body = {"user": "u", "metadata": {"intent": "i", "team": 7}}
    assert named(LOCAL, {}, body) == evolve(LOCAL, user="u", intent="i", labels={"team": "7"})
    headers = {"x-midstream-user": "h", "x-midstream-labels": "team=blue, a = b ,nonsense,=x"}
    assert named(LOCAL, headers, body) == evolve(LOCAL, user="h", intent="i", labels={"team": "blue", "a": "b"})
    assert named(LOCAL, {"host": "x"}, {"user": None}) is LOCAL
    for wrong in (
        {"user": "x" * (MAX_CHARS + 1)},
        {"metadata": []},
        {"metadata": {str(n): n for n in range(MAX_LABELS + 1)}},
    ):
        with pytest.raises(BadRequest):
            named(LOCAL, {}, wrong)


def test_results_of_ollamas_clients_find_their_calls() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    other = {"function": {"name": "g", "arguments": {}}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "tool_name": "g", "content": "second"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "tool_name": "nobody", "content": "lost"},
    ]
    read = ollama_parse.parse_chat({"model": "m:latest", "messages": turns})
    ids = [c["id"] for c in read.messages[1].tool_calls]
    assert [turn.tool_call_id for turn in read.messages[2:]] == [ids[1], ids[0], "nobody"]
    assert json.loads(read.messages[1].tool_calls[0]["function"]["arguments"]) == {"a": 1}
    assert (read.model, read.stream) == ("m", True)
