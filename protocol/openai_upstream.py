"""The client's side of OpenAI's API: bodies for an upstream server, and what its chunks say.

Knows what vLLM, llama-server, Ollama and vendors have in common; their differences are rows of protocol.vendors. A
server that sends more is read all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from protocol.errors import EngineError, MidstreamError, ProtocolError, Unsupported
from protocol.images import data_url
from protocol.openai_wire import dump
from protocol.text import CallDelta, FinishReason, ImagePart, Message, Sampling, TextRequest, Usage
from protocol.upstream import (
    Dialect,
    EventReader,
    Features,
    UpstreamDelta,
    UpstreamPiece,
    UpstreamReader,
    WireCall,
    count_of,
    error_for,
    error_from,
    load,
    text_of,
    turns_of,
)
from protocol.vendors import VENDORS, Vendor

Json = dict[str, Any]
_OF_TEXT = frozenset({"role", "content"})


@frozen
class OpenAICodec:
    """UpstreamCodec for OpenAI's form as `vendor` has it."""

    vendor: Vendor = VENDORS["openai_compat"]

    @property
    def dialect(self) -> Dialect:
        return "openai"

    @property
    def answers_name_models(self) -> bool:
        return True

    @property
    def features(self) -> Features | None:
        vendor = self.vendor
        if vendor.continues is None:
            return None
        return Features(vendor.continues, vendor.logprobs, images=vendor.images)

    @property
    def models_path(self) -> str:
        return self.vendor.models_path

    @property
    def embeddings_path(self) -> str:
        return self.vendor.embeddings_path

    def call(self, model: str, request: TextRequest, *, stream: bool, stop: Sequence[str] = ()) -> WireCall:
        sampling = request.sampling
        if request.prefix:
            sampling = evolve(sampling, max_tokens=max(1, sampling.max_tokens - len(request.prefix)))
        answer, turns = text_of(request.prefix), turns_of(request)
        if not turns:
            return self._completion(model, request, sampling, answer, stream, stop)
        document: Json = {"model": model, "messages": self._messages(turns, answer)}
        document.update(self._sampling(model, sampling, stream))
        if stop or self.vendor.extra:
            document.update(self._stops(stop), **self.vendor.extra)
        if sampling.logprobs:
            self._needs(self.vendor.logprobs, "logprobs")
            document.update(logprobs=True, top_logprobs=sampling.logprobs)
        if request.tools:
            document.update(self._tools(request))
        if request.response_format:
            kind = request.response_format.get("type")
            self._needs(self.vendor.schemas or kind != "json_schema", "response_format")
            document["response_format"] = request.response_format
        if answer:
            document.update(self.vendor.continue_fields)
        path = (self.vendor.continue_path if answer else "") or self.vendor.chat_path
        return WireCall(path, dump(document))

    def reader(self, request: TextRequest) -> UpstreamReader:
        return _Reader(self.vendor.failing_finishes)

    def whole(self, body: bytes) -> UpstreamDelta:
        return parse_chunk(body, self.vendor.failing_finishes)

    def authorize(self, key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {key}"}

    def error(self, status: int, headers: Mapping[str, str], body: bytes) -> MidstreamError:
        return error_for(status, headers, body)

    def _completion(
        self, model: str, request: TextRequest, sampling: Sampling, answer: str, stream: bool, stop: Sequence[str]
    ) -> WireCall:
        self._needs(bool(self.vendor.completions_path), "prompt")
        prompt: str | list[int]
        if isinstance(request.prompt, str):
            prompt = request.prompt + answer
        else:
            prompt = [part for part in request.prompt if isinstance(part, int)]
            if answer:
                raise Unsupported("a prompt of ids cannot be continued by text", field="prefix")
        document: Json = {"model": model, "prompt": prompt, **self._sampling(model, sampling, stream)}
        document.update(self._stops(stop))
        if sampling.logprobs:
            document["logprobs"] = sampling.logprobs
        return WireCall(self.vendor.completions_path, dump(document))

    def _stops(self, stop: Sequence[str]) -> Json:
        if not stop:
            return {}
        self._needs(len(stop) <= self.vendor.stops, "stop")
        return {"stop": list(stop)}

    def _needs(self, able: bool, field: str) -> None:
        if not able:
            raise Unsupported(f"{self.vendor.name} does not take {field}", field=field)

    def _messages(self, turns: Sequence[Message], answer: str) -> list[Json]:
        ordered = list(turns)
        if self.vendor.system == "first":
            ordered = system_first(ordered)
        if self.vendor.merge_turns:
            ordered = merged(ordered)
        found = [self._turn(message) for message in ordered]
        if answer:
            if self.vendor.continues == "no":
                raise Unsupported(f"{self.vendor.name} cannot continue an answer", next_step="start the answer there")
            found.append({"role": "assistant", "content": answer, **self.vendor.continue_mark})
        return found

    def _turn(self, message: Message) -> Json:
        turn: Json = {"role": message.role, "content": message.content}
        if message.parts:
            self._needs(self.vendor.images, "messages")
            turn["content"] = [_part(part) for part in message.parts]
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_calls:
            turn["tool_calls"] = list(message.tool_calls)
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        return turn

    def _sampling(self, model: str, sampling: Sampling, stream: bool) -> Json:
        vendor = self.vendor
        fields: Json = {}
        if not (vendor.name == "openai" and _reasons(model)):
            fields.update(self._temperature(sampling.temperature))
            fields["top_p"] = sampling.top_p
        fields[vendor.max_tokens_field] = sampling.max_tokens
        fields["stream"] = stream
        if stream and vendor.stream_usage:
            fields["stream_options"] = {"include_usage": True}
        if sampling.seed is not None and vendor.seed:  # a seed is best effort everywhere
            fields["seed"] = sampling.seed
        if sampling.logit_bias:
            self._needs(vendor.logit_bias, "logit_bias")
            fields["logit_bias"] = {str(key): value for key, value in sampling.logit_bias.items()}
        return fields

    def _temperature(self, wanted: float) -> Json:
        vendor = self.vendor
        if wanted == 0 and vendor.zero_temperature is not None:
            return dict(vendor.zero_temperature)
        most = vendor.temperature_most
        if vendor.temperature_below is not None:
            most = min(most, vendor.temperature_below - 0.01)
        return {"temperature": min(wanted, most)}

    def _tools(self, request: TextRequest) -> Json:
        fields: Json = {"tools": list(request.tools)}
        choice = request.tool_choice
        if choice.startswith("function:"):
            self._needs(self.vendor.forced_tools != "no", "tool_choice")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.removeprefix("function:")}}
        elif choice != "auto":
            self._needs(self.vendor.forced_tools == "any" or choice != "required", "tool_choice")
            fields["tool_choice"] = choice
        if not request.parallel_tool_calls:
            fields["parallel_tool_calls"] = False
        return fields


