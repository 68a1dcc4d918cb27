"""What may follow a text under a grammar: laws over random grammars and texts, JSON schemas, and broken grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import BadRequest, Unsupported
from protocol.gbnf import parse, rest
from protocol.schema_grammar import schema_grammar

ARITHMETIC = """
# sums of products
root ::= product ("+" product)*   # no minus
product ::= atom ("*" atom)*
atom ::= [0-9]+ | "(" root ")"
"""
CHESS = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n"){0,3}
move ::= (pawn | "O-O" "-O"?) [+#]?
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
"""
OTHERS = r"""
root ::= [^a-y\n"] . "\"é\u65E5" ("x"
    | "yy")+
  | ""
"""


def whole(grammar: str, text: str) -> bool:
    """Whether `text` is a complete sentence."""
    parsed = parse(grammar)
    return None in parsed.after(parsed.start(), text)


def begun(grammar: str, text: str) -> bool:
    parsed = parse(grammar)
    return bool(parsed.after(parsed.start(), text))


@pytest.mark.parametrize(
    ("grammar", "text", "complete"),
    [
        (ARITHMETIC, "12+(3*4)+5", True),
        (ARITHMETIC, "12+(3*4", False),
        (CHESS, "1. e4 e5\n2. exd5 O-O-O+\n", True),
        (CHESS, "1. e4", False),
        (OTHERS, "", True),
        (OTHERS, 'zz"é日xyyx', True),
        (OTHERS, 'zz"é日', False),
    ],
)
def test_grammars_say_what_they_take(grammar: str, text: str, complete: bool) -> None:
    assert begun(grammar, text)
    assert whole(grammar, text) is complete
    assert not begun(grammar, text + "c")


SENTENCES = st.one_of(
    st.tuples(st.just(ARITHMETIC), st.sampled_from(["1", "12+(3*4)+5", "((7))*8+9", "(1+2)*(3+4)"])),
    st.tuples(st.just(CHESS), st.sampled_from(["1. e4 e5\n", "1. exd8=Q# O-O\n2. a1 h8\n3. b2 c3+\n"])),
    st.tuples(st.just(OTHERS), st.sampled_from(['z""é日x', 'Aq"é日yyx'])),
)


@given(SENTENCES, st.data())
def test_the_rest_takes_exactly_what_completes_the_text(sentence: tuple[str, str], data: Any) -> None:
    """Law: s is in rest(G, p) exactly if p + s is in G; also for the rest of a rest."""
    grammar, text = sentence
    at = data.draw(st.integers(0, len(text)))
    left = rest(grammar, text[:at])
    assert whole(left, text[at:])
    middle = data.draw(st.integers(at, len(text)))
    assert whole(rest(left, text[at:middle]), text[middle:])
    other = data.draw(st.text(alphabet="0123456789+*()xyexd8=QO-#\n. ", max_size=6))
    assert whole(left, other) is whole(grammar, text[:at] + other)


def test_a_text_that_does_not_fit_has_no_rest() -> None:
    with pytest.raises(BadRequest, match="does not fit"):
        rest(ARITHMETIC, "1+a")


BROKEN = (
    "",
    "root = x",
    "root ::= missing",
    'root ::= "a',
    "root ::= [a",
    'root ::= ("a"',
    r'root ::= "\xZZ"',
    "root ::= [z-a]",
    'root ::= "a"{3,1}',
    'root ::= "a"{5000}',
    "root ::= " + "(" * 100,
    'x ::= "a"',
    "root ::= \\",
)


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_grammars_are_refused_with_the_field(broken: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(broken)
    assert caught.value.field == "grammar"


def test_grammars_without_end_are_refused_and_do_not_hang() -> None:
    with pytest.raises(Unsupported):
        parse("%llguidance {}\nstart: x")
    with pytest.raises(Unsupported, match="too many readings"):
        rest('root ::= root root | "a" root | ""', "aaaa")


PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": ["integer", "null"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", 3]}, "minItems": 1, "maxItems": 3},
        "parent": {"$ref": "#"},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"type": "string"}, {"const": {"lat": 1}}]}},
}
FITTING = [
    {"name": "Ada", "tags": ["a"]},
    {"name": 'Ä\n"日', "age": None, "tags": ["a", "b c", 3]},
    {"name": "x", "age": -12, "tags": [3], "parent": {"name": "y", "tags": ["a"]}, "home": {"lat": 1}},
]


@pytest.mark.parametrize("document", FITTING)
@pytest.mark.parametrize("indent", [None, 2])
def test_documents_that_fit_a_schema_fit_its_grammar(document: Any, indent: int | None) -> None:
    # A constant is written in one way only.
    text = json.dumps(document, indent=indent, ensure_ascii=indent is None).replace('{\n    "lat": 1\n  }', '{"lat":1}')
    text = text.replace('{"lat": 1}', '{"lat":1}')
    grammar = schema_grammar(PERSON)
    assert whole(grammar, text)
    for at in range(0, len(text), 7):
        assert whole(rest(grammar, text[:at]), text[at:])


UNFIT = (
    '{"tags": ["a"]}',
    '{"name": "", "tags": ["a"]}',
    '{"name": "x", "tags": []}',
    '{"name": "x", "tags": ["c"]}',
    '{"name": "x", "tags": ["a", "a", "a", "a"]}',
    '{"name": "x", "tags": ["a"], "more": 1}',
    '["x"]',
    '{"name": "x", "age": 1.5, "tags": ["a"]}',
    '{"name": "x", "tags": ["a"], "home": 3}',
)


@pytest.mark.parametrize("document", UNFIT)
def test_documents_that_do_not_fit_do_not(document: str) -> None:
    assert not whole(schema_grammar(PERSON), document)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_json_fits_the_open_schema(value: Any) -> None:
    text = json.dumps(value)
    assert whole(schema_grammar({}), text)
    if isinstance(value, dict):
        assert whole(schema_grammar({"type": "object"}), text)


@pytest.mark.parametrize("keyword", ["pattern", "format", "minimum", "uniqueItems", "patternProperties", "not"])
def test_what_a_grammar_cannot_honour_is_refused(keyword: str) -> None:
    with pytest.raises(Unsupported, match=keyword):
        schema_grammar({"type": "object", "properties": {"x": {keyword: 1}}})
