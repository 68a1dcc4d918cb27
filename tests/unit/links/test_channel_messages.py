"""The bytes on a data channel: what is written is read, what is not ours is refused, nothing crashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from links.channel_messages import (
    FRAGMENT_BYTES,
    MAX_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_STREAM,
    Bye,
    Credit,
    Data,
    Head,
    Message,
    Open,
    Ping,
    Pong,
    Reset,
    decode_message,
    encode_message,
)
from protocol.errors import MidstreamError, ProtocolError

HEADERS = st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=5)
STREAM_MESSAGES = st.one_of(
    st.builds(Open, st.sampled_from(["GET", "POST"]), st.text(max_size=50), HEADERS, st.booleans()),
    st.builds(Head, st.integers(100, 599), HEADERS),
    st.builds(Data, st.binary(max_size=2000), st.booleans(), st.booleans()),
    st.builds(Credit, st.integers(0, 2**32 - 1)),
    st.builds(Reset, st.text(max_size=40)),
)
SESSION_MESSAGES = st.one_of(
    st.builds(Ping, st.integers(0, 2**64 - 1)),
    st.builds(Pong, st.integers(0, 2**64 - 1)),
    st.builds(Bye, st.booleans()),
)


@given(st.integers(1, MAX_STREAM), STREAM_MESSAGES)
def test_messages_of_streams_come_back(stream: int, message: Message) -> None:
    assert decode_message(encode_message(stream, message)) == (stream, message)


@given(SESSION_MESSAGES)
def test_messages_of_the_session_come_back(message: Message) -> None:
    assert decode_message(encode_message(0, message)) == (0, message)


@given(st.binary(max_size=200))
def test_anything_else_is_a_named_error(raw: bytes) -> None:
    try:
        decode_message(raw)
    except MidstreamError as err:
        assert err.message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        encode_message(1, Data(b"x"))[:5],
        encode_message(1, Data(bytes(FRAGMENT_BYTES))) + b"x",
        bytes(MAX_MESSAGE_BYTES + 1),
        encode_message(1, Credit(1)) + b"x",
        b"\x63\x00\x00\x00\x01",
        b"\x03\x00\x00\x00\x00\x01data",
        b"\x06\x00\x00\x00\x07" + bytes(8),
        encode_message(1, Head(200)).replace(b"200", b"999"),
    ],
)
def test_wrong_lengths_kinds_and_streams_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(raw)


def test_headers_without_end_are_refused_before_they_leave() -> None:
    with pytest.raises(ProtocolError, match="headers"):
        encode_message(1, Open("GET", "/", {"x": "y" * MAX_HEAD_BYTES}))
