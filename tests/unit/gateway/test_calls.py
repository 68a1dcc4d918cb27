"""Tool calls in the text of models: taken apart the same however the text is cut, and never an error."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.calls import Call, CallScanner
from protocol.text import CallDelta

WEATHER = '{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}}'
ARGUMENTS = '{"city": "Bern", "days": [1, 2]}'


def scan(pieces: Sequence[str], names: Sequence[str] = ("weather", "time")) -> tuple[str, list[Call], CallScanner]:
    """The text and the calls that the parts make; every part is checked against the rules of deltas."""
    scanner = CallScanner(names, lambda number: f"call_{number}")
    parts = [part for piece in pieces for part in scanner.feed(piece)] + scanner.flush()
    calls: list[Call] = []
    for part in parts:
        if isinstance(part, CallDelta):
            if part.id:
                assert (part.index, part.arguments) == (len(calls), ""), "a call begins with its name alone"
                calls.append(Call(part.id, part.name))
            else:
                assert not part.name
                assert part.index == len(calls) - 1
            calls[part.index].arguments += part.arguments
    assert [(c.id, c.name, c.arguments) for c in calls] == [(c.id, c.name, c.arguments) for c in scanner.calls]
    return "".join(part for part in parts if isinstance(part, str)), calls, scanner


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("just text with a < and a {brace}", "just text with a < and a {brace}", []),
        (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", ARGUMENTS)]),
        (f"Let me see.\n<tool_call>{WEATHER}</tool_call>", "Let me see.\n", [("weather", ARGUMENTS)]),
        (
            f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"name":"time","arguments":{{}}}}</tool_call>',
            "",
            [("weather", ARGUMENTS), ("time", "{}")],
        ),
        (
            f'[TOOL_CALLS] [{WEATHER}, {{"name": "time", "arguments": {{}}}}]',
            "",
            [("weather", ARGUMENTS), ("time", "{}")],
        ),
        ('<|python_tag|>{"name": "time", "parameters": {"zone": "}"}}', "", [("time", '{"zone": "}"}')]),
        (f" \n{WEATHER}", "", [("weather", ARGUMENTS)]),
        ('{"name": "nobody", "arguments": {}}', '{"name": "nobody", "arguments": {}}', []),
        ('{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', []),
        ('<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call> done', "done", [("time", '{"a": 1}')]),
        ('<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("time", '{"a": 1}')]),
        ('<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
        ('<tool_call>{"name": "time", "arguments": {"a": 1}, "id": "x}"}</tool_call>ok', "ok", [("time", '{"a": 1}')]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"nam', '<tool_call>{"nam', []),
        ("a <tool", "a <tool", []),
        ('{"na', '{"na', []),
        ("", "", []),
    ],
)
def test_calls_and_text_come_apart_however_the_text_is_cut(
    answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([answer], list(answer), [answer[i : i + 3] for i in range(0, len(answer), 3)]):
        said, found, scanner = scan(pieces)
        assert (said, [(call.name, call.arguments) for call in found]) == (text, calls)
        assert all(call.whole for call in scanner.calls)
        assert scanner.broken == ()


def test_arguments_go_out_as_they_come() -> None:
    scanner = CallScanner(["weather"], lambda number: "id")
    scanner.feed('<tool_call>{"name": "weather", "arguments": {"ci')
    assert scanner.feed('ty": "Be') == [CallDelta(0, arguments='ty": "Be')]


@pytest.mark.parametrize("cut", range(45, len(WEATHER) + 10))
def test_a_call_that_was_cut_keeps_what_came_and_is_told(cut: int) -> None:
    """T2: the arguments are no JSON, the call is there all the same, and it is known as broken."""
    _, calls, scanner = scan([f"<tool_call>{WEATHER}"[:cut]])
    assert [call.name for call in calls] == ["weather"]
    assert ARGUMENTS.startswith(calls[0].arguments)
    assert not scanner.calls[0].whole
    if calls[0].arguments:
        assert scanner.broken == (0,)


def test_calls_that_an_engine_tells_apart_are_numbered_and_get_ids() -> None:
    scanner = CallScanner(["f"], lambda number: f"own_{number}")
    told = [
        CallDelta(3, "", "f", ""),
        CallDelta(3, "", "f", '{"a"'),
        CallDelta(3, "again", "", ":1}"),
        CallDelta(7, "theirs", "g"),
    ]
    assert [scanner.take(delta) for delta in told] == [
        CallDelta(0, "own_0", "f"),
        CallDelta(0, arguments='{"a"'),
        CallDelta(0, arguments=":1}"),
        CallDelta(1, "theirs", "g"),
    ]
    assert scanner.calls[0].parsed() == {"a": 1}
    assert not any(call.whole for call in scanner.calls), "whether more comes is for the engine to say"


words = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", WEATHER, '{"name": "weather", "arguments": ',
     "{", "}", "[", "]", '"', "\\", ",", " ", "\n", "text", "é", '"name"', ":", "<tool_", "null"]
)  # fmt: skip


@given(st.lists(words, max_size=12), st.data())
def test_no_answer_is_an_error_and_cuts_change_nothing(parts: list[str], data: st.DataObject) -> None:
    answer = "".join(parts)
    whole = scan([answer])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=6)))
    edges = [0, *cuts, len(answer)]
    pieces = [answer[a:b] for a, b in itertools.pairwise(edges)]
    assert scan(pieces)[:2] == whole[:2]


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=5) | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)
def test_every_argument_object_survives(value: object) -> None:
    arguments = {"value": value}
    text = json.dumps({"name": "weather", "arguments": arguments})
    _, [call], _ = scan([text[i : i + 2] for i in range(0, len(text), 2)])
    assert call.parsed() == arguments
