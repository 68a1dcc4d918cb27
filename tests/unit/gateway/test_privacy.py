"""The privacy step: what stays on the device, what a remote target sees, what comes back."""

from __future__ import annotations

import json

import pytest

from gateway.chat_texts import joined, texts
from gateway.context import Caller
from gateway.ports import Findings
from gateway.privacy import PrivacyGuard
from protocol.chat import ChatRequest, tool_call, tool_definition
from protocol.policy import Policy, PrivacyPolicy
from protocol.text import ImagePart, Message, TextPart

LOCAL = Caller()
GUARD = PrivacyGuard(secret=b"k" * 32)


def chat(*contents: str, **more: object) -> ChatRequest:
    return ChatRequest("m", tuple(Message("user", content) for content in contents), **more)  # type: ignore[arg-type]


def inspect(request: ChatRequest, caller: Caller = LOCAL, **privacy: object) -> Findings:
    return GUARD.inspect(request, caller, Policy(privacy=PrivacyPolicy(**privacy)))  # type: ignore[arg-type]


def test_a_plain_request_has_no_findings() -> None:
    assert inspect(chat("what is the capital of France?")) == Findings()


@pytest.mark.parametrize(
    "request_",
    [
        chat("one", "two"),
        ChatRequest("m", "a text"),
        ChatRequest("m", (1, 2)),
        ChatRequest("m", (Message("user", "hi", name="ann"), Message("user", "there"))),
        ChatRequest("m", (Message("assistant", "", tool_calls=(tool_call("c", "f", '{"to": "bob"}'),)),)),
        chat("hi", tools=(tool_definition("f", "about f", None),)),
        chat("hi", response_format={"type": "json_object"}),
    ],
)
def test_texts_as_one_are_all_texts(request_: ChatRequest) -> None:
    assert joined(request_) == "\n".join(text for _, text in texts(request_))


def test_policy_keeps_everything_on_the_device() -> None:
    found = inspect(chat("hello"), local_only=True)
    assert found.local_only and "local_only" in found.reason


@pytest.mark.parametrize(("labels", "stays"), [({"data": "secret"}, True), ({"data": "open"}, False), ({}, False)])
def test_a_label_keeps_a_request_on_the_device(labels: dict[str, str], stays: bool) -> None:
    found = inspect(chat("hello"), Caller(labels=labels), local_only_labels={"data": ("secret", "internal")})
    assert found.local_only is stays
    assert inspect(chat("hello"), Caller(labels=labels), local_only_labels={"data": ("*",)}).local_only is bool(labels)


def test_a_kind_keeps_a_request_on_the_device() -> None:
    request = chat("my card is 4111111111111111")
    assert inspect(request, local_only_kinds=("card",)).local_only
    assert not inspect(request, local_only_kinds=("iban",)).local_only
    assert inspect(ChatRequest("m", (1, 2, 3), endpoint="completion"), local_only_kinds=("iban",)).local_only


def test_an_image_stays_where_policy_says_so() -> None:
    picture = Message("user", "see", parts=(TextPart("see"), ImagePart("image/png", b"x")))
    request = ChatRequest("m", (picture,))
    assert inspect(request, images_leave=False).local_only
    assert not inspect(request).local_only


def test_a_text_with_values_is_embedded_here() -> None:
    assert inspect(ChatRequest("m", "a@b.com", endpoint="embedding")).local_only
    assert not inspect(ChatRequest("m", "hello", endpoint="embedding")).local_only


def test_every_text_of_a_request_is_redacted_and_the_rest_is_kept() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"to": "a\\u0040b.com", "n": 3}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"to": "a@b.com'}}
    long = {"id": "c3", "type": "function", "function": {"name": "f", "arguments": '{"phone": 13812345678}'}}
    plain = {"id": "c4", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
    request = ChatRequest(
        "m",
        (
            Message("system", "be kind to a@b.com"),
            Message("assistant", "", tool_calls=(call, broken, long, plain)),
            Message("tool", '{"mail": "c@d.org"}', tool_call_id="c1"),
            Message("user", "see x@y.com", parts=(TextPart("see x@y.com"), ImagePart("image/png", b"\0"))),
        ),
        tools=({"type": "function", "function": {"name": "f", "description": "like e@f.net"}},),
        response_format={"type": "json_schema", "json_schema": {"schema": {"const": "g@h.net"}}},
        stop=("a@b.com", "END"),
    )
    found = inspect(request)
    assert not found.local_only
    assert found.counts == {"email": 7, "phone": 1}
    left = GUARD.redact(request, found)
    seen = repr(left.chat)
    for value in ("a@b.com", "\\u0040", "c@d.org", "x@y.com", "e@f.net", "g@h.net", "13812345678"):
        assert value not in seen
    assert left.chat.stop[1] == "END" and left.chat.stop[0].startswith("EMAIL_")
    messages = left.chat.messages
    assert messages[1].tool_calls[3] == plain
    assert json.loads(messages[1].tool_calls[0]["function"]["arguments"])["n"] == 3
    assert messages[3].parts[1] == ImagePart("image/png", b"\0")
    assert messages[3].content == messages[3].parts[0].text  # type: ignore[union-attr]
    assert left.restorer is not None
    said = f"write to {left.chat.stop[0]}, now"
    assert left.restorer.feed(said) + left.restorer.flush() == "write to a@b.com, now"


def test_a_request_without_findings_leaves_as_it_is() -> None:
    request = chat("hello")
    left = GUARD.redact(request, inspect(request))
    assert left.chat is request and left.restorer is None


def test_values_are_not_in_findings_nor_in_their_counts() -> None:
    found = inspect(chat("a@b.com and 13812345678"), Caller(tenant="t", conversation_id="c"))
    assert "a@b.com" not in repr(found) and "138" not in repr(found)
    assert found.counts == {"email": 1, "phone": 1}


def test_a_new_policy_counts_at_once() -> None:
    request = chat("a@b.com")
    assert inspect(request).spans
    assert not inspect(request, redact_kinds=()).spans
