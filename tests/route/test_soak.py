"""The soak's judge: what it lets pass and what it does not; and a short soak."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from benchmarks.soak import measure, slope_per_h
from benchmarks.soak_requests import Asked, Mix, fault_of


def answer(status: int, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\n{headers}\r\n".encode() + body


def whole(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()


def events(*chunks: Mapping[str, object], done: bool = True) -> bytes:
    lines = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    return lines + (b"data: [DONE]\n\n" if done else b"")


WORD = {"choices": [{"delta": {"content": "right"}, "finish_reason": None}]}
END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
ERROR = {"error": {"message": "cut"}}


@pytest.mark.parametrize(
    ("asked", "got", "explained"),
    [
        (Asked("a", b"", wanted="right"), answer(200, whole("right")), True),
        (Asked("a", b"", wanted="right"), answer(200, whole("wrong")), False),
        (Asked("a", b""), answer(500, b'{"error": {}}'), False),
        (Asked("a", b"", allowed=frozenset({500})), answer(500, b'{"error": {}}'), True),
        (Asked("a", b"", allowed=frozenset({500})), answer(500, b"oops"), False),
        (Asked("a", b"", allowed=frozenset({429})), answer(429, b'{"error": {}}'), False),
        (Asked("a", b"", allowed=frozenset({429})), answer(429, b'{"error": {}}', "retry-after: 1\r\n"), True),
        (Asked("a", b"", stream=True, wanted="right"), answer(200, events(WORD, END)), True),
        (Asked("a", b"", stream=True), answer(200, events(WORD, done=False)), False),
        (Asked("a", b"", stream=True), answer(200, events(WORD, ERROR, done=False)), False),
        (Asked("a", b"", stream=True, cut_allowed=True), answer(200, events(WORD, ERROR, done=False)), True),
        (Asked("a", b"", stream=True, cut_allowed=True), answer(200, events(WORD, ERROR)), False),
    ],
)
def test_only_what_a_fault_or_a_limit_says_is_explained(asked: Asked, got: bytes, explained: bool) -> None:
    assert (fault_of(asked, got) == "") is explained


def test_the_mix_is_the_same_for_the_same_seed_and_has_every_kind() -> None:
    first, second = Mix(3), Mix(3)
    kinds = set()
    for _ in range(600):
        one = first.next()
        kinds.add(one.kind)
        assert one == second.next()
    assert len(kinds) == 11


def test_a_slope_is_in_units_per_hour() -> None:
    assert slope_per_h([(0.0, 10.0), (60.0, 11.0), (120.0, 12.0)]) == pytest.approx(60.0)
    assert slope_per_h([(0.0, 10.0)]) == 0.0


@pytest.mark.slow
@pytest.mark.alone
async def test_a_short_soak_leaves_nothing_unexplained() -> None:
    soak = await measure(8.0)
    assert soak.unexplained == 0, soak.examples
    assert soak.requests > 100
