"""Runs of tokens in compact binary form, column by column; the body of handoff frames.

    block   = varint first | varint count | flags u8 | columns
    flags   = bit 0 ids, 1 data, 2 logprob, 3 margin, 4 alternatives, 5 calls; bits 6-7 finish of the last token
    ids     = count x varint(id + 1), 0 for none          data = count x (varint length, bytes)
    logprob, margin = count x f32 big-endian, NaN for none
    alternatives    = count x (varint n, n x (varint length, bytes, f32))
    calls   = count x (varint(index + 1), 0 for none; then id, name, arguments: varint length, UTF-8 each)

With a shared vocabulary the ids alone are enough (no data column): 2-3 bytes per token.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from protocol.errors import ProtocolError
from protocol.text import CallDelta, FinishReason, Token

MAX_BLOCK_TOKENS = 1 << 16
MAX_PIECE_BYTES = 4096
"""Longer than any piece of a known vocabulary."""
MAX_ALTERNATIVES = 64
MAX_VARINT_BYTES = 9

MAX_CALLS = 128
MAX_CALL_BYTES = 64 << 10
"""Of one piece of a call's arguments."""

_IDS, _DATA, _LOGPROB, _MARGIN, _ALTERNATIVES, _CALLS = (1 << bit for bit in range(6))
_FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length", "tool_calls")


class Writer:
    """Appends binary fields."""

    def __init__(self) -> None:
        self.out = bytearray()

    def varint(self, value: int) -> None:
        """Unsigned LEB128, below 2**63."""
        if 0 <= value <= 0x7F:  # most are
            self.out.append(value)
            return
        if not 0 <= value < 1 << 63:
            raise ProtocolError(f"{value} does not fit a varint")
        while value > 0x7F:
            self.out.append(value & 0x7F | 0x80)
            value >>= 7
        self.out.append(value)

    def piece(self, data: bytes) -> None:
        """Length and bytes."""
        self.varint(len(data))
        self.out += data

    def f32(self, value: float | None) -> None:
        """Four bytes, NaN for None; a value beyond the range becomes infinite."""
        if value is None:
            value = math.nan
        try:
            self.out += struct.pack(">f", value)
        except OverflowError:
            self.out += struct.pack(">f", math.copysign(math.inf, value))


