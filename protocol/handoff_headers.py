"""Headers of handoff frames: whole at first, five bytes for a stream's first frame, two for those behind it.

    whole   = 1 u8 | type u8 | stream 16 bytes | epoch u32 big-endian
    naming  = 2 u8 | type u8 | stream 16 bytes | epoch u32 big-endian | slot u8
    near    = 0x40 + type u8 | slot u8 | epoch u8 | last 2 bytes of the stream
    short   = 0x80 + type u8 | slot u8

A naming or near header says what later short ones with its slot mean, on this connection and in this direction. A near
one has the other 14 bytes of the stream from the last header before it that was not short. Both ends begin with
nothing. One writer and one reader belong to each end of a connection.
"""

from __future__ import annotations

import struct

from protocol.errors import ProtocolError, TooLarge
from protocol.handoff import MAX_FRAME_BYTES, NO_STREAM, STREAM_BYTES, Framed, decode_body, encode_body
from protocol.handoff_frames import (
    Capabilities,
    Embed,
    Finish,
    Frame,
    Query,
    Refuse,
    Stop,
    TokenIds,
    Tokenize,
    Vectors,
)

WHOLE, NAMING, NEAR, SHORT = 1, 2, 0x40, 0x80
"""First bytes; NEAR and SHORT have the type in their low bits."""
SLOTS = 128
"""Slots are numbered below this. Four times the streams of a connection: few that live are named twice."""
TAIL_BYTES = 2
"""Streams that differ in their last bytes only are near each other."""

_WHOLE = struct.Struct(f">BB{STREAM_BYTES}sI")
_NAMING = struct.Struct(f">BB{STREAM_BYTES}sIB")
_NEAR = struct.Struct(f">BBB{TAIL_BYTES}s")
_SHORT = struct.Struct(">BB")

_LAST = (Query, Capabilities, Tokenize, TokenIds, Embed, Vectors, Finish, Refuse, Stop)
"""Questions, answers and ends: whoever sends one has no more to say on its stream."""

_Key = tuple[bytes, int]
"""Stream and epoch."""


