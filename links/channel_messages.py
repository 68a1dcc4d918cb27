"""Bytes of the messages on a data channel: many streams in one ordered channel, each with its own credit; pure.

A message is a kind (u8), a stream (u32, big endian) and a body. The client opens streams, numbers grow by one. A stream
is an exchange (Open, Data..., then Head, Data...) or, with `frames`, two ordered lines of frames. The table is in
docs/control-protocol.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from attrs import field, frozen

from protocol.decode import decode, encode
from protocol.errors import ProtocolError

FRAGMENT_BYTES = 16 << 10
"""Longest data in one message. Implementations differ on longer messages, and a short one delays others less."""

MAX_HEAD_BYTES = 32 << 10
"""Path and headers of a request, status and headers of an answer, as JSON."""

MAX_MESSAGE_BYTES = MAX_HEAD_BYTES + 5
MAX_REASON_BYTES = 200
MAX_STREAM = 0xFFFF_FFFF
FRAME_END, LAST = 1, 2

_PREFIX = struct.Struct("!BI")
_U32 = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_OPEN, _HEAD, _DATA, _CREDIT, _RESET, _PING, _PONG, _BYE, _BYE_TOO = range(1, 10)


@frozen
class Open:
    """The client begins a stream: a request whose body follows, or with `frames` a frame stream."""

    method: str
    path: str
    headers: Mapping[str, str] = field(factory=dict)
    frames: bool = False


@frozen
class Head:
    """The beginning of an answer. A frame stream is open with status 101 and refused with any over 399."""

    status: int
    headers: Mapping[str, str] = field(factory=dict)


@frozen
class Data:
    """Bytes of a body or frame. frame_end: the frame is whole. last: nothing follows on this side."""

    data: bytes = field(repr=False)
    frame_end: bool = False
    last: bool = False


@frozen
class Credit:
    """The reader has room for `cost` more."""

    cost: int


@frozen
class Reset:
    """The stream ends here and now; what is under way is dropped."""

    reason: str


@frozen
class Ping:
    """Answered with a Pong of the same number. Stream 0."""

    number: int


@frozen
class Pong:
    number: int


@frozen
class Bye:
    """The sender leaves; with `answered` it has seen the other side's. Stream 0."""

    answered: bool = False


Message = Open | Head | Data | Credit | Reset | Ping | Pong | Bye


def cost_of(data: bytes | memoryview, last: bool = False) -> int:
    """What data take from the reader's credit: an empty message is not free, only the end of a stream is."""
    return 0 if last and not data else len(data) + 64


def encode_message(stream: int, message: Message) -> bytes:
    """One message. Raises ProtocolError for a head that is too long."""
    match message:
        case Open():
            return _PREFIX.pack(_OPEN, stream) + _head(message)
        case Head():
            return _PREFIX.pack(_HEAD, stream) + _head(message)
        case Data():
            return encode_data(stream, message.data, frame_end=message.frame_end, last=message.last)
        case Credit():
            return _PREFIX.pack(_CREDIT, stream) + _U32.pack(message.cost)
        case Reset():
            return _PREFIX.pack(_RESET, stream) + message.reason.encode()[:MAX_REASON_BYTES]
        case Ping():
            return _PREFIX.pack(_PING, 0) + _NUMBER.pack(message.number)
        case Pong():
            return _PREFIX.pack(_PONG, 0) + _NUMBER.pack(message.number)
        case Bye():
            return _PREFIX.pack(_BYE_TOO if message.answered else _BYE, 0)


def encode_data(stream: int, data: bytes | memoryview, *, frame_end: bool = False, last: bool = False) -> bytes:
    """A Data message; copies `data` once."""
    flags = FRAME_END * frame_end | LAST * last
    return b"".join((_PREFIX.pack(_DATA, stream), bytes((flags,)), data))


def decode_message(raw: bytes) -> tuple[int, Message]:
    """(stream, message). Raises ProtocolError for anything that is not one of ours."""
    if not _PREFIX.size <= len(raw) <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has {len(raw)} bytes, from {_PREFIX.size} to {MAX_MESSAGE_BYTES} are taken")
    kind, stream = _PREFIX.unpack_from(raw)
    body = raw[_PREFIX.size :]
    if (stream == 0) != (kind in (_PING, _PONG, _BYE, _BYE_TOO)):
        raise ProtocolError(f"message {kind} on stream {stream}", field="stream")
    return stream, _body(kind, body)


def _body(kind: int, body: bytes) -> Message:
    if kind == _DATA:
        if not 1 <= len(body) <= FRAGMENT_BYTES + 1 or body[0] > FRAME_END | LAST:
            raise ProtocolError("a data message is too short, too long or has unknown flags", field="data")
        return Data(body[1:], bool(body[0] & FRAME_END), bool(body[0] & LAST))
    if kind == _OPEN:
        return decode(Open, body, what="the opening of a stream", max_bytes=MAX_HEAD_BYTES)
    if kind == _HEAD:
        head = decode(Head, body, what="the head of an answer", max_bytes=MAX_HEAD_BYTES)
        if not 100 <= head.status <= 599:
            raise ProtocolError(f"status {head.status} is none", field="status")
        return head
    if kind == _RESET and len(body) <= MAX_REASON_BYTES:
        return Reset(body.decode(errors="replace"))
    if kind == _CREDIT and len(body) == _U32.size:
        return Credit(_U32.unpack(body)[0])
    if kind in (_PING, _PONG) and len(body) == _NUMBER.size:
        number = _NUMBER.unpack(body)[0]
        return Ping(number) if kind == _PING else Pong(number)
    if kind in (_BYE, _BYE_TOO) and not body:
        return Bye(kind == _BYE_TOO)
    raise ProtocolError(f"message kind {kind} with {len(body)} bytes is none of ours", field="kind")


def _head(message: Open | Head) -> bytes:
    body = encode(message)
    if len(body) > MAX_HEAD_BYTES:
        raise ProtocolError(f"the headers have {len(body)} bytes, at most {MAX_HEAD_BYTES} are sent", field="headers")
    return body
