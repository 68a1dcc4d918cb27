"""The client's side of Gemini's API (v1beta generateContent): canonical requests out, its candidates in.

The system prompt is `systemInstruction`, the assistant is called `model`, calls and results are parts, and a result
names its function, not only its call. The stream is server-sent events without a last mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from attrs import frozen

from protocol.errors import EngineError, MidstreamError, Unsupported
from protocol.images import base64_of
from protocol.openai_wire import dump
from protocol.text import CallDelta, FinishReason, ImagePart, Message, TextRequest, Usage
from protocol.upstream import (
    Dialect,
    EventReader,
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
    turns_of,
)

Json = dict[str, Any]

_FAILING = frozenset({"MALFORMED_FUNCTION_CALL", "OTHER", "UNEXPECTED_TOOL_CALL"})


@frozen
class GeminiCodec:
    """UpstreamCodec for POST /v1beta/models/{model}:generateContent and :streamGenerateContent."""

    dialect: ClassVar[Dialect] = "gemini"
    answers_name_models: ClassVar[bool] = False
    features: ClassVar[Features | None] = Features(continues="no", logprobs=False)
    models_path: ClassVar[str] = "/v1beta/models"
    embeddings_path: ClassVar[str] = ""

    def call(self, model: str, request: TextRequest, *, stream: bool, stop: Sequence[str] = ()) -> WireCall:
        if request.prefix:
            raise Unsupported("Gemini cannot continue an answer", next_step="start the answer there", field="prefix")
        turns = turns_of(request)
        if not turns:
            if not isinstance(request.prompt, str):
                raise Unsupported("Gemini takes messages or a text, no token ids", field="prompt")
            turns = [Message("user", request.prompt)]
        document: Json = {"contents": _contents(turns), "generationConfig": _config(request)}
        if stop:
            document["generationConfig"]["stopSequences"] = list(stop)
        system = [turn.content for turn in turns if turn.role == "system"]
        if system:
            document["systemInstruction"] = {"parts": [{"text": "\n\n".join(system)}]}
        document.update(_tools(request))
        verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return WireCall(f"/v1beta/models/{quote(model, safe='')}:{verb}", dump(document))

    def reader(self, request: TextRequest) -> UpstreamReader:
        return _Reader()

    def whole(self, body: bytes) -> UpstreamDelta:
        return _delta(load(body, "an upstream answer"), 0)

    def authorize(self, key: str) -> Mapping[str, str]:
        return {"x-goog-api-key": key}

    def error(self, status: int, headers: Mapping[str, str], body: bytes) -> MidstreamError:
        return error_for(status, {**headers, **_retry_info(body)}, body)


class _Reader(EventReader):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def read(self, data: str) -> UpstreamDelta:
        delta = _delta(load(data), self._calls)
        self._calls += len(delta.calls)
        # A finish reason of a chunk after calls does not tell that there were calls.
        if delta.finish == "stop" and self._calls:
            return UpstreamDelta(delta.text, finish="tool_calls", usage=delta.usage, calls=delta.calls)
        return delta


def _contents(turns: Sequence[Message]) -> list[Json]:
    names = {str(call.get("id")): object_of(call.get("function")).get("name") for t in turns for call in t.tool_calls}
    found: list[Json] = []
    for turn in turns:
        if turn.role == "system":
            continue
        role = "model" if turn.role == "assistant" else "user"
        parts = _parts(turn, names)
        if found and found[-1]["role"] == role:
            found[-1]["parts"] += parts
        elif parts:
            found.append({"role": role, "parts": parts})
    return found


def _parts(turn: Message, names: Mapping[str, Any]) -> list[Json]:
    if turn.role == "tool":
        name = names.get(turn.tool_call_id or "") or turn.name or "unknown"
        return [{"functionResponse": {"name": name, "response": {"result": turn.content}}}]
    parts: list[Json] = []
    for part in turn.parts:
        parts.append(_image(part) if isinstance(part, ImagePart) else {"text": part.text})
    if not turn.parts and turn.content:
        parts.append({"text": turn.content})
    for call in turn.tool_calls:
        function = object_of(call.get("function"))
        parts.append({"functionCall": {"name": function.get("name"), "args": arguments_of(function)}})
    return parts


def _image(part: ImagePart) -> Json:
    if part.url:
        return {"fileData": {"fileUri": part.url}}
    return {"inlineData": {"mimeType": part.media_type, "data": base64_of(part)}}


def _config(request: TextRequest) -> Json:
    sampling = request.sampling
    if sampling.logit_bias:
        raise Unsupported("Gemini's API does not take logit_bias", field="logit_bias")
    if sampling.logprobs:
        raise Unsupported("Gemini's logprobs are not read here", field="logprobs")
    config: Json = {
        "temperature": sampling.temperature,
        "topP": sampling.top_p,
        "maxOutputTokens": sampling.max_tokens,
    }
    if sampling.seed is not None:
        config["seed"] = sampling.seed
    form = request.response_format
    if form:
        config["responseMimeType"] = "application/json"
        schema = object_of(form.get("json_schema")).get("schema")
        if schema:
            config["responseJsonSchema"] = schema
    return config


def _tools(request: TextRequest) -> Json:
    if not request.tools:
        return {}
    listed = []
    for tool in request.tools:
        function = object_of(tool.get("function"))
        names = {"name": "name", "description": "description", "parameters": "parametersJsonSchema"}
        listed.append({names[key]: function[key] for key in names if function.get(key)})
    mode = {"auto": "AUTO", "none": "NONE"}.get(request.tool_choice, "ANY")
    config: Json = {"mode": mode}
    if request.tool_choice.startswith("function:"):
        config["allowedFunctionNames"] = [request.tool_choice.removeprefix("function:")]
    return {"tools": [{"functionDeclarations": listed}], "toolConfig": {"functionCallingConfig": config}}


def _delta(document: Mapping[str, Any], calls_before: int) -> UpstreamDelta:
    if document.get("error"):
        raise error_from(0, document["error"])
    blocked = object_of(document.get("promptFeedback")).get("blockReason")
    if blocked:
        raise EngineError(f"the upstream blocked the prompt: {str(blocked)[:100]}")
    candidates = document.get("candidates")
    candidate = object_of(candidates[0]) if isinstance(candidates, list) and candidates else {}
    parts = [part for part in object_of(candidate.get("content")).get("parts") or () if isinstance(part, dict)]
    calls = [object_of(part["functionCall"]) for part in parts if "functionCall" in part]
    return UpstreamDelta(
        text="".join(str(part.get("text") or "") for part in parts if not part.get("thought")),
        reasoning="".join(str(part.get("text") or "") for part in parts if part.get("thought")),
        calls=tuple(_call(call, calls_before + number) for number, call in enumerate(calls)),
        finish=_finish(candidate.get("finishReason"), bool(calls)),
        usage=_usage(document.get("usageMetadata")),
    )


def _call(call: Mapping[str, Any], index: int) -> CallDelta:
    arguments = dump(object_of(call.get("args"))).decode()
    return CallDelta(index, str(call.get("id") or f"call_{index}"), str(call.get("name") or ""), arguments)


def _finish(raw: Any, calls: bool) -> FinishReason | None:
    if raw is None:
        return None
    if raw in _FAILING:
        raise EngineError(f"the upstream ended with {raw}")
    if raw == "MAX_TOKENS":
        return "length"
    return "tool_calls" if calls else "stop"


def _usage(raw: Any) -> Usage | None:
    if not isinstance(raw, dict):
        return None
    made = count_of(raw.get("candidatesTokenCount")) + count_of(raw.get("thoughtsTokenCount"))
    return Usage(count_of(raw.get("promptTokenCount")), made, count_of(raw.get("cachedContentTokenCount")))


def _retry_info(body: bytes) -> Mapping[str, str]:
    """Gemini tells the wait in the body: details[].retryDelay = "30s"."""
    try:
        details = object_of(load(body, "an upstream error").get("error")).get("details")
    except MidstreamError:
        return {}
    for detail in details if isinstance(details, list) else ():
        delay = object_of(detail).get("retryDelay")
        if isinstance(delay, str) and delay.endswith("s"):
            return {"retry-after": delay[:-1]}
    return {}
