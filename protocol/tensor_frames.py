"""Tensor frames: many tensor requests in flight over one FrameStream, answers in any order.

    frame = version u8 | type u8 | flags u8 | 0 u8 | request u32 big-endian | body

A request (Ask) and an answer (Answer) are a head and raw tensor data; data that does not fit into the first frame
follows in Data frames. Numbers are varints, texts have a length before them. docs/tensor-frames.md is the law.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from protocol.decode import decode as decode_document
from protocol.decode import encode as encode_document
from protocol.errors import MidstreamError, ProtocolError, TooLarge
from protocol.handoff_frames import Refuse
from protocol.oip_fields import MAX_BODY_BYTES, MAX_NAME_CHARS, MAX_TENSORS
from protocol.tensors import DATATYPE_BYTES, MAX_RANK, Tensor, check_tensor
from protocol.token_block import Reader, Writer

VERSION = 1
TENSOR_FRAMES = "midstream_frames"
"""How GET /v2 names this protocol among a server's extensions."""
TENSOR_FRAMES_PATH = "/midstream/v1/tensors"

MAX_FRAME_BYTES = 1 << 20
MAX_TEXT_BYTES = 4 * MAX_NAME_CHARS
MAX_REFUSE_BYTES = 16 << 10
MAX_REQUEST = (1 << 32) - 1
NO_REQUEST = 0

LAST, WAITED = 1, 2
"""Flags. LAST: this frame ends the data of its request or answer. WAITED: the sender of this answer ran out of credit,
so its time says nothing of the link."""

ZSTD = 1
"""Feature: data may be packed, all tensors of a message in one zstd frame; a packed request gets a packed answer."""

_HEADER = struct.Struct(">BBBBI")
HEADER_BYTES = _HEADER.size
_DATATYPES = (*DATATYPE_BYTES, "BYTES")
_MOST = (1 << 63) - 1

KEPT_HEADS = 64
KEPT_HEAD_BYTES = 512
"""Requests of a model repeat what they say of their tensors: so many forms are kept, up to this length."""


@frozen
class TensorHead:
    """A tensor without its data."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size_bytes: int


@frozen
class Hello:
    """First frame of either side. at_us: the sender's clock, which begins anywhere.

    max_requests and max_bytes: what the sender takes at once from the other side; credit_bytes: answer data that it
    takes before it grants more. features: sum of ZSTD and what later releases add.
    """

    max_requests: int = 0
    max_bytes: int = 0
    credit_bytes: int = 0
    at_us: int = 0
    features: int = 0


@frozen
class Ask:
    """A request: `id` is the asker's own name of it, for logs; it is answered within `deadline_ms` or not at all.

    packed_bytes: length of the packed data; 0 when it travels as it is.
    """

    model: str
    id: str
    deadline_ms: int
    tensors: tuple[TensorHead, ...]
    packed_bytes: int = 0
    data: bytes | memoryview = b""


@frozen
class Answer:
    """An answer: which weights made it, and how long it waited and was computed there."""

    digest: str
    wait_us: int
    compute_us: int
    tensors: tuple[TensorHead, ...]
    packed_bytes: int = 0
    data: bytes | memoryview = b""


@frozen
class Data:
    """The next bytes of a request or an answer."""

    data: bytes | memoryview


@frozen
class Received:
    """The request's last byte was read at `at_us` of the answering side's clock."""

    at_us: int


@frozen
class Credit:
    """The other side may send this much answer data in all, counted from the beginning of the stream."""

    total_bytes: int


@frozen
class Cancel:
    """Nobody waits for this request any more."""


TensorFrame = Hello | Ask | Answer | Data | Received | Credit | Cancel | Refuse


@frozen
class TensorFramed:
    """A frame with the request it belongs to."""

    request: int
    flags: int
    frame: TensorFrame


def encode(request: int, frame: TensorFrame, flags: int = 0) -> bytes:
    """Bytes of one frame. Raises TooLarge over MAX_FRAME_BYTES, ProtocolError for what the format cannot carry."""
    number, write, _ = _BY_CLASS[type(frame)]
    writer = Writer()
    writer.out += _HEADER.pack(VERSION, number, flags, 0, request)
    write(writer, frame)
    data = getattr(frame, "data", b"")
    if len(writer.out) + len(data) > MAX_FRAME_BYTES:
        raise TooLarge(f"a {type(frame).__name__} frame is over {MAX_FRAME_BYTES} bytes", field="data")
    return b"".join((writer.out, data))


def decode(frame: bytes) -> TensorFramed:
    """Take one frame apart without copying its data. Raises ProtocolError, whatever the bytes are."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame has {len(frame)} bytes, at most {MAX_FRAME_BYTES} are taken", field="length")
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(f"a frame has {len(frame)} bytes, its header alone {HEADER_BYTES}", field="length")
    version, number, flags, zero, request = _HEADER.unpack_from(frame)
    if version != VERSION:
        raise ProtocolError(
            f"frame version {version}, this release speaks {VERSION}",
            next_step="update the older side",
            field="version",
        )
    known = _BY_NUMBER.get(number)
    if known is None or zero != 0:
        raise ProtocolError(f"unknown frame type {number}", field="type")
    cls, _, read = known
    try:
        found = read(_Bytes(frame, cls.__name__))
    except MidstreamError as err:
        wrong = ProtocolError(err.message, field=err.field)
        raise BrokenFrame(wrong, request) from err
    return TensorFramed(request, flags, found)


