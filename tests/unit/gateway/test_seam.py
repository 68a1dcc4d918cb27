"""Where an answer may be cut."""

from __future__ import annotations

import pytest

from gateway.seam import between_words, ends_whole, inside_tool_call, may_cut


@pytest.mark.parametrize("text", ["é", "日", "👍"])
def test_never_inside_a_character(text: str) -> None:
    data = b"word " + text.encode()
    assert may_cut(data, None, by_ids=True)
    for length in range(1, len(text.encode())):
        assert not ends_whole(data[: len(b"word ") + length])
        assert not may_cut(data[: len(b"word ") + length], None, by_ids=True)


@pytest.mark.parametrize(
    ("answer", "inside"),
    [
        (b"plain text", False),
        (b"<tool_call>{", True),
        (b"<tool_call>{}</tool_call>", False),
        (b"<tool_call>{}</tool_call> and <tool_call>", True),
        (b"say <tool", True),
        (b"a < b", False),
        (b"a <", True),
        (b'[TOOL_CALLS][{"name"', True),
        (b'[TOOL_CALLS][{"name"}]\n\nok', False),
        (b"<|python_tag|>call()", True),
    ],
)
def test_never_inside_a_tool_call(answer: bytes, inside: bool) -> None:
    assert inside_tool_call(answer) is inside
    assert may_cut(answer, None, by_ids=True) is not inside


@pytest.mark.parametrize(
    ("answer", "following", "between"),
    [
        (b"the riv", b"er", False),
        (b"the river", b" runs", True),
        (b"the river", b".", True),
        (b"the ", b"river", False),
        (b"one\n", b"two", False),
        (b"one", b"\ntwo", True),
        (b"x=1", b"0", False),
        ("日本".encode(), "語".encode(), True),
        (b"", b"The", True),
        (b"end", b"", False),
        (b'"', b"quoted", True),
    ],
)
def test_the_text_path_cuts_between_words(answer: bytes, following: bytes, between: bool) -> None:
    assert between_words(answer, following) is between
    assert may_cut(answer, following, by_ids=False) is between


def test_the_text_path_needs_to_see_what_follows() -> None:
    assert not may_cut(b"the river", None, by_ids=False)
