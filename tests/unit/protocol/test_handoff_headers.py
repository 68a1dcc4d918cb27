"""Headers of handoff frames: every interleaving of streams is read as it was sent, whatever did not cross."""

from __future__ import annotations

import struct

import pytest
from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError, TooLarge
from protocol.handoff import (
    MAX_FRAME_BYTES,
    NO_STREAM,
    Ack,
    Extend,
    Finish,
    Frame,
    Framed,
    Prepare,
    Query,
    Refuse,
    Resume,
    Start,
    Stop,
    Tokens,
)
from protocol.handoff_headers import SLOTS, HandoffReader, HandoffWriter, header_bytes, whole_frame
from protocol.text import TextRequest, Token, Usage

STREAM = bytes(range(16))
RUN = (Token(3, 1379, b" place"),)
FRAMES: list[Frame] = [
    Prepare(TextRequest("m", "Hi")), Extend(3, RUN), Start(3, 64), Tokens(3, RUN, 5), Ack(4, 1234), Stop(3), Resume(5),
    Finish(3, "stop", Usage(1, 3)), Refuse("not_allowed"), Query("m"),
]  # fmt: skip


def stream_of(number: int, base: int = 0) -> bytes:
    return bytes([base]) + number.to_bytes(15, "big")


def named(data: bytes) -> int:
    """The slot that a frame names."""
    assert data[0] == 2 or 0x40 <= data[0] < 0x80
    return data[22] if data[0] == 2 else data[1]


def sent(writer: HandoffWriter, stream: bytes, epoch: int, frame: Frame) -> bytes:
    data = writer.encode(stream, epoch, frame)
    writer.sent()
    return data


@frozen
class Said:
    """One frame; `crossed` and `told`: whether the peer got it, and whether its sender learnt that it was sent."""

    stream: bytes
    epoch: int
    frame: Frame
    crossed: bool = True
    told: bool = field(default=True)


# Streams and epochs are few, so that they come again, and more than the slots, so that slots are given anew.
said = st.builds(
    lambda stream, epoch, frame, way: Said(stream_of(*stream), epoch, frame, *way),
    st.tuples(st.integers(0, 7), st.sampled_from([0, 0, 0, 1])),
    st.sampled_from([0, 1, 2, 255, 256, 2**32 - 1]),
    st.sampled_from(FRAMES),
    st.sampled_from([(True, True)] * 4 + [(True, False), (False, False)]),
)


@settings(max_examples=500)
@given(st.integers(1, 5), st.lists(said, max_size=60))
def test_whatever_is_sent_in_any_order_is_read_as_it_was_sent(slots: int, frames: list[Said]) -> None:
    """Sends may be cut off before or behind the moment at which their frame went out: one's own never know which."""
    writer, reader = HandoffWriter(slots), HandoffReader()
    for one in frames:
        data = writer.encode(one.stream, one.epoch, one.frame)
        if one.told:
            writer.sent()
        if one.crossed:
            assert reader.decode(data) == Framed(one.stream, one.epoch, one.frame)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.lists(said, max_size=20), st.booleans()), max_size=4))
def test_streams_go_on_over_new_connections_which_know_nothing(connections: list[tuple[list[Said], bool]]) -> None:
    for frames, resumes in connections:
        writer, reader = HandoffWriter(), HandoffReader()
        for one in frames:
            epoch = min(one.epoch, 255) + resumes
            assert reader.decode(sent(writer, one.stream, epoch, one.frame)) == Framed(one.stream, epoch, one.frame)


def test_the_first_frame_of_a_stream_names_a_slot_and_the_others_have_two_bytes_of_header() -> None:
    writer = HandoffWriter()
    first = sent(writer, STREAM, 1, Start(3, 64))
    assert first == b"\2\4" + STREAM + b"\0\0\0\1" + b"\0" + b"\x03\x40"
    assert sent(writer, STREAM, 1, Ack(4, 1234)) == b"\x86\0" + b"\x05\xd3\x09"
    again = sent(writer, STREAM, 2, Resume(5))
    assert again == b"\x48\1\2\x0e\x0f" + b"\5"
    assert sent(writer, STREAM, 2, Stop(5)) == b"\x87\1\5"
    assert sent(writer, STREAM[:-2] + b"zz", 1, Start(0, 1)) == b"\x44\2\1zz" + b"\0\1"
    assert sent(writer, STREAM[:-3] + b"zzz", 1, Start(0, 1))[:1] == b"\2", "it is not near"
    assert sent(writer, STREAM[:-3] + b"zzz", 256, Start(0, 1))[:1] == b"\2", "its epoch has two bytes"
    frames = (first, again, b"\x86\0\5\1", whole_frame(STREAM, 1, Stop(1)))
    assert [header_bytes(data) for data in frames] == [23, 5, 2, 22]