class BrokenFrame(ProtocolError):
    """The body of one frame is wrong; the stream and its other requests are not. `request` is the one at fault."""

    def __init__(self, cause: ProtocolError, request: int) -> None:
        super().__init__(cause.message, next_step=cause.next_step, field=cause.field)
        self.request = request


def heads_of(tensors: Sequence[Tensor]) -> tuple[TensorHead, ...]:
    """What a frame says of tensors before their data. Raises TooLarge, ProtocolError for an unknown datatype."""
    if len(tensors) > MAX_TENSORS or sum(tensor.size_bytes for tensor in tensors) > MAX_BODY_BYTES:
        raise TooLarge(f"at most {MAX_TENSORS} tensors of {MAX_BODY_BYTES} bytes in all are sent", field="inputs")
    wrong = next((tensor for tensor in tensors if tensor.datatype not in _DATATYPES), None)
    if wrong is not None:
        raise ProtocolError(f"unknown datatype {wrong.datatype[:32]!r}", field=f"{wrong.name}.datatype")
    return tuple(TensorHead(t.name, t.datatype, tuple(t.shape), t.size_bytes) for t in tensors)


def tensors_of(heads: Sequence[TensorHead], data: memoryview) -> tuple[Tensor, ...]:
    """Tensors over one buffer, not copied. Raises BadRequest when shape and length of one do not agree."""
    found, at = [], 0
    for head in heads:
        tensor = Tensor(head.name, head.datatype, head.shape, data[at : at + head.size_bytes])
        check_tensor(tensor)
        found.append(tensor)
        at += head.size_bytes
    return tuple(found)


class _Bytes(Reader):
    """A Reader behind the header, whose rest can be taken without a copy."""

    def __init__(self, frame: bytes, what: str) -> None:
        super().__init__(frame, what)
        self.at = HEADER_BYTES

    def text(self, field: str) -> str:
        data = self.take(self.varint(field, MAX_TEXT_BYTES), field)
        try:
            return data.decode()
        except UnicodeDecodeError as err:
            raise self.wrong(f"{field} is not UTF-8", field) from err

    def rest(self) -> memoryview:
        at, self.at = self.at, len(self.data)
        return memoryview(self.data)[at:]


def _text(writer: Writer, text: str, field: str) -> None:
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_TEXT_BYTES:
        raise ProtocolError(f"{field} has {len(data)} bytes, at most {MAX_TEXT_BYTES} are sent", field=field)
    writer.piece(data)


_written_before: dict[tuple[TensorHead, ...], bytes] = {}


def _heads_bytes(heads: tuple[TensorHead, ...]) -> bytes:
    before = _written_before.get(heads)
    if before is not None:
        return before
    written = _new_heads_bytes(heads)
    if len(written) <= KEPT_HEAD_BYTES:
        if len(_written_before) >= KEPT_HEADS:
            _written_before.clear()
        _written_before[heads] = written
    return written


def _new_heads_bytes(heads: tuple[TensorHead, ...]) -> bytes:
    writer = Writer()
    writer.varint(len(heads))
    for head in heads:
        _text(writer, head.name, "name")
        writer.varint(_DATATYPES.index(head.datatype))
        writer.varint(len(head.shape))
        for size in head.shape:
            writer.varint(size)
        writer.varint(head.size_bytes)
    return bytes(writer.out)


_read_before: dict[str, tuple[bytes, tuple[TensorHead, ...]]] = {}


