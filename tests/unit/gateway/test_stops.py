"""Stop strings over token bytes: against a plain search in the whole text, at any division into tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.stops import Owned, Piece, StopScanner
from protocol.text import Token


def owned(parts: list[bytes], seam: int = 10**9) -> list[Owned]:
    return [
        Owned(Token(index=index, id=index, data=data), "device" if index < seam else "cloud")
        for index, data in enumerate(parts)
    ]


def scan(scanner: StopScanner, tokens: list[Owned]) -> list[Piece]:
    pieces = [piece for token in tokens for piece in scanner.feed(token)]
    return pieces + scanner.flush()


def divide(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)] or [b""]


@given(
    text=st.text(alphabet="abé日 \n", max_size=40),
    stops=st.lists(st.text(alphabet="abé日", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 80), max_size=30),
)
@example(text="baa", stops=["a", "baa"], cuts=[2])
def test_any_division_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    places = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    expected = text[: min(places)[1]] if places else text  # of the one that is whole first
    scanner = StopScanner(stops)
    pieces = scan(scanner, owned(divide(text.encode(), cuts)))
    assert "".join(piece.text for piece in pieces) == expected
    assert (scanner.hit is not None) == bool(places)


@given(text=st.text(alphabet="abé日", max_size=40), cuts=st.lists(st.integers(0, 120), max_size=60))
def test_every_token_belongs_to_one_piece_in_order(text: str, cuts: list[int]) -> None:
    """U, logprobs: entries line up with the text whatever is held back."""
    tokens = owned(divide(text.encode(), cuts))
    pieces = scan(StopScanner(["zz", "日日日日"]) if "日日日日" not in text else StopScanner(["zz"]), tokens)
    assert [one for piece in pieces for one in piece.tokens] == tokens
    for piece in pieces:
        assert b"".join(one.token.data for one in piece.tokens).decode() == piece.text


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=40))
def test_bytes_that_are_no_text_come_out_as_replacement_and_never_stall(data: bytes, cuts: list[int]) -> None:
    """X1, X2: nothing is dropped and nothing raises."""
    pieces = scan(StopScanner(["never"]), owned(divide(data, cuts)))
    assert "".join(piece.text for piece in pieces) == data.decode("utf-8", "replace")


def test_an_invalid_byte_does_not_hold_what_follows() -> None:
    scanner = StopScanner([])
    assert scanner.feed(owned([b"\xff"])[0])[0].text == "\ufffd"


def test_no_part_of_a_stop_string_leaks_before_it_is_decided() -> None:
    scanner = StopScanner(["</end>"])
    shown = [[piece.text for piece in scanner.feed(one)] for one in owned([b"a", b"</", b"en", b"d", b">b"])]
    assert shown == [["a"], [], [], [], []]
    assert scanner.hit == "</end>"


def test_what_looked_like_a_stop_string_comes_when_it_is_none() -> None:
    scanner = StopScanner(["</end>"])
    shown = [[piece.text for piece in scanner.feed(one)] for one in owned([b"a", b"</", b"en", b"x", b"b"])]
    assert shown == [["a"], [], [], ["</", "en", "x"], ["b"]]


def test_a_stop_string_across_the_seam_of_two_engines() -> None:
    scanner = StopScanner(["STOP"])
    pieces = scan(scanner, owned([b"one ", b"ST", b"OP", b" two"], seam=2))
    assert [(piece.text, piece.side) for piece in pieces] == [("one ", "device")]
    assert scanner.hit == "STOP"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    scanner = StopScanner(["later", "now"])
    assert "".join(piece.text for piece in scan(scanner, owned([b"x now later"]))) == "x "
    assert scanner.hit == "now"


def test_a_token_that_the_stop_divides_comes_with_its_part() -> None:
    pieces = scan(StopScanner(["END"]), owned([b"ab", b"cEN", b"Dd"]))
    assert [(piece.text, [one.token.index for one in piece.tokens]) for piece in pieces] == [("ab", [0]), ("c", [1])]
