"""The client's side of Ollama's own API: /api/chat and /api/generate, newline-delimited JSON.

Its OpenAI form hides what matters here: an over-long prompt silently loses its front unless `truncate` says no
(ollama/ollama#3839).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from protocol.errors import MidstreamError, ProtocolError, Unsupported
from protocol.images import base64_of
from protocol.openai_wire import dump
from protocol.text import CallDelta, FinishReason, ImagePart, Message, TextRequest, Usage
from protocol.upstream import (
    MAX_REPLY_BYTES,
    Dialect,
    Features,
    UpstreamDelta,
    UpstreamReader,
    WireCall,
    arguments_of,
    count_of,
    error_for,
    error_from,
    load,
    object_of,
    text_of,
    turns_of,
)

Json = dict[str, Any]


@frozen
class OllamaCodec:
    """UpstreamCodec for Ollama. context_tokens: num_ctx of each request; 0: the server's own."""

    context_tokens: int = 0

    dialect: ClassVar[Dialect] = "ollama"
    answers_name_models: ClassVar[bool] = True
    features: ClassVar[Features | None] = None
    models_path: ClassVar[str] = "/v1/models"
    embeddings_path: ClassVar[str] = "/v1/embeddings"

    def call(self, model: str, request: TextRequest, *, stream: bool, stop: Sequence[str] = ()) -> WireCall:
        _check(request)
        turns, answer = turns_of(request), text_of(request.prefix)
        document: Json = {"model": model, "stream": stream, "options": self._options(request)}
        document.update(truncate=False, shift=False)
        if stop:
            document["options"]["stop"] = list(stop)
        if not turns:
            if not isinstance(request.prompt, str):
                raise Unsupported("Ollama takes messages or a text, no token ids", field="prompt")
            document.update(prompt=request.prompt + answer, raw=True)
            return WireCall("/api/generate", dump(document))
        document["messages"] = [_turn(turn, turns) for turn in turns]
        if answer:
            document["messages"].append({"role": "assistant", "content": answer})
        if request.tools and request.tool_choice != "none":
            document["tools"] = list(request.tools)
        form = request.response_format
        if form:
            schema = form.get("json_schema")
            document["format"] = (schema.get("schema") if isinstance(schema, dict) else None) or "json"
        return WireCall("/api/chat", dump(document))

    def reader(self, request: TextRequest) -> UpstreamReader:
        return _Reader()

    def whole(self, body: bytes) -> UpstreamDelta:
        return _delta(load(body, "an upstream answer"), 0, any_calls=False)

    def authorize(self, key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {key}"}

    def error(self, status: int, headers: Mapping[str, str], body: bytes) -> MidstreamError:
        return error_for(status, headers, body)

    def _options(self, request: TextRequest) -> Json:
        sampling = request.sampling
        options: Json = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "num_predict": max(1, sampling.max_tokens - len(request.prefix)),
        }
        if sampling.seed is not None:
            options["seed"] = sampling.seed
        if self.context_tokens:
            options["num_ctx"] = self.context_tokens
        return options


class _Reader:
    """Lines of one answer."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""
        self._calls = 0

    def feed(self, chunk: bytes) -> Iterator[UpstreamDelta]:
        """As UpstreamReader says."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_REPLY_BYTES:
            raise ProtocolError(f"a line has more than {MAX_REPLY_BYTES} bytes")
        for line in lines:
            if not line.strip() or self.ended:
                continue
            document = load(line)
            delta = _delta(document, self._calls, any_calls=self._calls > 0)
            self._calls += len(delta.calls)
            self.ended = document.get("done") is True
            yield delta


def _check(request: TextRequest) -> None:
    if request.sampling.logprobs:
        raise Unsupported("Ollama's logprobs are not read here", field="logprobs")
    if request.sampling.logit_bias:
        raise Unsupported("Ollama does not take logit_bias", field="logit_bias")
    if request.tools and request.tool_choice not in ("auto", "none"):
        raise Unsupported("Ollama does not take tool_choice", field="tool_choice")


def _turn(turn: Message, turns: Sequence[Message]) -> Json:
    found: Json = {"role": turn.role, "content": turn.content}
    images = [part for part in turn.parts if isinstance(part, ImagePart)]
    if any(part.url for part in images):
        raise Unsupported("Ollama takes pictures as bytes, no addresses", field="messages")
    if images:
        found["images"] = [base64_of(part) for part in images]
    if turn.tool_calls:
        calls = [call.get("function") for call in turn.tool_calls]
        found["tool_calls"] = [
            {"function": {"name": call.get("name"), "arguments": arguments_of(call)}}
            for call in calls
            if isinstance(call, dict)
        ]
    if turn.role == "tool":
        found["tool_name"] = turn.name or _called(turn.tool_call_id, turns)
    return found


def _called(id_: str | None, turns: Sequence[Message]) -> str:
    """The function of the call that a result answers."""
    for turn in turns:
        for call in turn.tool_calls:
            function = call.get("function")
            if call.get("id") == id_ and isinstance(function, dict):
                return str(function.get("name") or "")
    return ""


def _delta(document: Mapping[str, Any], calls_before: int, *, any_calls: bool) -> UpstreamDelta:
    if document.get("error"):
        raise error_from(0, document["error"])
    message = object_of(document.get("message"))
    raw_calls = message.get("tool_calls")
    calls = _calls(raw_calls if isinstance(raw_calls, list) else [], calls_before)
    text = message.get("content") or document.get("response")
    thinking = message.get("thinking") or document.get("thinking")
    done = document.get("done") is True
    return UpstreamDelta(
        text=text if isinstance(text, str) else "",
        reasoning=thinking if isinstance(thinking, str) else "",
        calls=calls,
        finish=_finish(document.get("done_reason"), any_calls or bool(calls)) if done else None,
        usage=Usage(count_of(document.get("prompt_eval_count")), count_of(document.get("eval_count")))
        if done
        else None,
    )


def _calls(raw: Sequence[Any], before: int) -> tuple[CallDelta, ...]:
    functions = [item["function"] for item in raw if isinstance(item, dict) and isinstance(item.get("function"), dict)]
    found = []
    for number, function in enumerate(functions, start=before):
        arguments = function.get("arguments")
        text = dump(arguments).decode() if isinstance(arguments, dict) else "{}"
        found.append(CallDelta(number, f"call_{number}", str(function.get("name") or ""), text))
    return tuple(found)


def _finish(raw: Any, calls: bool) -> FinishReason:
    if raw == "length":
        return "length"
    return "tool_calls" if calls else "stop"
