"""Anthropic's Messages API as JSON and events: answers, events, errors. Parsing is in protocol.anthropic_parse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol import sse
from protocol.errors import (
    BudgetExceeded,
    Full,
    MidstreamError,
    NotAllowed,
    NotFound,
    ProtocolError,
    RateLimited,
    RejectedError,
    TooLarge,
    Unauthenticated,
)
from protocol.openai_wire import dump
from protocol.openai_wire import error_body as openai_error_body
from protocol.text import FinishReason, Usage

Json = dict[str, Any]

_REASONS: Mapping[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def stop_reason(finish: FinishReason, stopped_by: str | None) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`."""
    if stopped_by is not None and finish == "stop":
        return "stop_sequence", stopped_by
    return _REASONS[finish], None


def usage_object(usage: Usage) -> Json:
    """Anthropic counts prompt tokens that were cached apart from the others."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": min(usage.cached_tokens, usage.prompt_tokens),
        "output_tokens": usage.completion_tokens,
    }


def message(id: str, model: str, content: Sequence[Json], usage: Usage) -> Json:
    """A message object, still without a stop reason."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(content),
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_object(usage),
    }


def text_block(text: str) -> Json:
    """A block of text."""
    return {"type": "text", "text": text}


def call_block(id: str, name: str, arguments: Mapping[str, Any]) -> Json:
    """A block with a tool call."""
    return {"type": "tool_use", "id": id, "name": name, "input": dict(arguments)}


def event(document: Json) -> bytes:
    """One event of a stream; its name is the document's type."""
    return sse.event(dump(document), name=str(document["type"]))


def start(index: int, block: Json) -> bytes:
    """A block begins."""
    return event({"type": "content_block_start", "index": index, "content_block": block})


def text_delta(index: int, text: str) -> bytes:
    """More text of a block."""
    return event({"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}})


def arguments_delta(index: int, text: str) -> bytes:
    """More JSON of a call's input."""
    delta = {"type": "input_json_delta", "partial_json": text}
    return event({"type": "content_block_delta", "index": index, "delta": delta})


def stop(index: int) -> bytes:
    """A block is whole."""
    return event({"type": "content_block_stop", "index": index})


def model_object(name: str, created: str) -> Json:
    """One model of GET /v1/models as Anthropic's clients read it. created: RFC 3339."""
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def models_list(names: Sequence[str], created: str) -> Json:
    """GET /v1/models as Anthropic's clients read it: always one page."""
    data = [model_object(name, created) for name in names]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def error_object(err: MidstreamError) -> Json:
    """The error document, as a body and as a stream's last event."""
    return {"type": "error", "error": {"type": _kind(err), "message": str(err)}}


def error_body(err: MidstreamError) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a refusal."""
    status, headers, _ = openai_error_body(err)
    return status, headers, dump(error_object(err))


def _kind(err: MidstreamError) -> str:
    kinds: tuple[tuple[type[MidstreamError], str], ...] = (
        (Unauthenticated, "authentication_error"),
        (NotAllowed, "permission_error"),
        (NotFound, "not_found_error"),
        (TooLarge, "request_too_large"),
        (RateLimited, "rate_limit_error"),
        (BudgetExceeded, "billing_error"),
        (Full, "overloaded_error"),
        (RejectedError, "invalid_request_error"),
        (ProtocolError, "invalid_request_error"),
    )
    return next((name for kind, name in kinds if isinstance(err, kind)), "api_error")