def _read_heads(reader: _Bytes, of: str) -> tuple[TensorHead, ...]:
    """of: the model or the weights that they belong to. No form is the beginning of another one: bytes that begin with
    a known form are that form."""
    before = _read_before.get(of)
    if before is not None and reader.data.startswith(before[0], reader.at):
        reader.at += len(before[0])
        return before[1]
    began_at = reader.at
    heads = _new_heads(reader)
    if reader.at - began_at <= KEPT_HEAD_BYTES:
        if len(_read_before) >= KEPT_HEADS:
            _read_before.clear()
        _read_before[of] = bytes(reader.data[began_at : reader.at]), heads
    return heads


def _new_heads(reader: _Bytes) -> tuple[TensorHead, ...]:
    heads: list[TensorHead] = []
    left = MAX_BODY_BYTES
    for number in range(reader.varint("tensors", MAX_TENSORS)):
        path = f"tensors[{number}]"
        name = reader.text(f"{path}.name")
        datatype = _DATATYPES[reader.varint(f"{path}.datatype", len(_DATATYPES) - 1)]
        rank = reader.varint(f"{path}.shape", MAX_RANK)
        shape = tuple(reader.varint(f"{path}.shape", (1 << 31) - 1) for _ in range(rank))
        size_bytes = reader.varint(f"{path}.size_bytes", left)
        left -= size_bytes
        heads.append(TensorHead(name, datatype, shape, size_bytes))
    if len({head.name for head in heads}) != len(heads):
        raise reader.wrong("two tensors have the same name", "tensors")
    return tuple(heads)


def _write_ask(writer: Writer, frame: Ask) -> None:
    _text(writer, frame.model, "model")
    _text(writer, frame.id, "id")
    writer.varint(frame.deadline_ms)
    writer.out += _heads_bytes(frame.tensors)
    writer.varint(frame.packed_bytes)


def _read_ask(reader: _Bytes) -> Ask:
    model, own, deadline_ms = reader.text("model"), reader.text("id"), reader.varint("deadline_ms", 1 << 40)
    return Ask(model, own, deadline_ms, _read_heads(reader, model), _packed(reader), reader.rest())


def _write_answer(writer: Writer, frame: Answer) -> None:
    _text(writer, frame.digest, "digest")
    writer.varint(frame.wait_us)
    writer.varint(frame.compute_us)
    writer.out += _heads_bytes(frame.tensors)
    writer.varint(frame.packed_bytes)


def _read_answer(reader: _Bytes) -> Answer:
    digest, wait_us = reader.text("digest"), reader.varint("wait_us", _MOST)
    compute_us = reader.varint("compute_us", _MOST)
    return Answer(digest, wait_us, compute_us, _read_heads(reader, digest), _packed(reader), reader.rest())


def _packed(reader: _Bytes) -> int:
    return reader.varint("packed_bytes", MAX_BODY_BYTES)


def _read_refuse(reader: _Bytes) -> Refuse:
    if reader.left > MAX_REFUSE_BYTES:
        raise reader.wrong(f"{reader.left} bytes, at most {MAX_REFUSE_BYTES} are taken", "body")
    return decode_document(Refuse, bytes(reader.rest()), what="Refuse", max_bytes=MAX_REFUSE_BYTES)


def _write_refuse(writer: Writer, frame: Refuse) -> None:
    writer.out += encode_document(frame)


def _numbers(*names: str) -> tuple[Callable[[Writer, Any], None], Callable[[type[Any]], Callable[[_Bytes], Any]]]:
    def write(writer: Writer, frame: Any) -> None:
        for name in names:
            writer.varint(getattr(frame, name))

    def reads(cls: type[Any]) -> Callable[[_Bytes], Any]:
        def read(reader: _Bytes) -> Any:
            found = cls(*[reader.varint(name, _MOST) for name in names])
            reader.end()
            return found

        return read

    return write, reads


def _form(number: int, cls: type[Any], *names: str) -> tuple[int, type[Any], Any, Any]:
    write, reads = _numbers(*names)
    return number, cls, write, reads(cls)


_FORMS: tuple[tuple[int, type[Any], Callable[[Writer, Any], None], Callable[[_Bytes], Any]], ...] = (
    _form(1, Hello, "max_requests", "max_bytes", "credit_bytes", "at_us", "features"),
    (2, Ask, _write_ask, _read_ask),
    (3, Data, lambda writer, frame: None, lambda reader: Data(reader.rest())),
    _form(4, Received, "at_us"),
    (5, Answer, _write_answer, _read_answer),
    (6, Refuse, _write_refuse, _read_refuse),
    _form(7, Credit, "total_bytes"),
    _form(8, Cancel),
)
_BY_CLASS = {cls: (number, write, read) for number, cls, write, read in _FORMS}
_BY_NUMBER = {number: (cls, write, read) for number, cls, write, read in _FORMS}
