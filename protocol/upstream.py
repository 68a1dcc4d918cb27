"""The client's side of model servers: what every vendor's codec gives and takes, and the errors they all speak of.

A codec is pure: a canonical request becomes path, headers and body; chunks of the answer become deltas. The bytes are
moved by whoever holds the link.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from attrs import field, frozen

from protocol.decode import load_json
from protocol.errors import (
    BadRequest,
    BudgetExceeded,
    ContextOverflow,
    EngineError,
    Full,
    LinkError,
    MidstreamError,
    NotAllowed,
    NotFound,
    ProtocolError,
    TooLarge,
)
from protocol.sse import SseParser, is_done
from protocol.text import CallDelta, FinishReason, Message, TextRequest, Token, Usage

MAX_REPLY_BYTES = 16 << 20
MAX_ERROR_CHARS = 500
LONGEST_RETRY_AFTER_S = 86_400.0

Dialect = Literal["openai", "anthropic", "gemini", "ollama"]
"""The wire form of a server; a client of the same form can be given its bytes."""


@frozen
class UpstreamPiece:
    """A token as an upstream reported it in logprobs. `data` is exact when the server sends bytes."""

    data: bytes
    logprob: float | None
    id: int | None = None
    alternatives: tuple[tuple[bytes, float], ...] = ()


MOST_TOKENS = 100_000_000
"""No request takes as many: a server that tells more is wrong about all of its counts."""


def plausible(usage: Usage | None) -> Usage | None:
    """None for counts that cannot be true: what was taken is then unknown, not nothing and not a fortune."""
    if usage is None or max(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) > MOST_TOKENS:
        return None
    return usage


@frozen
class UpstreamDelta:
    """One chunk: new text, tokens when the server names them, pieces of tool calls, the end, the usage.

    reasoning: what a reasoning model thinks aloud; no part of the answer.
    """

    text: str = ""
    pieces: tuple[UpstreamPiece, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = field(default=None, converter=plausible)
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""
    extra: Mapping[str, Any] = field(factory=dict)


@frozen
class Features:
    """What a vendor documents of its server, so that nobody has to ask it."""

    continues: Literal["text", "no"]
    logprobs: bool
    tools: bool = True
    images: bool = True


@frozen
class WireCall:
    """A request as it goes out, without its key. path: below the server's base URL."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(factory=dict)


class UpstreamReader(Protocol):
    """Reads one streamed answer; feed it the body as it comes."""

    @property
    def ended(self) -> bool:
        """The server said that nothing comes after."""
        ...

    def feed(self, chunk: bytes) -> Iterator[UpstreamDelta]:
        """Deltas completed by `chunk`, one by one, so that those before an error are not lost.

        Raises the upstream's error where it sent one, ProtocolError for nonsense.
        """
        ...


class UpstreamCodec(Protocol):
    """One vendor's wire form."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def answers_name_models(self) -> bool:
        """Whether answers carry the name of the model, which is another one there than here."""
        ...

    @property
    def features(self) -> Features | None:
        """None: it depends on the server, ask it."""
        ...

    @property
    def models_path(self) -> str:
        """Where the server lists its models; empty: nowhere."""
        ...

    @property
    def embeddings_path(self) -> str:
        """Where OpenAI's form of embeddings is taken; empty: nowhere."""
        ...

    def call(self, model: str, request: TextRequest, *, stream: bool, stop: Sequence[str] = ()) -> WireCall:
        """The request as the server wants it; `request.prefix` is continued.

        stop: for an answer that is given on as it comes; whoever reads its tokens applies stop strings itself.

        Raises Unsupported, with the field, for what this server cannot honour.
        """
        ...

    def reader(self, request: TextRequest) -> UpstreamReader:
        """For the streamed answer to `request`."""
        ...

    def whole(self, body: bytes) -> UpstreamDelta:
        """An answer that was not streamed. Raises as UpstreamReader.feed."""
        ...

    def authorize(self, key: str) -> Mapping[str, str]:
        """The headers that carry a key."""
        ...

    def error(self, status: int, headers: Mapping[str, str], body: bytes) -> MidstreamError:
        """The error that a reply with a status over 399 stands for."""
        ...