class Reader:
    """Takes binary fields off a frame; every length is checked against what is left before it is used."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data = data
        self.at = 0
        self.what = what

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def wrong(self, message: str, field: str) -> ProtocolError:
        return ProtocolError(f"{self.what}: {message}", field=field)

    def take(self, size_bytes: int, field: str) -> bytes:
        if size_bytes > self.left:
            raise self.wrong(f"{field} needs {size_bytes} bytes, {self.left} are left", field)
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at]

    def varint(self, field: str, most: int = (1 << 63) - 1) -> int:
        at, data = self.at, self.data
        if at < len(data) and (byte := data[at]) < 0x80 and byte <= most:  # most are
            self.at = at + 1
            return byte
        value = 0
        for number, byte in enumerate(data[at : at + MAX_VARINT_BYTES]):
            value |= (byte & 0x7F) << (7 * number)
            if byte < 0x80:
                if value > most:
                    raise self.wrong(f"{field} is {value}, at most {most} is taken", field)
                self.at = at + number + 1
                return value
        if self.left < MAX_VARINT_BYTES:
            raise self.wrong(f"{field} needs another byte, none is left", field)
        raise self.wrong(f"{field} is not a varint", field)

    def piece(self, field: str, most: int) -> bytes:
        return self.take(self.varint(f"{field}.length", most), field)

    def f32(self, field: str) -> float | None:
        value: float = struct.unpack(">f", self.take(4, field))[0]
        return None if math.isnan(value) else value

    def end(self) -> None:
        if self.left:
            raise self.wrong(f"{self.left} bytes after the end", "end")


def write_tokens(writer: Writer, first: int, tokens: Sequence[Token]) -> None:
    """Append a block. Tokens are consecutive from `first`; only the last may carry a finish mark."""
    for number, token in enumerate(tokens):
        if token.index != first + number:
            raise ProtocolError(f"token {token.index} stands where {first + number} belongs", field="first")
        if token.finish is not None and number + 1 != len(tokens):
            raise ProtocolError("a finish mark stands before the last token", field="finish")
    flags = _flags(tokens)
    writer.varint(first)
    writer.varint(len(tokens))
    writer.out.append(flags | _FINISH.index(tokens[-1].finish if tokens else None) << 6)
    columns: tuple[tuple[int, Callable[[Token], None]], ...] = (
        (_IDS, lambda t: writer.varint(0 if t.id is None else t.id + 1)),
        (_DATA, lambda t: writer.piece(t.data)),
        (_LOGPROB, lambda t: writer.f32(t.logprob)),
        (_MARGIN, lambda t: writer.f32(t.margin)),
        (_ALTERNATIVES, lambda t: _write_alternatives(writer, t)),
        (_CALLS, lambda t: _write_call(writer, t.call)),
    )
    for bit, write in columns:
        if flags & bit:
            for token in tokens:
                write(token)


def read_tokens(reader: Reader) -> tuple[int, tuple[Token, ...]]:
    """Take a block off: (first, tokens). Raises ProtocolError; `at_s` is not carried and is 0."""
    first = reader.varint("first", 1 << 40)
    count = reader.varint("count", MAX_BLOCK_TOKENS)
    flags = reader.take(1, "flags")[0]
    if (count and not flags & (_IDS | _DATA)) or (not count and flags):
        raise reader.wrong(f"flags are {flags:#x}", "flags")
    if count > reader.left:  # every token takes at least one byte
        raise reader.wrong(f"count is {count}, {reader.left} bytes are left", "count")
    ids = [reader.varint("id", 1 << 31) - 1 for _ in range(count)] if flags & _IDS else [-1] * count
    data = [reader.piece("data", MAX_PIECE_BYTES) for _ in range(count)] if flags & _DATA else [b""] * count
    logprobs = [reader.f32("logprob") for _ in range(count)] if flags & _LOGPROB else [None] * count
    margins = [reader.f32("margin") for _ in range(count)] if flags & _MARGIN else [None] * count
    others = [_read_alternatives(reader) for _ in range(count)] if flags & _ALTERNATIVES else [()] * count
    calls = [_read_call(reader) for _ in range(count)] if flags & _CALLS else [None] * count
    finish = _FINISH[flags >> 6]
    return first, tuple(
        Token(
            index=first + number,
            id=None if ids[number] < 0 else ids[number],
            data=data[number],
            logprob=logprobs[number],
            margin=margins[number],
            finish=finish if number + 1 == count else None,
            alternatives=others[number],
            call=calls[number],
        )
        for number in range(count)
    )


def _flags(tokens: Sequence[Token]) -> int:
    flags = 0
    for token in tokens:
        flags |= _IDS if token.id is not None else 0
        flags |= _DATA if token.data else 0
        flags |= _LOGPROB if token.logprob is not None else 0
        flags |= _MARGIN if token.margin is not None else 0
        flags |= _ALTERNATIVES if token.alternatives else 0
        flags |= _CALLS if token.call is not None else 0
    return flags | _DATA if tokens and not flags & (_IDS | _DATA) else flags


def _write_alternatives(writer: Writer, token: Token) -> None:
    if len(token.alternatives) > MAX_ALTERNATIVES:
        raise ProtocolError(f"at most {MAX_ALTERNATIVES} alternatives are carried", field="alternatives")
    writer.varint(len(token.alternatives))
    for data, logprob in token.alternatives:
        writer.piece(data)
        writer.f32(logprob)


def _read_alternatives(reader: Reader) -> tuple[tuple[bytes, float], ...]:
    found: list[tuple[bytes, float]] = []
    for _ in range(reader.varint("alternatives", MAX_ALTERNATIVES)):
        data = reader.piece("alternatives.data", MAX_PIECE_BYTES)
        logprob = reader.f32("alternatives.logprob")
        found.append((data, -math.inf if logprob is None else logprob))
    return tuple(found)


def _write_call(writer: Writer, call: CallDelta | None) -> None:
    if call is None:
        writer.varint(0)
        return
    texts = [text.encode("utf-8") for text in (call.id, call.name, call.arguments)]
    if call.index >= MAX_CALLS or max(map(len, texts)) > MAX_CALL_BYTES:
        raise ProtocolError(f"a piece of a call has at most {MAX_CALL_BYTES} bytes", field="calls")
    writer.varint(call.index + 1)
    for text in texts:
        writer.piece(text)


def _read_call(reader: Reader) -> CallDelta | None:
    number = reader.varint("calls.index", MAX_CALLS)
    if not number:
        return None
    try:
        texts = [reader.piece(f"calls.{name}", MAX_CALL_BYTES).decode("utf-8") for name in ("id", "name", "arguments")]
    except UnicodeDecodeError as err:
        raise reader.wrong("a call is not UTF-8", "calls") from err
    return CallDelta(number - 1, *texts)
