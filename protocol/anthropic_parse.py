"""Bodies of Anthropic's Messages API to the canonical request, checked field by field.

Blocks become turns: tool results are turns of their own, before what the same user turn says beside them. Thinking
blocks of earlier answers are left out, as Anthropic's API does for models without thinking. A field that cannot be
honoured is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from protocol.chat import ChatRequest, tool_call, tool_definition
from protocol.errors import BadRequest, TooLarge, Unsupported
from protocol.images import from_base64, from_url
from protocol.openai_parse import MAX_MESSAGES, MAX_TOOLS, checked_images, parse_tools, stop_texts
from protocol.request_fields import Fields, clean, load_object
from protocol.text import ImagePart, Message, Part, Sampling, TextPart

MAX_TOKENS = 1 << 31


def parse_messages(body: bytes | Mapping[str, Any], *, counting: bool = False) -> ChatRequest:
    """Read a body of POST /v1/messages; `counting`: of /v1/messages/count_tokens, which has no max_tokens.

    Raises BadRequest or Unsupported with `field` set to the parameter, TooLarge for a body that is too large.
    """
    fields = Fields(load_object(body))
    for name in ("container", "mcp_servers", "output_config", "context_management"):
        fields.only(name, ())
    if fields.raw.get("top_k") is not None:
        raise Unsupported("top_k is not supported", next_step="leave top_k out", field="top_k")
    thinking = fields.mapping("thinking")
    if thinking is not None and thinking.get("type") != "disabled":
        raise Unsupported("thinking is not supported", next_step="leave thinking out", field="thinking")
    if not counting and fields.raw.get("max_tokens") is None:
        raise BadRequest("max_tokens is missing", field="max_tokens")
    tools, choice = _tools(fields)
    chosen = fields.mapping("tool_choice") or {}
    return ChatRequest(
        model=fields.model(),
        prompt=checked_images(_messages(fields.raw)),
        sampling=Sampling(
            temperature=fields.number("temperature", 0.0, 2.0, 1.0),
            top_p=fields.number("top_p", 0.0, 1.0, 1.0, above=True),
            max_tokens=fields.integer("max_tokens", 1, MAX_TOKENS, 1),
        ),
        stream=fields.flag("stream"),
        include_usage=True,
        stop=stop_texts(fields.raw.get("stop_sequences"), "stop_sequences"),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=chosen.get("disable_parallel_tool_use") is not True,
    )


def _tools(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...], str]:
    definitions = []
    for number, tool in enumerate(fields.objects("tools", MAX_TOOLS)):
        here = f"tools[{number}]"
        if tool.get("type", "custom") not in ("custom", None):
            raise Unsupported("tools that the server runs are not supported", field=f"{here}.type")
        schema, description = tool.get("input_schema"), tool.get("description")
        if not isinstance(schema, Mapping):
            raise BadRequest("input_schema must be a JSON schema", field=f"{here}.input_schema")
        definitions.append(tool_definition(str(tool.get("name", "")), str(description or ""), schema))
    choice = fields.mapping("tool_choice")
    kind = choice.get("type") if choice else None
    if kind == "tool" and choice:
        return parse_tools(definitions, {"type": "function", "function": {"name": choice.get("name")}})
    if kind not in (None, "auto", "any", "none"):
        raise BadRequest("tool_choice must be auto, any, tool or none", field="tool_choice.type")
    return parse_tools(definitions, "required" if kind == "any" else kind)


def _messages(raw: Mapping[str, Any]) -> tuple[Message, ...]:
    listed = raw.get("messages")
    if not isinstance(listed, list) or not listed:
        raise BadRequest("messages must be a non-empty list", field="messages")
    if len(listed) > MAX_MESSAGES:
        raise TooLarge(f"messages has {len(listed)} entries, at most {MAX_MESSAGES} are taken", field="messages")
    turns: list[Message] = []
    system = raw.get("system")
    if system is not None and (text := _blocks(system, "system").text):
        turns.append(Message("system", text))
    for number, message in enumerate(listed):
        turns += _turn(message, f"messages[{number}]")
    if turns[-1].role == "assistant":
        raise Unsupported(
            "an answer that the client began cannot be gone on with",
            next_step="end messages with a user turn",
            field=f"messages[{len(listed) - 1}]",
        )
    return tuple(turns)


def _turn(raw: Any, path: str) -> list[Message]:
    role = raw.get("role") if isinstance(raw, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise BadRequest("role must be user or assistant", field=f"{path}.role")
    found = _blocks(raw.get("content"), f"{path}.content")
    if found.results and role != "user":
        raise BadRequest("tool results belong into user turns", field=f"{path}.content")
    if found.calls and role != "assistant":
        raise BadRequest("tool calls belong into assistant turns", field=f"{path}.content")
    turns = list(found.results)
    if found.text or found.calls or found.images or not turns:
        turns.append(Message(str(role), found.text, tool_calls=found.calls, parts=found.parts if found.images else ()))
    return turns


@frozen
class _Found:
    """What the blocks of one turn hold."""

    parts: tuple[Part, ...] = ()
    calls: tuple[Mapping[str, Any], ...] = ()
    results: tuple[Message, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> bool:
        return any(isinstance(part, ImagePart) for part in self.parts)


def _blocks(raw: Any, path: str) -> _Found:
    if isinstance(raw, str):
        return _Found((TextPart(clean(raw, path)),))
    if not isinstance(raw, list) or len(raw) > MAX_MESSAGES:
        raise BadRequest("content must be a text or a list of blocks", field=path)
    parts: list[Part] = []
    calls: list[Mapping[str, Any]] = []
    results: list[Message] = []
    for number, block in enumerate(raw):
        here = f"{path}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            parts.append(TextPart(_text(block, "text", here)))
        elif kind == "image":
            parts.append(_image(block, here))
        elif kind == "tool_use":
            calls.append(_call(block, here))
        elif kind == "tool_result":
            results.append(_result(block, here))
        elif kind not in ("thinking", "redacted_thinking"):
            raise Unsupported(f"blocks of type {str(kind)[:32]!r} are not supported", field=f"{here}.type")
    return _Found(tuple(parts), tuple(calls), tuple(results))


def _text(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text", field=f"{path}.{name}")
    return clean(value, f"{path}.{name}")


def _image(block: Mapping[str, Any], path: str) -> ImagePart:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "base64" and isinstance(source, Mapping):
        return from_base64(_text(source, "data", f"{path}.source"), f"{path}.source.data")
    if kind == "url" and isinstance(source, Mapping):
        return from_url(_text(source, "url", f"{path}.source"), f"{path}.source.url")
    raise Unsupported("an image's source is base64 or url", field=f"{path}.source.type")


def _call(block: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise BadRequest("input must be an object", field=f"{path}.input")
    arguments = clean(json.dumps(given, ensure_ascii=False), f"{path}.input")
    return tool_call(_text(block, "id", path)[:256], _text(block, "name", path), arguments)


def _result(block: Mapping[str, Any], path: str) -> Message:
    inner = _blocks(block.get("content") or "", f"{path}.content")
    if inner.calls or inner.results:
        raise BadRequest("a tool result holds text and images", field=f"{path}.content")
    text = f"error: {inner.text}" if block.get("is_error") is True else inner.text
    id_ = _text(block, "tool_use_id", path)
    return Message("tool", text, tool_call_id=id_[:256], parts=inner.parts if inner.images else ())