class EventReader(ABC):
    """UpstreamReader over server-sent events, one call of `read` per event; `[DONE]` ends it."""

    def __init__(self) -> None:
        self.ended = False
        self._parser = SseParser(max_event_bytes=MAX_REPLY_BYTES)

    def feed(self, chunk: bytes) -> Iterator[UpstreamDelta]:
        """As the port says."""
        plain = self._parser.plain(chunk)
        for data in (plain,) if plain is not None else [event.data for event in self._parser.feed(chunk)]:
            if is_done(data):
                self.ended = True
            elif not self.ended:
                yield self.read(data)

    @abstractmethod
    def read(self, data: str) -> UpstreamDelta:
        """One event's data."""


_loads = json.JSONDecoder().decode


def load(data: str | bytes, what: str = "an upstream chunk") -> Mapping[str, Any]:
    """A JSON object from a server. Raises ProtocolError."""
    if len(data) > MAX_REPLY_BYTES:
        raise TooLarge(f"{what} has {len(data)} bytes, at most {MAX_REPLY_BYTES} are taken")
    try:
        # Every chunk passes here: the parser of C alone, without the looks that documents of ours get.
        document = _loads(data if isinstance(data, str) else data.decode("utf-8"))
    except (ValueError, RecursionError) as err:
        raise ProtocolError(f"{what} is not JSON: {str(err)[:200]}") from err
    if not isinstance(document, dict):
        raise ProtocolError(f"{what} must be an object")
    return document


def turns_of(request: TextRequest) -> list[Message]:
    """The messages of a chat request; empty for a prompt of text or ids."""
    if isinstance(request.prompt, str):
        return []
    return [part for part in request.prompt if isinstance(part, Message)]


def text_of(prefix: Sequence[Token]) -> str:
    """The answer so far as text. Raises BadRequest when it ends inside a character."""
    if not prefix:
        return ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(b"".join(token.data for token in prefix))
    if decoder.getstate()[0]:
        raise BadRequest("the text ends inside a character", field="prefix", next_step="cut at a character boundary")
    return text


