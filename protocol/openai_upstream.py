"""The client's side of OpenAI's API: bodies for an upstream server, and what its chunks and errors say.

Knows what vLLM, llama-server, Ollama and vendors have in common; a server that sends more is read all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from protocol.decode import load_json
from protocol.errors import (
    BadRequest,
    ContextOverflow,
    EngineError,
    Full,
    LinkError,
    MidstreamError,
    NotAllowed,
    NotFound,
    ProtocolError,
)
from protocol.openai_wire import dump
from protocol.text import FinishReason, Message, Sampling, Usage

MAX_REPLY_BYTES = 16 << 20
MAX_ERROR_CHARS = 500


@frozen
class UpstreamPiece:
    """A token as an upstream reported it in logprobs. `data` is exact when the server sends bytes."""

    data: bytes
    logprob: float | None
    id: int | None = None
    alternatives: tuple[tuple[bytes, float], ...] = ()


@frozen
class UpstreamDelta:
    """One chunk: new text, tokens when the server names them, the end, the usage."""

    text: str = ""
    pieces: tuple[UpstreamPiece, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(factory=dict)


def chat_body(
    model: str,
    messages: Sequence[Message],
    sampling: Sampling,
    *,
    stream: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """Body for POST /v1/chat/completions; usage is always asked for. `extra` adds server-specific fields."""
    document: dict[str, Any] = {"model": model, "messages": [_turn(message) for message in messages]}
    document.update(_sampling_fields(sampling, stream))
    if sampling.logprobs:
        document.update(logprobs=True, top_logprobs=sampling.logprobs)
    return dump({**document, **(extra or {})})


def completion_body(
    model: str,
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    stream: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """Body for POST /v1/completions with a text or token ids as prompt."""
    document: dict[str, Any] = {"model": model, "prompt": prompt if isinstance(prompt, str) else list(prompt)}
    document.update(_sampling_fields(sampling, stream))
    if sampling.logprobs:
        document["logprobs"] = sampling.logprobs
    return dump({**document, **(extra or {})})


def parse_chunk(data: str | bytes) -> UpstreamDelta:
    """Read one chunk, or a whole answer that was not streamed.

    Raises the upstream's error when the chunk carries one, ProtocolError when it is not a chunk.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    document = load_json(raw, what="an upstream chunk", max_bytes=MAX_REPLY_BYTES, max_depth=64)
    if not isinstance(document, dict):
        raise ProtocolError("an upstream chunk must be an object")
    if document.get("error"):
        raise error_from(0, document["error"])
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict):
        raise ProtocolError("a choice must be an object", field="choices[0]")
    delta = choice.get("delta") or choice.get("message") or {}
    if not isinstance(delta, dict):
        raise ProtocolError("a delta must be an object", field="choices[0].delta")
    text = delta.get("content") if delta else choice.get("text")
    calls = delta.get("tool_calls")
    return UpstreamDelta(
        text=text if isinstance(text, str) else "",
        pieces=_pieces(choice.get("logprobs")),
        finish=_finish(choice.get("finish_reason")),
        usage=_usage(document.get("usage")),
        tool_calls=tuple(c for c in calls if isinstance(c, dict)) if isinstance(calls, list) else (),
        token_ids=_ids(choice.get("token_ids")),
        extra={key: document[key] for key in ("midstream", "timings") if key in document},
    )


def error_for(status: int, headers: Mapping[str, str], body: bytes) -> MidstreamError:
    """The error that a reply with status >= 400 stands for."""
    try:
        document = load_json(body, what="an upstream error")
    except MidstreamError:
        document = {}
    found = document.get("error", document) if isinstance(document, dict) else {}
    return error_from(status, found, retry_after_s=_seconds(headers.get("retry-after")))


def error_from(status: int, found: Any, retry_after_s: float | None = None) -> MidstreamError:
    """From an `error` object or text; status 0 when it came inside a stream."""
    fields = found if isinstance(found, dict) else {"message": found}
    text = str(fields.get("message") or f"the upstream answered {status}")[:MAX_ERROR_CHARS]
    code, kind = str(fields.get("code") or ""), str(fields.get("type") or "")
    if "context_length_exceeded" in code or "exceed_context_size" in kind:
        return ContextOverflow(
            prompt_tokens=_count(fields.get("n_prompt_tokens")), context_tokens=_count(fields.get("n_ctx"))
        )
    if status in (429, 503) or kind in ("overloaded_error", "rate_limit_exceeded", "unavailable_error"):
        return Full(text, retry_after_s=retry_after_s or 1.0)
    if status in (401, 403) or kind in ("permission_error", "authentication_error"):
        return NotAllowed(text, next_step="check the API key for this upstream")
    if status == 404 or kind == "not_found_error":
        return NotFound(text, field="model")
    if 400 <= status < 500 or kind == "invalid_request_error":
        param = fields.get("param")
        return BadRequest(text, field=param if isinstance(param, str) else None)
    return LinkError(text) if status in (502, 504) else EngineError(text)


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _sampling_fields(sampling: Sampling, stream: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stream": stream,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.logit_bias:
        fields["logit_bias"] = {str(key): value for key, value in sampling.logit_bias.items()}
    return fields


def _pieces(raw: Any) -> tuple[UpstreamPiece, ...]:
    if not isinstance(raw, dict):
        return ()
    if isinstance(raw.get("content"), list):
        return tuple(_piece(entry) for entry in raw["content"] if isinstance(entry, dict))
    tokens, values = raw.get("tokens"), raw.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(values, list):
        return ()
    pairs = zip(tokens, values, strict=False)
    return tuple(UpstreamPiece(text.encode("utf-8"), _float(v)) for text, v in pairs if isinstance(text, str))


def _piece(entry: Mapping[str, Any]) -> UpstreamPiece:
    others = entry.get("top_logprobs")
    listed = [item for item in others if isinstance(item, dict)] if isinstance(others, list) else []
    id_ = entry.get("id")
    return UpstreamPiece(
        data=_exact(entry),
        logprob=_float(entry.get("logprob")),
        id=id_ if type(id_) is int else None,
        alternatives=tuple((_exact(item), _float(item.get("logprob")) or 0.0) for item in listed),
    )


def _exact(entry: Mapping[str, Any]) -> bytes:
    raw = entry.get("bytes")
    if isinstance(raw, list) and all(type(item) is int and 0 <= item < 256 for item in raw):
        return bytes(raw)
    text = entry.get("token")
    return text.encode("utf-8", "replace") if isinstance(text, str) else b""


def _float(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:  # a whole number that no float holds
        return None


def _finish(raw: Any) -> FinishReason | None:
    if raw in (None, ""):
        return None
    known: dict[str, FinishReason] = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}
    return known.get(str(raw), "stop")


def _usage(raw: Any) -> Usage | None:
    if not isinstance(raw, dict):
        return None
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(raw.get("prompt_tokens")), _count(raw.get("completion_tokens")), _count(cached))


def _ids(raw: Any) -> tuple[int, ...]:
    return tuple(item for item in raw if type(item) is int) if isinstance(raw, list) else ()


def _count(raw: Any) -> int:
    return raw if type(raw) is int and raw >= 0 else 0


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isascii() and text.isdigit() and len(text) < 7 else None
