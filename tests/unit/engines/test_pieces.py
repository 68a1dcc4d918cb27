"""Bytes to text across token boundaries."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from engines.pieces import PieceDecoder, unfinished_bytes

EMOJI = "\U0001f600".encode()


@given(st.text(), st.data())
def test_text_is_the_same_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw, decoder, shown = text.encode("utf-8", "surrogatepass"), PieceDecoder(), ""
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        shown += decoder.feed(raw[:cut])
        raw = raw[cut:]
    whole = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert shown + decoder.flush() == whole


def test_a_character_is_held_until_it_is_whole() -> None:
    decoder = PieceDecoder()
    assert [decoder.feed(EMOJI[i : i + 1]) for i in range(4)] == ["", "", "", "\U0001f600"]
    assert decoder.held == b""


def test_invalid_bytes_show_at_once_and_an_open_end_at_the_end() -> None:
    decoder = PieceDecoder()
    assert decoder.feed(b"a\xffb") == "a\ufffdb"
    assert decoder.feed(b"\xe2\x82") == ""
    assert decoder.held == b"\xe2\x82"
    assert decoder.flush() == "\ufffd"


def test_time_is_linear_in_the_length_even_with_invalid_bytes() -> None:
    def seconds(count: int) -> float:
        decoder, began_s = PieceDecoder(), time.process_time()
        for _ in range(count):
            decoder.feed(b"\xff ab")
        return time.process_time() - began_s

    seconds(2000)
    assert seconds(40_000) < 200 * max(seconds(2_000), 1e-4)


def test_unfinished_bytes() -> None:
    assert [unfinished_bytes(b"abc" + EMOJI[:n]) for n in range(5)] == [0, 1, 2, 3, 0]
    assert unfinished_bytes(b"") == 0
    assert unfinished_bytes(b"\x80\x80\x80\x80") == 0
