"""Tensor frames: round trips of every frame, garbage, announced lengths that are not there."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import tensor_frames
from protocol.errors import ProtocolError, TooLarge
from protocol.handoff_frames import Refuse
from protocol.oip_fields import MAX_BODY_BYTES
from protocol.tensor_frames import (
    KEPT_HEADS,
    LAST,
    MAX_FRAME_BYTES,
    VERSION,
    Answer,
    Ask,
    BrokenFrame,
    Cancel,
    Credit,
    Data,
    Hello,
    Received,
    TensorHead,
    decode,
    encode,
    heads_of,
    tensors_of,
)
from protocol.tensors import Tensor

numbers = st.integers(0, (1 << 63) - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
heads = st.lists(
    st.builds(
        TensorHead,
        name=texts,
        datatype=st.sampled_from(["FP32", "UINT8", "BYTES"]),
        shape=st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple),
        size_bytes=st.integers(0, 1 << 20),
    ),
    max_size=4,
    unique_by=lambda head: head.name,
).map(tuple)
packed = st.integers(0, MAX_BODY_BYTES)
frames = st.one_of(
    st.builds(Hello, numbers, numbers, numbers, numbers, numbers),
    st.builds(Ask, texts, texts, st.integers(0, 1 << 40), heads, packed, st.binary(max_size=64)),
    st.builds(Answer, texts, numbers, numbers, heads, packed, st.binary(max_size=64)),
    st.builds(Data, st.binary(max_size=64)),
    st.builds(Received, numbers),
    st.builds(Credit, numbers),
    st.just(Cancel()),
    st.builds(Refuse, code=texts, message=texts),
)


@given(frames, st.integers(0, (1 << 32) - 1), st.integers(0, 3))
def test_every_frame_comes_back_as_it_was(frame: Any, request: int, flags: int) -> None:
    framed = decode(encode(request, frame, flags))
    assert (framed.request, framed.flags) == (request, flags)
    assert framed.frame == frame


@given(st.binary(max_size=80))
@example(struct.pack(">BBBBI", VERSION, 2, 0, 0, 1))
@example(struct.pack(">BBBBI", VERSION, 4, 0, 0, 1) + b"\xff" * 20)
def test_garbage_is_a_protocol_error_and_nothing_else(data: bytes) -> None:
    _read(data)


@given(frames, st.data())
def test_a_damaged_frame_is_a_protocol_error_and_nothing_else(frame: Any, data: st.DataObject) -> None:
    whole = bytearray(encode(7, frame))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    _read(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def _read(data: bytes) -> None:
    """A frame of the request that its head names, or our error."""
    try:
        framed = decode(data)
    except ProtocolError as err:
        assert err.message
    else:
        assert framed.request == struct.unpack_from(">I", data, 4)[0]


def test_a_wrong_body_names_its_request_and_a_wrong_version_the_stream() -> None:
    with pytest.raises(BrokenFrame) as broken:
        decode(encode(9, Ask("m", "", 1, ()))[:-2])
    assert broken.value.request == 9
    with pytest.raises(ProtocolError, match="version 2") as old:
        decode(b"\x02" + encode(9, Cancel())[1:])
    assert not isinstance(old.value, BrokenFrame)


def test_more_than_a_body_may_have_is_refused_by_its_announcement() -> None:
    half = MAX_BODY_BYTES // 2 + 1
    announced = tuple(TensorHead(name, "UINT8", (half,), half) for name in "ab")
    with pytest.raises(ProtocolError, match="size_bytes"):
        decode(encode(1, Ask("m", "", 1, announced)))
    with pytest.raises(TooLarge):
        heads_of([Tensor(name, "UINT8", (half,), bytes(half)) for name in "ab"])


def test_names_are_not_doubled() -> None:
    twice = (TensorHead("x", "UINT8", (1,), 1),) * 2
    with pytest.raises(ProtocolError, match="same name"):
        decode(encode(1, Ask("m", "", 1, twice)))


def test_a_frame_has_its_bound() -> None:
    with pytest.raises(TooLarge):
        encode(1, Data(bytes(MAX_FRAME_BYTES)), LAST)
    with pytest.raises(ProtocolError):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_tensors_share_the_buffer_they_arrived_in() -> None:
    sent = (Tensor("a", "UINT8", (3,), b"abc"), Tensor("b", "FP32", (1,), b"defg"))
    buffer = memoryview(b"abcdefg")
    found = tensors_of(heads_of(sent), buffer)
    assert [bytes(tensor.data) for tensor in found] == [b"abc", b"defg"]
    assert all(isinstance(tensor.data, memoryview) and tensor.data.obj is buffer.obj for tensor in found)


def test_heads_of_a_model_that_were_read_before_are_told_from_others() -> None:
    data = bytes(range(64))
    forms = [
        (TensorHead("x", "UINT8", (64,), 64),),
        (TensorHead("x", "UINT8", (8, 8), 64),),
        (TensorHead("x", "UINT8", (32,), 32), TensorHead("y", "UINT8", (32,), 32)),
    ]
    for heads in [*forms, *forms, forms[0], forms[0]]:
        ask = Ask("repeated", "id", 5, heads, 0, data)
        found = decode(encode(3, ask, LAST)).frame
        assert isinstance(found, Ask)
        assert (found.tensors, bytes(found.data)) == (heads, data)


def test_what_is_said_of_tensors_at_length_is_not_kept() -> None:
    short = tuple(TensorHead(f"kept {number}", "UINT8", (1,), 1) for number in range(8))
    long = tuple(TensorHead(f"{number:0100}", "UINT8", (1,), 1) for number in range(8))
    for heads in (short, long):
        ask = Ask("lengths", "id", 5, heads, 0, bytes(8))
        found = [decode(encode(3, ask, LAST)).frame for _ in range(2)]
        assert found[0] == found[1] and isinstance(found[0], Ask) and found[0].tensors == heads
    assert short in tensor_frames._written_before
    assert long not in tensor_frames._written_before
    for number in range(2 * KEPT_HEADS):
        encode(3, Ask("lengths", "id", 5, (TensorHead("x", "UINT8", (number,), number),), 0))
    assert len(tensor_frames._written_before) <= KEPT_HEADS


def test_a_frame_that_ends_within_a_number_is_refused() -> None:
    whole = encode(1, Received(1 << 40))
    with pytest.raises(ProtocolError, match="at_us needs another byte"):
        decode(whole[:-1])
    with pytest.raises(ProtocolError, match="at_us is not a varint"):
        decode(whole[:8] + b"\xff" * 12)