def object_of(raw: Any) -> Mapping[str, Any]:
    """An object of a server's document; empty where something else stands."""
    return raw if isinstance(raw, dict) else {}


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments as an object; text that is none of JSON is kept under a name of its own."""
    text = function.get("arguments")
    try:
        found = json.loads(text) if isinstance(text, str) and text.strip() else {}
    except ValueError:
        return {"malformed_arguments": text}
    return found if isinstance(found, dict) else {"value": found}


def count_of(raw: Any) -> int:
    """A token count; 0 where there is none. Anything that cannot be one makes its usage none (`plausible`)."""
    if raw is None:
        return 0
    whole = int(raw) if type(raw) is float and raw.is_integer() else raw
    return whole if type(whole) is int and 0 <= whole <= MOST_TOKENS else MOST_TOKENS + 1


# Errors.

_OVERFLOW = re.compile(
    r"maximum (context|model) length|context length exceeded|context_length|too many (input )?tokens|prompt is too long"
    r"|exceeds the (available )?context|input token count .* exceeds|range of input length"
    r"|exceed(s|ed)? .*(context|max(imum)? (input|prompt))",
    re.IGNORECASE,
)
_CONTEXT_SAYS = re.compile(r"maximum (?:context|model) length (?:is|of) (\d{1,9})\b", re.IGNORECASE)
_PROMPT_SAYS = re.compile(
    r"prompt contains (?:at least )?(\d{1,9})\b|resulted in (\d{1,9})\b|\((\d{1,9}) in the (?:messages|prompt)"
    r"|prompt \(length (\d{1,9})\)",
    re.IGNORECASE,
)
_BUSY_KINDS = frozenset(
    {
        "overloaded_error", "rate_limit_exceeded", "rate_limit_error", "unavailable_error", "engine_overloaded_error",
        "rate_limit_reached_error", "limit_requests", "limit_burst_rate", "throttling", "resource_exhausted",
        "unavailable", "1302", "1303", "1305", "throttling.ratequota", "throttling.allocationquota",
    }
)  # fmt: skip
_POOR_KINDS = frozenset(
    {
        "insufficient_quota", "exceeded_current_quota_error", "billing_hard_limit_reached", "arrearage", "1113",
        "billing_error",
    }
)  # fmt: skip
_FORBIDDEN_KINDS = frozenset(
    {
        "permission_error", "authentication_error", "invalid_authentication_error", "invalid_api_key",
        "permission_denied_error", "incorrect_api_key_error", "unauthenticated", "permission_denied",
        "1000", "1001", "1002", "1003", "1004",
    }
)  # fmt: skip


def error_for(status: int, headers: Mapping[str, str], body: bytes) -> MidstreamError:
    """The error of a reply in any of the forms that servers use: {"error": {...}}, {"error": "text"}, bare fields."""
    try:
        document = load_json(body, what="an upstream error")
    except MidstreamError:
        document = {}
    found = document.get("error", document) if isinstance(document, dict) else {}
    return error_from(status, found, retry_after_s=retry_after_s(headers))


def error_from(status: int, found: Any, retry_after_s: float | None = None) -> MidstreamError:
    """From an `error` object or text; status 0 when it came inside a stream."""
    fields = found if isinstance(found, dict) else {"message": found}
    text = str(fields.get("message") or f"the upstream answered {status}")[:MAX_ERROR_CHARS]
    kinds = {str(fields.get(name) or "").lower() for name in ("code", "type", "status")}
    if {"context_length_exceeded", "exceed_context_size_error", "1261"} & kinds or (
        status in (0, 400, 413, 422) and _OVERFLOW.search(text)
    ):
        return _overflow(fields, text)
    if kinds & _POOR_KINDS or status == 402:
        return BudgetExceeded(text, next_step="the upstream's own account is used up; top it up or use another one")
    if status in (429, 503, 529) or kinds & _BUSY_KINDS:
        return Full(text, retry_after_s=retry_after_s or 1.0)
    if status in (401, 403) or kinds & _FORBIDDEN_KINDS:
        return NotAllowed(text, next_step="check the API key for this upstream")
    if status == 404 or kinds & {"not_found_error", "model_not_found", "not_found", "1211"}:
        return NotFound(text, field="model")
    if status == 413:
        return TooLarge(text)
    if (400 <= status < 500 and status != 408) or "invalid_request_error" in kinds:
        param = fields.get("param")
        return BadRequest(text, field=param if isinstance(param, str) else None)
    return LinkError(text) if status in (408, 502, 504) else EngineError(text)


def _overflow(fields: Mapping[str, Any], text: str) -> ContextOverflow:
    prompt, context = count_of(fields.get("n_prompt_tokens")), count_of(fields.get("n_ctx"))
    if not context:
        # vLLM and vendors say it in words only: "maximum context length is 8192 tokens. However, you requested 9000"
        numbers = [int(digits) for digits in re.findall(r"\b\d{1,9}\b", text)]
        context, prompt = (min(numbers), max(numbers)) if len(numbers) > 1 else (0, 0)
        # ... some with the length of the answer among the numbers, which is less than either.
        said, read = _CONTEXT_SAYS.search(text), _PROMPT_SAYS.search(text)
        context = int(said[1]) if said else context
        prompt = int(next(digits for digits in read.groups() if digits)) if read else prompt
    return ContextOverflow(prompt_tokens=prompt, context_tokens=context)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a reply asks to wait; header names are lower case.

    `retry-after-ms` and `x-ms-retry-after-ms` are milliseconds and go first. A date is not read: clocks differ.
    """
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        value = _number(headers.get(name))
        if value is not None:
            return min(value / 1000, LONGEST_RETRY_AFTER_S)
    value = _number(headers.get("retry-after"))
    return None if value is None else min(value, LONGEST_RETRY_AFTER_S)


def _number(text: str | None) -> float | None:
    if text is None or not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text.strip()):
        return None
    return float(text)