class HandoffWriter:
    """The sending side of one connection. Slots are given round robin.

    A frame is encoded when it is its turn to be sent, then sent, then told by `sent()`; nothing else is encoded in
    between. Without `sent()` (a send that failed or was cancelled) the frame counts as one that may or may not have
    crossed: no later header refers to it, or to what it may have replaced.

    Args:
        slots: how many are named, 1 to SLOTS.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots: dict[_Key, int] = {}
        self._holders: list[_Key | None] = [None] * min(max(slots, 1), SLOTS)
        self._next = 0
        self._base: bytes | None = None
        self._unsent: tuple[_Key, int | None] | None = None

    def encode(self, stream: bytes, epoch: int, frame: Frame) -> bytes:
        """Bytes of one frame. Raises TooLarge over MAX_FRAME_BYTES, ProtocolError for what the format cannot carry."""
        self._unsent = None
        key = (stream, epoch)
        slot = self._slots.get(key)
        if slot is not None:
            number, body = encode_body(frame)
            return _within(_SHORT.pack(SHORT | number, slot) + body, frame)
        if stream == NO_STREAM or isinstance(frame, _LAST):
            data = whole_frame(stream, epoch, frame)
        else:
            slot = self._next
            data = self._naming(stream, epoch, frame, slot)
            self._take(slot)
        self._base, self._unsent = None, (key, slot)
        return data

    def sent(self) -> None:
        """The frame encoded last went out whole: later headers may refer to it."""
        if self._unsent is None:
            return
        (key, slot), self._unsent = self._unsent, None
        self._base = key[0][:-TAIL_BYTES]
        if slot is not None:
            self._holders[slot], self._slots[key] = key, slot

    def _naming(self, stream: bytes, epoch: int, frame: Frame, slot: int) -> bytes:
        if stream[:-TAIL_BYTES] != self._base or len(stream) != STREAM_BYTES or not 0 <= epoch < 256:
            return _with_header(_NAMING, NAMING, stream, epoch, frame, slot)
        number, body = encode_body(frame)
        return _within(_NEAR.pack(NEAR | number, slot, epoch, stream[-TAIL_BYTES:]) + body, frame)

    def _take(self, slot: int) -> None:
        """Whoever had the slot loses it now: the peer may read the new name although `sent()` never comes."""
        before, self._holders[slot] = self._holders[slot], None
        if before is not None:
            del self._slots[before]
        self._next = (slot + 1) % len(self._holders)


class HandoffReader:
    """The receiving side of one connection; keeps at most SLOTS streams."""

    def __init__(self) -> None:
        self._streams: dict[int, _Key] = {}
        self._base: bytes | None = None

    def decode(self, data: bytes) -> Framed:
        """Take the next frame apart. Raises ProtocolError, whatever the bytes are; the connection is over then."""
        size_bytes = header_bytes(data)
        number, slot, stream, epoch = self._header(data)
        if slot is not None and slot >= SLOTS:
            raise ProtocolError(f"slot {slot} is named, {SLOTS} are kept", field="slot")
        frame = decode_body(number, data[size_bytes:])
        if slot is not None:
            self._streams[slot] = (stream, epoch)
        if data[0] < SHORT:
            self._base = stream[:-TAIL_BYTES]
        return Framed(stream, epoch, frame)

    def _header(self, data: bytes) -> tuple[int, int | None, bytes, int]:
        """(type, slot, stream, epoch) of a frame whose header is there."""
        slot: int | None = None
        if data[0] & SHORT:
            number, slot = data[0] & ~SHORT, data[1]
            if slot not in self._streams:
                raise ProtocolError(f"slot {slot} was not named on this connection", field="slot")
            stream, epoch = self._streams[slot]
        elif data[0] & NEAR:
            first, slot, epoch, tail = _NEAR.unpack_from(data)
            if self._base is None:
                raise ProtocolError("no stream was named before on this connection", field="stream")
            number, stream = first & ~NEAR, self._base + tail
        elif data[0] == NAMING:
            _, number, stream, epoch, slot = _NAMING.unpack_from(data)
        else:
            _, number, stream, epoch = _WHOLE.unpack_from(data)
        return number, slot, stream, epoch


def whole_frame(stream: bytes, epoch: int, frame: Frame) -> bytes:
    """A frame that names no slot, as for questions and errors of a connection. Raises as HandoffWriter.encode does."""
    return _with_header(_WHOLE, WHOLE, stream, epoch, frame)


def header_bytes(data: bytes) -> int:
    """Length of the header of a frame. Raises ProtocolError for a frame that is too long or has no whole header."""
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame has {len(data)} bytes, at most {MAX_FRAME_BYTES} are taken", field="length")
    first = data[0] if data else WHOLE
    form = _SHORT if first & SHORT else _NEAR if first & NEAR else {WHOLE: _WHOLE, NAMING: _NAMING}.get(first)
    if form is None:
        raise ProtocolError(
            f"frame version {first}, this release speaks {WHOLE} and {NAMING}",
            next_step="update the older side",
            field="version",
        )
    if len(data) < form.size:
        raise ProtocolError(f"a frame has {len(data)} bytes, its header alone {form.size}", field="length")
    return form.size


def _with_header(form: struct.Struct, first: int, stream: bytes, epoch: int, frame: Frame, *slot: int) -> bytes:
    if len(stream) != STREAM_BYTES or not 0 <= epoch < 1 << 32:
        raise ProtocolError(f"a stream id has {STREAM_BYTES} bytes and an epoch 32 bits", field="stream")
    number, body = encode_body(frame)
    return _within(form.pack(first, number, stream, epoch, *slot) + body, frame)


def _within(data: bytes, frame: Frame) -> bytes:
    if len(data) > MAX_FRAME_BYTES:
        raise TooLarge(
            f"a {type(frame).__name__} frame has {len(data)} bytes, at most {MAX_FRAME_BYTES} fit",
            next_step="shorten the prompt or send fewer tokens at once",
        )
    return data
