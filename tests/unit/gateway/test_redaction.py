"""Placeholders: what leaves holds no value, what comes back is the same whatever the pieces, and none can be forged."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.detectors import Detectors
from gateway.redaction import WORDS, Placeholders, placeholders_for
from protocol.policy_privacy import PrivacyPolicy

DETECTORS = Detectors(PrivacyPolicy(names=('Zoë "Z"', "李雷")))
SECRET = b"s" * 32

VALUES = st.sampled_from(
    ["a@b.com", "x.y@example.org", "13812345678", "4111111111111111", "192.168.7.9", "李雷", "sk-abcdefghijklmnop1234"]
)
WORDINGS = st.sampled_from(["EMAIL_", "EMAIL_AAAAAAAA", "NAME_ABC", "PHONE", "_", "E", "EM", "SECRET_", "hello ", "，"])
TEXTS = st.lists(st.one_of(VALUES, WORDINGS, st.text(max_size=8)), max_size=12).map(" ".join)


def redacted(text: str, scope: str = "t") -> tuple[Placeholders, str]:
    made, changed = placeholders_for([(text, DETECTORS.spans(text))], SECRET, scope)
    return made, changed[0]


def restored(made: Placeholders, pieces: list[str]) -> str:
    restorer = made.restorer()
    return "".join([*(restorer.feed(piece) for piece in pieces), restorer.flush()])


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(edges)]


@given(TEXTS, st.lists(st.integers(0, 200), max_size=20))
def test_any_pieces_give_the_text_back(text: str, places: list[int]) -> None:
    made, left = redacted(text)
    assert restored(made, cut(left, places)) == text
    assert restored(made, list(left)) == text


@given(TEXTS, TEXTS, st.lists(st.integers(0, 400), max_size=20))
def test_an_answer_is_restored_alike_in_one_piece_and_in_many(text: str, answer: str, places: list[int]) -> None:
    made, left = redacted(text)
    answer = answer.join(made.values) + left[::2] + answer
    assert restored(made, cut(answer, places)) == restored(made, [answer])


@given(TEXTS)
def test_what_leaves_holds_no_value_that_was_found(text: str) -> None:
    made, left = redacted(text)
    assert all(value not in left for value in made.values.values())
    assert DETECTORS.spans(left) == ()


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_a_user_who_knows_a_placeholder_cannot_use_it(values: list[str]) -> None:
    """The strongest forger has seen the placeholders of exactly these values, and writes them into the next text."""
    first, _ = redacted(" ".join(values))
    forged = " ".join([*values, *first.values])
    made, left = redacted(forged)
    assert not set(made.values) & set(first.values)
    assert restored(made, [left]) == forged


def test_one_value_has_one_placeholder_through_a_conversation_and_others_elsewhere() -> None:
    first, _ = redacted("ask a@b.com")
    later, left = redacted("ask a@b.com and 13812345678, then a@b.com again")
    assert set(first.values) < set(later.values)
    assert left.count(next(iter(first.values))) == 2
    assert not set(redacted("ask a@b.com", scope="other")[0].values) & set(first.values)


def test_no_word_of_a_placeholder_ends_in_another_one() -> None:
    words = list(WORDS.values())
    assert not any(one != other and one.endswith(other) for one in words for other in words)


def test_arguments_of_a_tool_call_stay_json() -> None:
    made, left = redacted('write to Zoë "Z" now')
    restorer = made.restorer()
    arguments = json.dumps({"to": next(iter(made.values))})
    text = "".join(restorer.feed(piece, in_json=True) for piece in arguments) + restorer.flush()
    assert json.loads(text) == {"to": 'Zoë "Z"'}
    assert restored(made, [left]) == 'write to Zoë "Z" now'
    whole = made.restorer(all_json=True)
    assert json.loads(whole.feed(arguments) + whole.flush()) == {"to": 'Zoë "Z"'}


def test_values_are_in_no_representation() -> None:
    made, _ = redacted("ask a@b.com")
    restorer = made.restorer()
    restorer.feed("so EMAIL_")
    assert "a@b.com" not in repr(made) + repr(restorer)


TWISTED = {
    name: f"<{at}_>" for at, name in enumerate(("EMAIL_ABCDNAME", "NAME_WXYZABCD", "NAME_NAMENAME", "PHONE_SECRETPH"))
}
FRAGMENTS = [*TWISTED, *(name[:length] for name in TWISTED for length in range(1, len(name))), "_", "_ABCDNAME", " "]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.lists(st.integers(0, 80), max_size=12))
def test_placeholders_that_overlap_are_restored_alike_in_any_pieces(text: str, places: list[int]) -> None:
    made = Placeholders(TWISTED)
    assert restored(made, cut(text, places)) == made.restorer().whole(text)
