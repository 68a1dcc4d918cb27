"""What llama-server says and hears: request bodies and the chunks of its `/completion` stream. Pure.

Tokens inside an unfinished character send no chunk of their own: the chunk that finishes the character shows all its
bytes and its last token, and the running count tells that some were hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from protocol.errors import (
    BadRequest,
    ContextOverflow,
    EngineError,
    Full,
    MidstreamError,
    NotAllowed,
    ProtocolError,
    TooLarge,
)
from protocol.text import Message, Sampling


@frozen
class Seen:
    """The token that a chunk ends with, and what was likely at its place as (id, bytes, logprob), best first."""

    id: int | None
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...]

    @property
    def margin(self) -> float | None:
        """Logit distance between the two likeliest tokens."""
        return self.top[0][2] - self.top[1][2] if len(self.top) > 1 else None


NativePrompt = Sequence[str | int]
"""A prompt in the server's terms: ids, or one text, which it tokenises itself, and ids after it."""


@frozen
class Chunk:
    """One chunk. `predicted` counts generated tokens of this request so far, the end mark included; `evaluated` the
    tokens of its prompt, which the report that prefill begins tells already. A report shows no text."""

    text: bytes
    seen: Seen | None
    predicted: int | None
    evaluated: int | None
    cached: int | None
    finish: Literal["stop", "length", None]


def completion_body(prompt: NativePrompt, sampling: Sampling, predict: int, *, stream: bool = True) -> dict[str, Any]:
    """Body of a completion that samples as `sampling` says and at most `predict` tokens."""
    alone = len(prompt) == 1 and isinstance(prompt[0], str)
    body: dict[str, Any] = {
        # A list that holds nothing but a text would be a list of prompts.
        "prompt": prompt[0] if alone else list(prompt),
        "n_predict": predict,
        "stream": stream,
        "cache_prompt": True,
        "return_tokens": True,
        "return_progress": stream,
        # Probabilities cost about 5 % of a small model's speed. Two candidates give the margin.
        "n_probs": max(2, sampling.logprobs) if sampling.logprobs else 0,
        "min_p": 0.0,
        **_chain(sampling),
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed & 0xFFFF_FFFF
    if sampling.logit_bias:
        body["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
    if sampling.grammar:
        body["grammar"] = sampling.grammar
    if sampling.json_schema is not None:
        body["json_schema"] = sampling.json_schema
    return body


def _chain(sampling: Sampling) -> dict[str, Any]:
    """The shortest chain of samplers that does what was asked: each one more walks through the whole vocabulary.

    The server's own defaults (top_k 40, min_p 0.05) would be samplers that nobody asked for.
    """
    if sampling.temperature <= 0:
        return {"temperature": 0.0, "top_k": 1, "samplers": ["top_k", "temperature"]}
    chain = ["top_p"] if sampling.top_p < 1 else []
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "samplers": [*chain, "temperature"],
    }


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the server's template takes them."""
    shaped = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            one["name"] = message.name
        if message.tool_calls:
            one["tool_calls"] = [dict(call) for call in message.tool_calls]
        if message.tool_call_id:
            one["tool_call_id"] = message.tool_call_id
        shaped.append(one)
    return shaped


def read_chunk(raw: Mapping[str, Any]) -> Chunk:
    """A chunk, or a report of prefill. Raises what an error chunk means."""
    if "error" in raw:
        raise server_error(raw["error"])
    try:
        if "prompt_progress" in raw:
            return _report(raw["prompt_progress"])
        return _chunk(raw)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as err:
        raise ProtocolError("llama-server sent a chunk that is not a completion", field="content") from err


def server_error(error: object, status: int = 500) -> MidstreamError:
    """The error that a server's error object means."""
    detail = error if isinstance(error, Mapping) else {"message": str(error)}
    message = f"llama-server: {detail.get('message', 'no message')}"
    code = detail.get("code") if isinstance(detail.get("code"), int) else status
    kind = detail.get("type")
    if kind == "exceed_context_size_error":
        return ContextOverflow(
            prompt_tokens=int(detail.get("n_prompt_tokens") or 0), context_tokens=int(detail.get("n_ctx") or 0)
        )
    if "too large to process" in message:
        return TooLarge(message, next_step="send a shorter text", field="input")
    if kind == "unavailable_error" or code in (429, 503):
        return Full(message, retry_after_s=1.0)
    if code in (401, 403):
        return NotAllowed(message, next_step="give the server's API key")
    if kind == "invalid_request_error" or code == 400:
        return BadRequest(message)
    return EngineError(message)


def _report(progress: Mapping[str, Any]) -> Chunk:
    total, cached = _count(progress["total"]), _count(progress.get("cache"))
    return Chunk(text=b"", seen=None, predicted=None, evaluated=total, cached=cached, finish=None)


def _chunk(raw: Mapping[str, Any]) -> Chunk:
    probabilities, tokens = raw.get("completion_probabilities") or (), raw.get("tokens") or ()
    seen = _seen(probabilities[-1]) if probabilities else None
    if seen is None and tokens:
        seen = Seen(id=int(tokens[-1]), logprob=None, top=())
    finish: Literal["stop", "length", None] = None
    if raw.get("stop"):
        finish = "length" if raw.get("stop_type") == "limit" else "stop"
    predicted = raw.get("tokens_predicted")
    return Chunk(
        text=_bytes(raw["content"]),
        seen=seen,
        predicted=None if predicted is None else int(predicted),
        evaluated=_count(raw.get("tokens_evaluated")),
        cached=_count((raw.get("timings") or {}).get("cache_n")),
        finish=finish,
    )


def _seen(entry: Mapping[str, Any]) -> Seen:
    top = tuple(
        (int(one["id"]), bytes(one["bytes"]), float(one["logprob"])) for one in entry.get("top_logprobs") or () if one
    )
    return Seen(id=int(entry["id"]), logprob=float(entry["logprob"]), top=top)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None
