"""Errors cross the wire and come back as the same class."""

from __future__ import annotations

import pytest

from protocol.errors import (
    BadRequest,
    ContextOverflow,
    EngineCrashed,
    EngineError,
    Full,
    LinkClosed,
    LinkTimeout,
    Loading,
    MidstreamError,
    NotAllowed,
    NotFound,
    ProtocolError,
    TooLarge,
    Unsupported,
)
from protocol.handoff import Refuse, decode_body, encode_body
from protocol.refusals import MAX_MESSAGE_CHARS, as_error, refusal

ERRORS: list[MidstreamError] = [
    BadRequest("a", field="x"), NotAllowed("a"), NotFound("a", field="model"), TooLarge("a"), Unsupported("a"),
    EngineError("a"), EngineCrashed("a"), LinkClosed("a"), LinkTimeout("a"), ProtocolError("a", field="f"),
    Full("a", retry_after_s=2.5), Loading("a", retry_after_s=3.5), ContextOverflow(prompt_tokens=9, context_tokens=8),
]  # fmt: skip


@pytest.mark.parametrize("err", ERRORS, ids=lambda e: type(e).__name__)
def test_the_class_and_its_numbers_survive(err: MidstreamError) -> None:
    frame = decode_body(*encode_body(refusal(err)))
    assert isinstance(frame, Refuse)
    found = as_error(frame)
    assert type(found) is type(err)
    assert (found.message, found.field) == (err.message, err.field)
    for name in ("retry_after_s", "prompt_tokens", "context_tokens"):
        assert getattr(found, name, None) == getattr(err, name, None)


def test_an_unknown_code_means_that_another_engine_may_do_it() -> None:
    assert type(as_error(Refuse("from_the_future"))) is EngineError


def test_long_messages_are_cut() -> None:
    assert len(refusal(EngineError("x" * 5000)).message) == MAX_MESSAGE_CHARS
    assert len(as_error(Refuse("z", "x" * 5000)).message) == MAX_MESSAGE_CHARS
