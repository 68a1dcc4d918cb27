"""Server-sent events: any text survives any chunking; bounds; nothing half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.sse import DONE, PING, SseEvent, SseParser, event


def chunked(data: bytes, sizes: list[int]) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return [*found, data[at:]]


def parsed(chunks: list[bytes], max_event_bytes: int = 1 << 16) -> list[SseEvent]:
    parser = SseParser(max_event_bytes)
    return [found for chunk in chunks for found in parser.feed(chunk)]


@settings(max_examples=200)
@given(st.lists(st.text(max_size=30), max_size=5), st.lists(st.integers(0, 9), max_size=60))
def test_events_survive_any_chunking(texts: list[str], sizes: list[int]) -> None:
    wire = b"".join(PING + event(text) for text in texts) + DONE
    want = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    found = parsed(chunked(wire, sizes))
    assert [e.data for e in found] == [*want, "[DONE]"]
    assert found[-1].done


@settings(max_examples=200)
@given(st.binary(max_size=120), st.lists(st.integers(0, 5), max_size=40))
def test_chunking_changes_nothing_for_any_bytes(wire: bytes, sizes: list[int]) -> None:
    def outcome(chunks: list[bytes]) -> list[SseEvent] | str:
        try:
            return parsed(chunks)
        except ProtocolError:
            return "refused"

    assert outcome(chunked(wire, sizes)) == outcome([wire])


@pytest.mark.parametrize("newline", [b"\n", b"\r", b"\r\n"])
def test_all_three_line_ends_are_read(newline: bytes) -> None:
    wire = newline.join([b"event: x", b"data: a", b"data:b", b"id: 7", b"", b""])
    for size in range(1, 5):
        chunks = [wire[at : at + size] for at in range(0, len(wire), size)]
        assert parsed(chunks) == [SseEvent("a\nb", "x")]


def test_a_byte_order_mark_is_skipped_at_the_start_only() -> None:
    wire = b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"
    assert parsed([wire]) == [SseEvent("a")]


def test_a_stream_that_is_cut_yields_no_half_event() -> None:
    assert parsed([event("whole"), b"data: ha"]) == [SseEvent("whole")]
    assert parsed([event("whole"), b"data: half\n"]) == [SseEvent("whole")]


def test_comments_alone_are_no_event() -> None:
    assert parsed([PING * 3]) == []


def test_the_largest_event_is_taken_and_one_byte_more_is_not() -> None:
    fits = b"data: " + b"x" * 58
    assert parsed([fits + b"\n\n"], max_event_bytes=64)[0].data == "x" * 58
    with pytest.raises(ProtocolError):
        parsed([fits + b"x\n\n"], max_event_bytes=64)


def test_an_endless_line_is_refused_before_it_is_kept() -> None:
    parser = SseParser(max_event_bytes=1000)
    with pytest.raises(ProtocolError):
        for _ in range(1000):
            parser.feed(b"x" * 10)


def test_endless_data_lines_are_refused() -> None:
    parser = SseParser(max_event_bytes=1000)
    with pytest.raises(ProtocolError):
        for _ in range(2000):
            parser.feed(b"data:\n")


def test_many_small_events_do_not_count_together() -> None:
    assert len(parsed([event("x" * 50)] * 100, max_event_bytes=64)) == 100


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(ProtocolError):
        parsed([b"data: \xff\n\n"])


def test_a_named_event() -> None:
    assert parsed([event("x", name="token")]) == [SseEvent("x", "token")]


_BITS = (b"data: ", b"data:", b"a", b": x", b"\n", b"\n\n", b"\r\n", b"\r", b"event: e\n", "ü".encode(), b"\xff")


@given(st.lists(st.lists(st.sampled_from(_BITS), max_size=5).map(b"".join), max_size=6))
def test_a_plain_chunk_says_what_the_parser_would_have_found(chunks: list[bytes]) -> None:
    shortened, parser = SseParser(), SseParser()
    try:
        for chunk in chunks:
            wanted = parser.feed(chunk)
            plain = shortened.plain(chunk)
            if plain is None:
                assert shortened.feed(chunk) == wanted
            else:
                assert [SseEvent(plain)] == wanted
    except ProtocolError:
        assert any(b"\xff" in chunk for chunk in chunks)
