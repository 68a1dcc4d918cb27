"""OpenAI's API as JSON: answers, chunks, usage, logprobs, model lists, errors. Parsing is in protocol.openai_parse.

Texts here are whole characters; cutting token bytes into characters is the stream owner's work. `created_s` is wall
seconds. `extra` adds fields of ours beside the standard ones (which side made a token).
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from attrs import frozen

from protocol import sse
from protocol.chat import ChatRequest, Endpoint
from protocol.errors import (
    BadRequest,
    BudgetExceeded,
    ContextOverflow,
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
from protocol.openai_parse import parse_chat, parse_completion, parse_embeddings
from protocol.text import CallDelta, Token, Usage

__all__ = [
    "AnswerHead", "chunk", "data_event", "dump", "embeddings_response", "error_body", "error_event", "error_object",
    "head_for", "logprobs_object", "models_list", "parse_chat", "parse_completion", "parse_embeddings", "response",
    "usage_chunk", "usage_object",
]  # fmt: skip

Json = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


@frozen
class AnswerHead:
    """What all chunks of one answer share."""

    id: str
    model: str
    created_s: int
    endpoint: Endpoint = "chat"
    fingerprint: str | None = None


def head_for(request: ChatRequest, id: str, created_s: int, fingerprint: str | None = None) -> AnswerHead:
    """The head of the answer to `request`."""
    return AnswerHead(id, request.model, created_s, request.endpoint, fingerprint)


def chunk(
    head: AnswerHead,
    text: str | None = None,
    *,
    role: bool = False,
    calls: Sequence[CallDelta] = (),
    finish: str | None = None,
    logprobs: Json | None = None,
    null_usage: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Json:
    """One streamed chunk. role: the first delta of a chat. null_usage: the client asked for usage, which comes last."""
    choice: Json = {"index": 0}
    if head.endpoint == "chat":
        delta: Json = {"role": "assistant"} if role else {}
        if text is not None:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        choice["delta"] = delta
    else:
        choice["text"] = text or ""
    choice["logprobs"] = logprobs
    choice["finish_reason"] = finish
    kind = "chat.completion.chunk" if head.endpoint == "chat" else "text_completion"
    document = _document(head, kind, [choice], extra)
    if null_usage:
        document["usage"] = None
    return document


def _call_delta(call: CallDelta) -> Json:
    """Id, type and name once, with empty arguments; then arguments alone."""
    if call.id:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def usage_chunk(head: AnswerHead, usage: Usage, extra: Mapping[str, Any] | None = None) -> Json:
    """The chunk after the last choice and before [DONE], sent only to clients that asked for it."""
    kind = "chat.completion.chunk" if head.endpoint == "chat" else "text_completion"
    return {**_document(head, kind, [], extra), "usage": usage_object(usage)}


def response(
    head: AnswerHead,
    text: str,
    finish: str,
    usage: Usage,
    *,
    logprobs: Json | None = None,
    tool_calls: Sequence[Mapping[str, Any]] = (),
    extra: Mapping[str, Any] | None = None,
) -> Json:
    """A whole answer."""
    choice: Json = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
    if head.endpoint == "chat":
        message: Json = {"role": "assistant", "content": text if text or not tool_calls else None, "refusal": None}
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        choice["message"] = message
    else:
        choice["text"] = text
    kind = "chat.completion" if head.endpoint == "chat" else "text_completion"
    return {**_document(head, kind, [choice], extra), "usage": usage_object(usage)}


def usage_object(usage: Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprobs_object(endpoint: Endpoint, tokens: Iterable[Token], top: int, text_offset: int = 0) -> Json:
    """Logprobs of a run of tokens. A piece that is part of a character shows as U+FFFD, its bytes stay exact.

    text_offset: characters of the answer before the run, for the legacy form.
    """
    if endpoint == "chat":
        return {"content": [_chat_entry(token, top) for token in tokens if token.data], "refusal": None}
    found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None, "text_offset": []}
    for token in tokens:
        if not token.data:
            continue
        piece = token.data.decode("utf-8", "replace")
        found["tokens"].append(piece)
        found["token_logprobs"].append(_logprob(token.logprob))
        found["text_offset"].append(text_offset)
        if top:
            pairs = token.alternatives[:top]
            found["top_logprobs"].append({data.decode("utf-8", "replace"): _logprob(value) for data, value in pairs})
        text_offset += len(piece)
    return found


def _chat_entry(token: Token, top: int) -> Json:
    return {
        **_piece(token.data, token.logprob),
        "top_logprobs": [_piece(data, value) for data, value in token.alternatives[:top]],
    }


def _piece(data: bytes, logprob: float | None) -> Json:
    return {"token": data.decode("utf-8", "replace"), "logprob": _logprob(logprob), "bytes": list(data)}


def _logprob(value: float | None) -> float:
    """OpenAI's own mark for "very unlikely" stands for what is unknown or infinite, which JSON cannot say."""
    return -9999.0 if value is None or not value > -9999.0 else value


