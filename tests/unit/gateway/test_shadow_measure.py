"""How alike two answers are, and what is kept of it: numbers, never words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.shadow_measure import MAX_WORDS, Difference, Told, compared, fields_of, similarity, told
from protocol.text import Message


def call(name: str, arguments: str = "{}") -> dict[str, object]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


@given(st.text(), st.text())
def test_a_measure_is_a_share_and_takes_no_side(old: str, other: str) -> None:
    ratio = similarity(old, other)
    assert 0.0 <= ratio <= 1.0
    assert ratio == similarity(other, old)
    assert similarity(old, old) == 1.0


@pytest.mark.parametrize(
    ("old", "other", "ratio"),
    [
        ("Paris is the capital.", "the capital is PARIS", 1.0),
        ("yes", "no", 0.0),
        ("", "something", 0.0),
        ("", "!?", 1.0),
        ("十五度", "十六度", 2 / 3),
        ("a a a b", "a b", 2 / 3),
        ("3.5 km", "3,5 km", 0.5),
    ],
)
def test_words_are_counted(old: str, other: str, ratio: float) -> None:
    assert similarity(old, other) == pytest.approx(ratio)


def test_long_texts_are_measured_by_their_beginning() -> None:
    assert similarity("a " * MAX_WORDS + "b " * 1000, "a " * MAX_WORDS) == 1.0


def test_answers_that_call_other_functions_are_not_alike() -> None:
    same = Message("assistant", "", tool_calls=(call("weather", '{"city": "Oslo"}'),))
    other = Message("assistant", "", tool_calls=(call("news", '{"city": "Oslo"}'),))
    assert compared(same, same, 0.5) == (1.0, True)
    assert compared(same, other, 0.5) == (1.0, False)
    assert compared(Message("assistant", "yes it is"), Message("assistant", "no it was not"), 0.5)[1] is False


def test_no_word_of_an_answer_is_kept() -> None:
    message = Message("assistant", "the secret harbour", tool_calls=(call("weather", '{"city": "secret"}'),))
    one = told("cloud", "m", "ok", "stop", message, 3, 0.1234567, 1.0, 0.01)
    kept = fields_of(Difference("r", "acme", "qa", "rules", "a rule", one, one, 1.0, True))
    assert "secret" not in json.dumps(kept)
    assert kept["other"]["chars"] == len("the secret harbour")
    assert kept["other"]["calls"] == ["weather"]
    assert isinstance(one, Told)
