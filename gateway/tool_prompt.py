"""Tools for engines that know none: definitions and results as text, a forced call as a JSON schema. Pure.

The convention is the one that Hermes, Qwen and many other open models were trained on: definitions between `<tools>`
marks in the system turn, calls between `<tool_call>` marks, results between `<tool_response>` marks in a user turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from protocol.chat import answer_schema
from protocol.errors import Unsupported
from protocol.text import Message, TextCapabilities, TextRequest

_RULES = """You can call functions. Their definitions, one JSON object a line:
<tools>
{definitions}
</tools>
To call one, write exactly this and nothing after it:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes back between <tool_response> and </tool_response>. Call a function only when it helps."""


def adapted(request: TextRequest, can: TextCapabilities) -> TextRequest:
    """The request for an engine with these capabilities: as it is, or with tools and format in prompt and schema.

    Raises Unsupported for a schema that cannot be joined with others.
    """
    if can.tools or not (request.tools or request.response_format or _has_calls(request)):
        return request
    schema = _schema(request)
    sampling = request.sampling if schema is None else evolve(request.sampling, json_schema=schema)
    prompt = request.prompt if isinstance(request.prompt, str) else _turns(request)
    return evolve(request, prompt=prompt, sampling=sampling, tools=(), tool_choice="auto", response_format=None)


def _has_calls(request: TextRequest) -> bool:
    return not isinstance(request.prompt, str) and any(
        isinstance(turn, Message) and (turn.tool_calls or turn.role == "tool") for turn in request.prompt
    )


def _turns(request: TextRequest) -> Sequence[Message] | tuple[int, ...]:
    turns = [turn for turn in request.prompt if isinstance(turn, Message)]
    if not turns:
        return tuple(item for item in request.prompt if isinstance(item, int))
    told = [_told(turn) for turn in turns]
    return with_rules(told, request.tools) if request.tools else told


def with_rules(turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The turns with the definitions in the system turn, which is made if there is none."""
    definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    rules = _RULES.format(definitions=definitions)
    if turns and turns[0].role == "system":
        return [evolve(turns[0], content=f"{turns[0].content}\n\n{rules}"), *turns[1:]]
    return [Message("system", rules), *turns]


def _told(turn: Message) -> Message:
    """Calls and results of earlier turns as text."""
    if turn.role == "tool":
        return Message("user", f"<tool_response>\n{turn.content}\n</tool_response>", parts=turn.parts)
    if not turn.tool_calls:
        return turn
    calls = "\n".join(f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in turn.tool_calls)
    return Message(turn.role, f"{turn.content}\n{calls}".lstrip("\n"), turn.name)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {function["arguments"] or "{}"}}}'


def _schema(request: TextRequest) -> Mapping[str, Any] | None:
    """What the answer must fit, where the client asked for a form or a call."""
    if request.tools and request.tool_choice != "auto":
        return call_schema(request.tools, request.tool_choice)
    return answer_schema(request.response_format) if request.response_format is not None else None


def call_schema(tools: Sequence[Mapping[str, Any]], choice: str) -> Mapping[str, Any]:
    """The JSON schema of one call of these tools, or of the one that `choice` names."""
    name = choice.partition(":")[2]
    chosen = [tool["function"] for tool in tools if not name or tool["function"]["name"] == name]
    shared: dict[str, Any] = {}
    forms = [_call_form(function, shared) for function in chosen]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return {**schema, "$defs": shared} if shared else schema


def _call_form(function: Mapping[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Definitions of a tool's schema move to the top, where its references look for them.

    Some engines write properties in the order of the alphabet; the name must come first, so that arguments can stream.
    """
    parameters = dict(function["parameters"])
    for name, definition in (parameters.pop("$defs", None) or {}).items():
        if shared.setdefault(name, definition) != definition:
            raise Unsupported(f"two tools define {name[:64]!r} in different ways", field="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