def models_list(models: Iterable[tuple[str, str, int]]) -> Json:
    """GET /v1/models from (id, owner, created_s)."""
    data = [{"id": name, "object": "model", "created": made, "owned_by": owner} for name, owner, made in models]
    return {"object": "list", "data": data}


def embeddings_response(model: str, vectors: Sequence[Sequence[float]], prompt_tokens: int, as_base64: bool) -> Json:
    """Answer of /v1/embeddings; base64 is the openai client's default: little-endian 32-bit floats."""
    data = [
        {"object": "embedding", "index": number, "embedding": _vector(vector, as_base64)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _vector(vector: Sequence[float], as_base64: bool) -> str | list[float]:
    if not as_base64:
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def dump(document: Mapping[str, Any]) -> bytes:
    """Compact JSON. Half a surrogate pair, which JSON can say and UTF-8 cannot, keeps its escape."""
    return _encode(document).encode("utf-8", "backslashreplace")


def data_event(document: Mapping[str, Any]) -> bytes:
    """One SSE event that carries `document`."""
    return b"data: " + dump(document) + b"\n\n"


def error_object(err: MidstreamError) -> Json:
    """The object under `error`. An overflow also speaks llama-server's form: its type, n_prompt_tokens and n_ctx."""
    found: Json = {"message": str(err), "type": _error_type(err), "param": err.field, "code": err.code}
    if isinstance(err, ContextOverflow):
        found["n_prompt_tokens"] = err.prompt_tokens
        found["n_ctx"] = err.context_tokens
    return found


def error_body(err: MidstreamError) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a refusal."""
    headers = {"content-type": "application/json"}
    if isinstance(err, RateLimited | BudgetExceeded):
        headers.update(err.headers)
    wait_s = err.retry_after_s if isinstance(err, Full) else err.reset_s if isinstance(err, BudgetExceeded) else None
    if wait_s is not None:
        headers["retry-after"] = str(max(1, ceil(wait_s)))
    return err.http_status, headers, dump({"error": error_object(err)})


def error_event(err: MidstreamError) -> bytes:
    """Last event of a stream that was cut; no [DONE] comes after it, so nobody takes the answer for complete."""
    return sse.event(dump({"error": error_object(err)}))


def _error_type(err: MidstreamError) -> str:
    if isinstance(err, ContextOverflow):
        return "exceed_context_size_error"
    if isinstance(err, RateLimited):
        return "rate_limit_error"
    if isinstance(err, BudgetExceeded):
        return "insufficient_quota"
    if isinstance(err, Unauthenticated):
        return "authentication_error"
    if isinstance(err, NotAllowed):
        return "permission_error"
    if isinstance(err, NotFound):
        return "not_found_error"
    if isinstance(err, Full):
        return "overloaded_error"
    if isinstance(err, (BadRequest, TooLarge, ProtocolError, RejectedError)):
        return "invalid_request_error"
    return "server_error"


def _document(head: AnswerHead, kind: str, choices: list[Json], extra: Mapping[str, Any] | None) -> Json:
    document: Json = {
        "id": head.id,
        "object": kind,
        "created": head.created_s,
        "model": head.model,
        "choices": choices,
    }
    if head.fingerprint is not None:
        document["system_fingerprint"] = head.fingerprint
    return {**document, **extra} if extra else document