@pytest.mark.parametrize("frame", [Query("m"), Stop(0), Refuse("not_allowed"), Finish(3, "stop", Usage(1, 3))])
def test_questions_and_ends_name_no_slot_but_use_the_one_that_is_there(frame: Frame) -> None:
    writer = HandoffWriter()
    for _ in range(2):
        assert sent(writer, STREAM, 1, frame)[0] == 1
    assert sent(writer, NO_STREAM, 0, Start(0, 1))[0] == 1
    assert named(sent(writer, STREAM, 1, Start(0, 1))) == 0, "none was taken so far"
    assert sent(writer, STREAM, 1, frame)[0] >= 0x80


def test_a_stream_is_near_the_one_of_a_question_before_it() -> None:
    writer, reader = HandoffWriter(), HandoffReader()
    for stream, frame, size in (
        (stream_of(1), Query("m"), 22),
        (stream_of(2), Start(0, 1), 5),
        (STREAM, Ack(0, 1), 23),
    ):
        data = sent(writer, stream, 1, frame)
        assert header_bytes(data) == size
        assert reader.decode(data) == Framed(stream, 1, frame)


def test_slots_are_given_round_robin_and_the_stream_that_loses_one_is_named_again() -> None:
    writer, reader = HandoffWriter(), HandoffReader()
    for number in range(SLOTS):
        data = sent(writer, stream_of(number + 1), 1, Start(0, 1))
        assert named(data) == number
        reader.decode(data)
    for number in range(1, SLOTS + 1):
        assert len(sent(writer, stream_of(number), 1, Start(0, 1))) == 4
    assert named(sent(writer, stream_of(1000), 1, Start(0, 1))) == 0
    again = sent(writer, stream_of(1), 1, Start(0, 1))
    assert named(again) == 1
    assert reader.decode(again).stream == stream_of(1)


def test_no_later_header_refers_to_a_frame_that_may_not_have_crossed() -> None:
    writer, reader = HandoffWriter(2), HandoffReader()
    for number in (1, 2):
        reader.decode(sent(writer, stream_of(number), 1, Start(0, 1)))
    for first in (0x44, 2):  # the slot that was named belongs to nobody from then on, and no stream is near it
        assert writer.encode(stream_of(3), 1, Start(0, 1))[0] == first
    writer.encode(stream_of(1), 1, Ack(0, 1))
    assert reader.decode(sent(writer, stream_of(1), 1, Ack(1, 1))) == Framed(stream_of(1), 1, Ack(1, 1))
    assert reader.decode(sent(writer, stream_of(2), 1, Ack(2, 1))) == Framed(stream_of(2), 1, Ack(2, 1))


