"""Tools for engines that know none: what they are told, and what a forced call must look like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from gateway.tool_prompt import adapted, call_schema
from protocol.chat import tool_call, tool_definition
from protocol.errors import Unsupported
from protocol.text import Message, TextCapabilities, TextRequest

PLAIN = TextCapabilities(None, None, 4096, "ids", grammar=True, logprobs=True, embeds=False)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = tool_definition("weather", "tells the weather", CITY)
TIME = tool_definition("time", "", None)


def request(*turns: Message, **more: Any) -> TextRequest:
    return TextRequest("m", turns or (Message("user", "hi"),), **more)


def messages(made: TextRequest) -> list[Message]:
    return [turn for turn in made.prompt if isinstance(turn, Message)]


def test_a_request_without_tools_and_an_engine_that_takes_them_change_nothing() -> None:
    plain, with_tools = request(), request(tools=(WEATHER,))
    assert adapted(plain, PLAIN) is plain
    assert adapted(with_tools, evolve(PLAIN, tools=True)) is with_tools


def test_definitions_stand_in_the_system_turn() -> None:
    made = adapted(request(Message("system", "be short"), Message("user", "hi"), tools=(WEATHER, TIME)), PLAIN)
    system, user = messages(made)
    assert system.content.startswith("be short\n\n")
    listed = system.content.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line)["name"] for line in listed] == ["weather", "time"]
    assert (user, made.tools, made.sampling.json_schema) == (Message("user", "hi"), (), None)
    assert [turn.role for turn in messages(adapted(request(tools=(TIME,)), PLAIN))] == ["system", "user"]


def test_calls_and_results_of_earlier_turns_are_told_as_text() -> None:
    """Also when this request has no tools any more: the engine's template may not know such turns."""
    turns = (
        Message("user", "weather?"),
        Message("assistant", "", tool_calls=(tool_call("c1", "weather", '{"city": "Bern"}'),)),
        Message("tool", "rain", tool_call_id="c1"),
    )
    for made in (adapted(request(*turns), PLAIN), adapted(request(*turns, tools=(WEATHER,)), PLAIN)):
        asked, called, told = messages(made)[-3:]
        assert asked.content == "weather?"
        assert called == Message(
            "assistant", '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
        )
        assert told == Message("user", "<tool_response>\nrain\n</tool_response>")


def test_a_forced_call_is_a_schema_of_one_call() -> None:
    form = {
        "type": "object",
        "properties": {"name": {"const": "weather"}, "parameters": CITY},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    made = adapted(request(tools=(WEATHER, TIME), tool_choice="function:weather"), PLAIN)
    assert made.sampling.json_schema == form
    schema = call_schema((WEATHER, TIME), "required")
    assert schema["anyOf"][0] == form
    assert len(schema["anyOf"]) == 2


def test_definitions_of_schemas_move_to_the_top() -> None:
    def using(definition: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": definition}}

    first, second = (tool_definition(name, "", using({"type": "string"})) for name in ("a", "b"))
    schema = call_schema((first, second), "required")
    assert schema["$defs"] == {"X": {"type": "string"}}
    assert "$defs" not in schema["anyOf"][0]["properties"]["parameters"]
    with pytest.raises(Unsupported):
        call_schema((first, tool_definition("c", "", using({"type": "integer"}))), "required")


def test_a_format_is_a_schema() -> None:
    made = adapted(request(response_format={"type": "json_object"}), PLAIN)
    assert (made.sampling.json_schema, made.response_format) == ({"type": "object"}, None)
