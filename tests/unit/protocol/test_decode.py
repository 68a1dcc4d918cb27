"""Strict decoding: round trips, wrong types with their path, bounds at the maximum and one past it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.decode import (
    MAX_DEPTH,
    MAX_DOCUMENT_BYTES,
    check_schema,
    decode,
    decode_listing,
    encode,
    load_json,
)
from protocol.errors import ProtocolError, TooLarge
from protocol.policy import Policy, SplitPolicy


@frozen
class Inner:
    ratio: float
    names: tuple[str, ...] = ()


@frozen
class Outer:
    flag: bool
    count: int
    text: str
    inner: Inner
    kind: Literal["a", "b"] = "a"
    maybe: int | None = None
    pair: tuple[int, str] = (0, "")
    table: Mapping[str, Inner] = field(factory=dict)
    biases: Mapping[int, float] = field(factory=dict)
    raw: bytes = b""
    tags: frozenset[str] = frozenset()
    anything: Any = None


GOOD: dict[str, Any] = {"flag": True, "count": 1, "text": "x", "inner": {"ratio": 1.5}}

inners = st.builds(
    Inner,
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    names=st.lists(st.text(max_size=8)).map(tuple),
)
texts = st.text(max_size=20)
outers = st.builds(
    Outer,
    flag=st.booleans(),
    count=st.integers(-(2**60), 2**60),
    text=texts,
    inner=inners,
    kind=st.sampled_from(["a", "b"]),
    maybe=st.none() | st.integers(-5, 5),
    pair=st.tuples(st.integers(0, 9), texts),
    table=st.dictionaries(texts, inners, max_size=3),
    biases=st.dictionaries(st.integers(-9, 9), st.floats(-1, 1), max_size=3),
    raw=st.binary(max_size=20),
    tags=st.frozensets(texts, max_size=3),
)


@settings(max_examples=100)
@given(outers)
def test_what_is_encoded_decodes_to_the_same(document: Outer) -> None:
    assert decode(Outer, encode(document), what="document") == document


def test_encoding_does_not_depend_on_the_order_of_keys() -> None:
    one = Outer(flag=True, count=1, text="", inner=Inner(0.0), biases={1: 0.5, 2: 0.25})
    two = Outer(flag=True, count=1, text="", inner=Inner(0.0), biases={2: 0.25, 1: 0.5})
    assert encode(one) == encode(two)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"flag": 1}, "flag"),
        ({"flag": "true"}, "flag"),
        ({"count": True}, "count"),
        ({"count": 1.0}, "count"),
        ({"count": "1"}, "count"),
        ({"text": 3}, "text"),
        ({"text": None}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"inner": {"ratio": "1"}}, "inner.ratio"),
        ({"inner": {"ratio": True}}, "inner.ratio"),
        ({"inner": {"ratio": 10**400}}, "inner.ratio"),
        ({"inner": {}}, "inner.ratio"),
        ({"inner": []}, "inner"),
        ({"inner": {"ratio": 1, "names": "abc"}}, "inner.names"),
        ({"inner": {"ratio": 1, "names": ["a", 1]}}, "inner.names[1]"),
        ({"kind": "c"}, "kind"),
        ({"kind": None}, "kind"),
        ({"maybe": "x"}, "maybe"),
        ({"pair": [1]}, "pair"),
        ({"pair": [1, 2]}, "pair[1]"),
        ({"table": {"k": {"ratio": None}}}, "table.k.ratio"),
        ({"table": []}, "table"),
        ({"biases": {"x": 1}}, "biases"),
        ({"raw": "***"}, "raw"),
        ({"raw": "ä"}, "raw"),
        ({"tags": {"a": 1}}, "tags"),
    ],
)
def test_a_wrong_value_is_refused_and_named(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(Outer, {**GOOD, **change}, what="document")
    assert caught.value.field == path
    assert path in str(caught.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(Outer, {"flag": True}, what="document")
    assert caught.value.field == "count"


def test_an_integer_may_stand_for_a_float() -> None:
    assert decode(Inner, b'{"ratio":2}', what="inner").ratio == 2.0


def test_unknown_fields_are_ignored_and_listed() -> None:
    raw = {**GOOD, "later": 1, "inner": {"ratio": 1, "newer": {}}}
    document, unknown = decode_listing(Outer, raw, what="document")
    assert document.inner == Inner(1.0)
    assert sorted(unknown) == ["inner.newer", "later"]


def test_an_unknown_field_of_an_abandoned_union_branch_is_not_listed() -> None:
    @frozen
    class Choice:
        value: Inner | str

    _, unknown = decode_listing(Choice, {"value": "x"}, what="choice")
    assert unknown == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nul",
        b"\xff{}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":1,"a":2}',
    ],
)
def test_what_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        load_json(data, what="document")


def test_utf16_is_not_guessed() -> None:
    with pytest.raises(ProtocolError):
        load_json('{"a":1}'.encode("utf-16"), what="document")


def test_a_number_of_too_many_digits_is_refused() -> None:
    with pytest.raises(ProtocolError):
        load_json(b"[" + b"9" * 5000 + b"]", what="document")


def test_a_key_that_appears_twice_after_many_others_is_found_in_one_pass() -> None:
    """Looking back at all keys for each of them would hold the event loop for an hour."""
    many = b",".join(b'"%d":0' % number for number in range(300_000))
    with pytest.raises(ProtocolError, match="'a' appears twice"):
        load_json(b"{" + many + b',"a":0,"a":0}', what="document", max_bytes=8 << 20)


def test_the_largest_document_is_taken_and_one_byte_more_is_not() -> None:
    body = json.dumps({"ratio": 1, "pad": ""}).encode()
    full = body[:-2] + b"x" * (MAX_DOCUMENT_BYTES - len(body)) + b'"}'
    assert len(full) == MAX_DOCUMENT_BYTES
    assert decode(Inner, full, what="inner") == Inner(1.0)
    with pytest.raises(TooLarge):
        decode(Inner, full + b" ", what="inner")


def test_the_deepest_document_is_taken_and_one_level_more_is_not() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    load_json(nested(MAX_DEPTH + 1), what="document")  # the outermost list is level 0
    with pytest.raises(ProtocolError, match="levels deep"):
        load_json(nested(MAX_DEPTH + 2), what="document")


def test_nesting_beyond_the_parser_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(ProtocolError, match="levels deep"):
        load_json(b"[" * 30_000 + b"]" * 30_000, what="document")
    with pytest.raises(ProtocolError, match="levels deep"):
        load_json(b"[" * 30_000 + b"]" * 30_000, what="document", bulk=True)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_document_or_an_error_of_ours(data: bytes) -> None:
    try:
        found = decode(Policy, data, what="policy")
    except ProtocolError as err:
        assert "policy" in err.message or err.field is not None
    else:
        assert isinstance(found, Policy)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(["flag", "count", "text", "inner", "pair", "table", "raw"]), json_values))
def test_any_json_gives_a_document_or_an_error_of_ours(raw: dict[str, Any]) -> None:
    try:
        found = decode(Outer, raw, what="document")
    except ProtocolError as err:
        assert err.field is not None
    else:
        assert isinstance(found, Outer)


def test_a_whole_policy_comes_back() -> None:
    policy = Policy(selector={"room": "lab"}, split=SplitPolicy(deadline_s=0.5, codecs=("int8",)))
    assert decode(Policy, encode(policy), what="policy") == policy


def test_paths_for_configuration() -> None:
    @frozen
    class Place:
        path: Path

    assert decode(Place, {"path": "a/b"}, what="place").path == Path("a/b")
    with pytest.raises(ProtocolError):
        decode(Place, {"path": "a\0b"}, what="place")


@pytest.mark.parametrize("found", ["midstream.policy/1.0", "midstream.policy/1.7"])
def test_a_newer_minor_version_is_readable(found: str) -> None:
    check_schema(found, "midstream.policy/1.0")


@pytest.mark.parametrize(
    "found", ["midstream.policy/2.0", "other/1.0", "midstream.policy", "midstream.policy/1", "", "/1.0"]
)
def test_another_major_version_or_name_is_refused(found: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_schema(found, "midstream.policy/1.0")
    assert caught.value.field == "schema"