def test_a_frame_that_cannot_be_written_takes_no_slot() -> None:
    writer = HandoffWriter()
    with pytest.raises(TooLarge):
        writer.encode(STREAM, 1, Prepare(TextRequest("m", "x" * MAX_FRAME_BYTES)))
    with pytest.raises(ProtocolError):
        writer.encode(STREAM, 1, Prepare(TextRequest("m", "\ud800")))
    with pytest.raises(ProtocolError) as caught:
        writer.encode(STREAM[:-1], 1, Start(0, 1))
    assert caught.value.field == "stream"
    with pytest.raises(ProtocolError):
        writer.encode(STREAM, 1 << 32, Start(0, 1))
    writer.sent()
    assert named(sent(writer, STREAM, 1, Start(0, 1))) == 0


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"", "length"),
        (b"\1" + bytes(20), "length"),
        (b"\2" + bytes(21), "length"),
        (b"\x84", "length"),
        (b"\x44\0\1\0", "length"),
        (b"\x44\0\1\0\0\0\1", "stream"),
        (bytes(MAX_FRAME_BYTES + 1), "length"),
        (b"\0" * 30, "version"),
        (b"\3" + b"\4" * 30, "version"),
        (struct.pack(">BB16sI", 1, 99, STREAM, 1), "type"),
        (struct.pack(">BB16sIB", 2, 99, STREAM, 1, 0), "type"),
        (struct.pack(">BB16sIB", 2, 4, STREAM, 1, SLOTS) + b"\0\1", "slot"),
        (b"\x84\0\0\1", "slot"),
        (b"\x84\xff\0\1", "slot"),
    ],
)
def test_bad_headers_are_named(data: bytes, name: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        HandoffReader().decode(data)
    assert caught.value.field == name


def test_the_form_of_another_release_says_what_to_do() -> None:
    with pytest.raises(ProtocolError, match="version 3") as caught:
        HandoffReader().decode(b"\3" + bytes(30))
    assert caught.value.next_step == "update the older side"


def test_a_near_header_may_not_name_a_slot_that_is_not_there_either() -> None:
    reader = HandoffReader()
    reader.decode(whole_frame(STREAM, 1, Stop(1)))
    assert reader.decode(b"\x44\x7f\2zz\0\1") == Framed(STREAM[:-2] + b"zz", 2, Start(0, 1))
    with pytest.raises(ProtocolError) as caught:
        reader.decode(b"\x44\x80\2zz\0\1")
    assert caught.value.field == "slot"


def test_a_peer_that_names_no_slots_is_understood() -> None:
    reader = HandoffReader()
    for epoch in (1, 2, 1):
        assert reader.decode(whole_frame(STREAM, epoch, Ack(4, 7))) == Framed(STREAM, epoch, Ack(4, 7))
    with pytest.raises(ProtocolError):
        reader.decode(b"\x86\0\5\1")


def test_a_frame_that_is_no_frame_names_no_slot() -> None:
    reader = HandoffReader()
    with pytest.raises(ProtocolError):
        reader.decode(struct.pack(">BB16sIB", 2, 4, STREAM, 1, 0) + b"\0")
    for header, name in ((b"\x84\0", "slot"), (b"\x44\0\0zz", "stream")):
        with pytest.raises(ProtocolError) as caught:
            reader.decode(header + b"\0\1")
        assert caught.value.field == name


headers = st.one_of(
    st.binary(max_size=30),
    st.tuples(st.integers(0x80, 0x96), st.integers(0, 255)).map(bytes),
    st.tuples(st.integers(0x40, 0x56), st.integers(0, 255), st.integers(0, 2), st.just(0), st.integers(0, 3)).map(
        bytes
    ),
    st.tuples(st.integers(0, 22), st.integers(0, 3), st.integers(0, 255)).map(
        lambda drawn: struct.pack(">BB16sIB", 2, drawn[0], stream_of(drawn[1]), 1, drawn[2])
    ),
)


@settings(max_examples=500)
@given(st.lists(st.tuples(headers, st.binary(max_size=12)), max_size=30))
def test_any_frames_in_any_order_give_frames_or_protocol_errors(frames: list[tuple[bytes, bytes]]) -> None:
    """A short header gives the stream that its slot was named for, a near one a stream near the one before it."""
    reader = HandoffReader()
    held: dict[int, bytes] = {}
    base = b""
    for header, body in frames:
        data = header + body
        try:
            found = reader.decode(data)
        except ProtocolError:
            continue
        if data[0] >= 0x80:
            assert found.stream == held[data[1]]
            continue
        assert found.stream == (base + data[3:5] if data[0] >= 0x40 else data[2:18])
        base = found.stream[:-2]
        if data[0] != 1:
            held[named(data)] = found.stream
    assert all(slot < SLOTS for slot in held)


@settings(max_examples=200)
@given(st.sampled_from(FRAMES), st.booleans(), st.data())
def test_a_damaged_frame_gives_a_frame_or_a_protocol_error(frame: Frame, second: bool, data: st.DataObject) -> None:
    writer, reader = HandoffWriter(), HandoffReader()
    if second:
        reader.decode(sent(writer, STREAM, 1, Start(0, 1)))
    whole = sent(writer, STREAM, 1, frame)
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255))
    damaged = data.draw(st.sampled_from([whole[:at], whole + b"\0", whole[:at] + bytes([byte]) + whole[at + 1 :]]))
    try:
        found = reader.decode(damaged)
    except ProtocolError as err:
        assert err.message
    else:
        assert len(found.stream) == len(STREAM) and found.frame is not None
