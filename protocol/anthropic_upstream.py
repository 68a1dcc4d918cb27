"""The client's side of Anthropic's Messages API (version 2023-06-01): canonical requests out, its events in.

Its system prompt stands beside the messages, user and assistant take turns, tool calls and results are blocks, and a
last assistant message is continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from protocol.errors import EngineError, MidstreamError, Unsupported
from protocol.images import base64_of
from protocol.openai_wire import dump
from protocol.text import CallDelta, FinishReason, ImagePart, Message, Sampling, TextRequest, Usage
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
    text_of,
    turns_of,
)

Json = dict[str, Any]

VERSION = "2023-06-01"
PATH = "/v1/messages"
_FINISHES: Mapping[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "refusal": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}


@frozen
class AnthropicCodec:
    """UpstreamCodec for POST /v1/messages."""

    dialect: ClassVar[Dialect] = "anthropic"
    answers_name_models: ClassVar[bool] = True
    features: ClassVar[Features | None] = Features(continues="text", logprobs=False)
    models_path: ClassVar[str] = "/v1/models"
    embeddings_path: ClassVar[str] = ""

    def call(self, model: str, request: TextRequest, *, stream: bool, stop: Sequence[str] = ()) -> WireCall:
        turns = turns_of(request) or [Message("user", _prompt(request))]
        sampling = request.sampling
        _check(request, sampling)
        document: Json = {
            "model": model,
            "max_tokens": max(1, sampling.max_tokens - len(request.prefix)),
            "messages": _messages(turns, text_of(request.prefix).rstrip()),
            # Anthropic's scale ends at 1. Newer models take temperature or top_p, not both.
            "temperature": min(sampling.temperature, 1.0),
            "stream": stream,
        }
        system = "\n\n".join(turn.content for turn in turns if turn.role == "system")
        if system:
            document["system"] = system
        if sampling.top_p < 1:
            document["top_p"] = sampling.top_p
        if stop:
            document["stop_sequences"] = list(stop)
        document.update(_tools(request))
        return WireCall(PATH, dump(document), {"anthropic-version": VERSION})

    def reader(self, request: TextRequest) -> UpstreamReader:
        answer = text_of(request.prefix)
        return _Reader(answer[len(answer.rstrip()) :])

    def whole(self, body: bytes) -> UpstreamDelta:
        document = load(body, "an upstream answer")
        if document.get("type") == "error" or "error" in document:
            raise error_from(0, document.get("error"))
        blocks = [block for block in document.get("content") or () if isinstance(block, dict)]
        calls = [block for block in blocks if block.get("type") == "tool_use"]
        return UpstreamDelta(
            text="".join(str(block.get("text") or "") for block in blocks if block.get("type") == "text"),
            reasoning="".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"),
            calls=tuple(
                CallDelta(number, str(call.get("id") or ""), str(call.get("name") or ""), _json(call.get("input")))
                for number, call in enumerate(calls)
            ),
            finish=_finish(document.get("stop_reason")),
            usage=_usage(document.get("usage")),
        )

    def authorize(self, key: str) -> Mapping[str, str]:
        return {"x-api-key": key}

    def error(self, status: int, headers: Mapping[str, str], body: bytes) -> MidstreamError:
        return error_for(status, headers, body)


class _Reader(EventReader):
    """Events of one message. `trimmed`: white space at the end of the answer so far, which was not sent along."""

    def __init__(self, trimmed: str) -> None:
        super().__init__()
        self._trimmed = trimmed
        self._calls: dict[int, int] = {}
        self._usage: Json = {}

    def read(self, data: str) -> UpstreamDelta:
        event = load(data)
        kind = event.get("type")
        if kind == "error":
            raise error_from(0, event.get("error"))
        if kind == "message_start":
            self._usage.update(object_of(object_of(event.get("message")).get("usage")))
            return UpstreamDelta(usage=_usage(self._usage))
        if kind == "content_block_start":
            return self._start(event)
        if kind == "content_block_delta":
            return self._delta(event)
        if kind == "message_delta":
            self._usage.update(object_of(event.get("usage")))
            finish = _finish(object_of(event.get("delta")).get("stop_reason"))
            return UpstreamDelta(finish=finish, usage=_usage(self._usage))
        if kind == "message_stop":
            self.ended = True
        return UpstreamDelta()  # ping, content_block_stop, and events that are newer than this

    def _start(self, event: Mapping[str, Any]) -> UpstreamDelta:
        block = object_of(event.get("content_block"))
        if block.get("type") == "text" and block.get("text"):
            return UpstreamDelta(text=self._rejoined(str(block["text"])))
        if block.get("type") != "tool_use":
            return UpstreamDelta()
        number = self._calls.setdefault(count_of(event.get("index")), len(self._calls))
        return UpstreamDelta(calls=(CallDelta(number, str(block.get("id") or ""), str(block.get("name") or ""), ""),))

    def _delta(self, event: Mapping[str, Any]) -> UpstreamDelta:
        delta = object_of(event.get("delta"))
        kind = delta.get("type")
        if kind == "text_delta":
            return UpstreamDelta(text=self._rejoined(str(delta.get("text") or "")))
        if kind == "thinking_delta":
            return UpstreamDelta(reasoning=str(delta.get("thinking") or ""))
        if kind == "input_json_delta":
            number = self._calls.get(count_of(event.get("index")), 0)
            return UpstreamDelta(calls=(CallDelta(number, arguments=str(delta.get("partial_json") or "")),))
        return UpstreamDelta()

    def _rejoined(self, text: str) -> str:
        """Without the white space that the answer had already and the model says again."""
        while self._trimmed and text and text[0] == self._trimmed[0]:
            text, self._trimmed = text[1:], self._trimmed[1:]
        if text:
            self._trimmed = ""
        return text


def _prompt(request: TextRequest) -> str:
    if isinstance(request.prompt, str):
        return request.prompt
    raise Unsupported("Anthropic takes messages or a text, no token ids", field="prompt")


def _check(request: TextRequest, sampling: Sampling) -> None:
    for name, given in (
        ("logprobs", sampling.logprobs),
        ("logit_bias", sampling.logit_bias),
        ("response_format", request.response_format),
    ):
        if given:
            raise Unsupported(f"Anthropic's API does not take {name}", field=name)


def _messages(turns: Sequence[Message], answer: str) -> list[Json]:
    """Blocks by turn; neighbours of one role are one message."""
    found: list[Json] = []
    for turn in turns:
        if turn.role == "system":
            continue
        role = "assistant" if turn.role == "assistant" else "user"
        blocks = _blocks(turn)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        elif blocks:
            found.append({"role": role, "content": blocks})
    if answer:
        found.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return found


def _blocks(turn: Message) -> list[Json]:
    if turn.role == "tool":
        return [{"type": "tool_result", "tool_use_id": turn.tool_call_id or "", "content": turn.content}]
    blocks: list[Json] = []
    for part in turn.parts:
        blocks.append(_image(part) if isinstance(part, ImagePart) else {"type": "text", "text": part.text})
    if not turn.parts and turn.content:
        blocks.append({"type": "text", "text": turn.content})
    for call in turn.tool_calls:
        function = object_of(call.get("function"))
        blocks.append(
            {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments_of(function)}
        )
    return blocks


def _image(part: ImagePart) -> Json:
    if part.url:
        return {"type": "image", "source": {"type": "url", "url": part.url}}
    data = base64_of(part)
    return {"type": "image", "source": {"type": "base64", "media_type": part.media_type, "data": data}}


def _tools(request: TextRequest) -> Json:
    if not request.tools or request.tool_choice == "none":
        return {}
    listed = []
    for tool in request.tools:
        function = object_of(tool.get("function"))
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        entry = {"name": function.get("name"), "input_schema": schema}
        if function.get("description"):
            entry["description"] = function["description"]
        listed.append(entry)
    choice: Json = {"type": {"auto": "auto", "required": "any"}.get(request.tool_choice, "tool")}
    if choice["type"] == "tool":
        choice["name"] = request.tool_choice.removeprefix("function:")
    if not request.parallel_tool_calls:
        choice["disable_parallel_tool_use"] = True
    return {"tools": listed, "tool_choice": choice}


def _json(raw: Any) -> str:
    return dump(raw).decode() if isinstance(raw, dict) else "{}"


def _finish(raw: Any) -> FinishReason | None:
    if raw is None:
        return None
    if raw == "pause_turn":
        raise EngineError("the upstream paused its turn, which needs its own client to go on")
    return _FINISHES.get(str(raw), "stop")


def _usage(raw: Any) -> Usage | None:
    """input_tokens leaves out what came from or went into the cache."""
    if not isinstance(raw, dict) or not raw:
        return None
    read = count_of(raw.get("cache_read_input_tokens"))
    fresh = count_of(raw.get("input_tokens")) + count_of(raw.get("cache_creation_input_tokens"))
    return Usage(fresh + read, count_of(raw.get("output_tokens")), read)