class _Reader(EventReader):
    def __init__(self, failing: frozenset[str]) -> None:
        super().__init__()
        self._failing = failing

    def read(self, data: str) -> UpstreamDelta:
        return parse_chunk(data, self._failing)


def system_first(turns: Sequence[Message]) -> list[Message]:
    """System turns as one, before all others."""
    system = [turn for turn in turns if turn.role == "system"]
    rest = [turn for turn in turns if turn.role != "system"]
    return [Message("system", "\n\n".join(turn.content for turn in system)), *rest] if system else rest


def merged(turns: Sequence[Message]) -> list[Message]:
    """Neighbours of one role joined, where they are text alone."""
    found: list[Message] = []
    for turn in turns:
        last = found[-1] if found else None
        plain = not (turn.parts or turn.tool_calls or turn.tool_call_id or turn.name)
        if last is not None and plain and last.role == turn.role and not (last.parts or last.tool_calls or last.name):
            found[-1] = evolve(last, content=f"{last.content}\n\n{turn.content}")
        else:
            found.append(turn)
    return found


def parse_chunk(data: str | bytes, failing: frozenset[str] = frozenset()) -> UpstreamDelta:
    """Read one chunk, or a whole answer that was not streamed.

    Raises the upstream's error when the chunk carries one or a `failing` finish reason, ProtocolError when it is none.
    """
    document = load(data)
    if document.get("error"):
        raise error_from(0, document["error"])
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict):
        raise ProtocolError("a choice must be an object", field="choices[0]")
    delta = choice.get("delta") or choice.get("message") or {}
    if not isinstance(delta, dict):
        raise ProtocolError("a delta must be an object", field="choices[0].delta")
    if choice.get("finish_reason") in failing:
        raise EngineError(f"the upstream ended with {choice['finish_reason']}")
    text = delta.get("content") if delta else choice.get("text")
    if type(text) is str and _says_only(document, choice, delta):
        return UpstreamDelta(text)
    return UpstreamDelta(
        text=text if isinstance(text, str) else "",
        pieces=_pieces(choice.get("logprobs")),
        finish=_finish(choice.get("finish_reason")),
        # Moonshot's usage stands inside the choice.
        usage=_usage(document.get("usage")) or _usage(choice.get("usage")),
        calls=_calls(delta.get("tool_calls")),
        reasoning=_text(delta.get("reasoning_content")) or _text(delta.get("reasoning")),
        extra={key: document[key] for key in ("midstream", "timings") if key in document},
    )


def _says_only(document: Mapping[str, Any], choice: Mapping[str, Any], delta: Mapping[str, Any]) -> bool:
    """Whether a chunk says a piece of text and nothing besides, as most do."""
    return delta.keys() <= _OF_TEXT and not (
        choice.get("finish_reason")
        or choice.get("logprobs")
        or choice.get("usage")
        or document.get("usage")
        or "timings" in document
        or "midstream" in document
    )


def _part(part: Any) -> Json:
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": data_url(part), "detail": part.detail}}
    return {"type": "text", "text": part.text}


def _reasons(model: str) -> bool:
    """OpenAI's reasoning models refuse sampling parameters."""
    return model.startswith(("o1", "o3", "o4", "gpt-5"))


def _text(raw: Any) -> str:
    return raw if isinstance(raw, str) else ""


def _calls(raw: Any) -> tuple[CallDelta, ...]:
    if not isinstance(raw, list):
        return ()
    found = []
    for number, call in enumerate(item for item in raw if isinstance(item, dict)):
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        index = call.get("index")
        found.append(
            CallDelta(
                index=index if type(index) is int and index >= 0 else number,
                id=_text(call.get("id")),
                name=_text(function.get("name")),
                arguments=_text(function.get("arguments")),
            )
        )
    return tuple(found)


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
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    # DeepSeek and Moonshot tell cached tokens in a field of their own.
    cached = cached or raw.get("prompt_cache_hit_tokens") or raw.get("cached_tokens")
    return Usage(count_of(raw.get("prompt_tokens")), count_of(raw.get("completion_tokens")), count_of(cached))
