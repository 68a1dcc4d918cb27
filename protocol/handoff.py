"""Bodies of handoff frames: the wire form of a text engine, for the cloud, a peer of the fleet and a worker process.

A frame is a header (protocol.handoff_headers: type, stream, epoch) and a body. Bodies of frames that carry tokens or
counters are binary (protocol.token_block), the others are JSON documents whose unknown fields are ignored. The whole
protocol is described in docs/handoff-protocol.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from attrs import frozen

from protocol.decode import decode as decode_document
from protocol.decode import encode as encode_document
from protocol.errors import MidstreamError, ProtocolError
from protocol.handoff_frames import (
    Ack,
    Capabilities,
    Embed,
    Extend,
    Finish,
    Frame,
    Prepare,
    Query,
    Ready,
    Refuse,
    Resume,
    Start,
    Stop,
    TokenIds,
    Tokenize,
    Tokens,
    Vectors,
)
from protocol.text import Message, Sampling, TextRequest
from protocol.token_block import Reader, Writer, read_tokens, write_tokens

__all__ = [
    "Ack", "Capabilities", "Embed", "Extend", "Finish", "Frame", "Framed", "MAX_EMBED_TEXTS", "MAX_FRAME_BYTES",
    "MAX_PROMPT_IDS", "NO_STREAM", "Prepare", "Query", "Ready", "Refuse", "Resume", "STREAM_BYTES", "Start", "Stop",
    "TokenIds", "Tokenize", "Tokens", "Vectors", "decode_body", "encode_body",
]  # fmt: skip

STREAM_BYTES = 16
MAX_FRAME_BYTES = 1 << 20
"""The largest frame of any link; a longer prompt is refused by the sender."""
MAX_PROMPT_IDS = 1 << 18
MAX_EMBED_TEXTS = 256
_IN_ORDER = frozenset({"json_schema", "tools", "response_format"})
"""Models write properties in the order of their schema, and an answer may go on elsewhere in the middle of them."""

MAX_VECTOR_FLOATS = 200_000
NO_STREAM = bytes(STREAM_BYTES)


@frozen
class Framed:
    """A frame with the stream it belongs to and the epoch of the attachment that sent it."""

    stream: bytes
    epoch: int
    frame: Frame


def encode_body(frame: Frame) -> tuple[int, bytes]:
    """(type, body). Raises ProtocolError for what the format cannot carry; the size is bounded with the header."""
    number, form = _BY_CLASS[type(frame)]
    writer = Writer()
    try:
        form.write(writer, frame)
    except UnicodeEncodeError as err:
        raise ProtocolError("text has half a surrogate pair", field=type(frame).__name__.lower()) from err
    except ValueError as err:  # NaN has no JSON form
        raise ProtocolError(f"cannot be sent: {err}", field=type(frame).__name__.lower()) from err
    return number, bytes(writer.out)


def decode_body(number: int, body: bytes) -> Frame:
    """The frame of a type and a body. Raises ProtocolError, whatever the bytes are."""
    form = _BY_NUMBER.get(number)
    if form is None:
        raise ProtocolError(f"unknown frame type {number}", field="type")
    reader = Reader(body, form.name)
    try:
        frame: Frame = form.read(reader)
    except MidstreamError as err:
        raise err if isinstance(err, ProtocolError) else ProtocolError(str(err), field=err.field) from err
    reader.end()
    return frame


F = TypeVar("F")


@frozen
class _Form(Generic[F]):
    """How one class of frame is written and read."""

    name: str
    write: Callable[[Writer, F], None]
    read: Callable[[Reader], F]


@frozen
class _PrepareHead:
    """JSON part of Prepare; ids of the prompt and the prefix follow in binary."""

    model: str
    messages: tuple[Message, ...] | None
    text: str | None
    sampling: Sampling
    deadline_s: float
    vocabulary: str | None = None
    hop: int = 0
    traceparent: str = ""
    early: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None


def _write_prepare(writer: Writer, frame: Prepare) -> None:
    prompt = frame.request.prompt
    ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] | None = None
    if isinstance(prompt, tuple) and all(isinstance(item, int) for item in prompt):
        ids = prompt
    elif not isinstance(prompt, str):
        messages = tuple(prompt)  # type: ignore[arg-type]
    head = _PrepareHead(
        model=frame.request.model,
        messages=messages,
        text=prompt if isinstance(prompt, str) else None,
        sampling=frame.request.sampling,
        deadline_s=frame.deadline_s,
        vocabulary=frame.vocabulary,
        hop=frame.hop,
        traceparent=frame.traceparent,
        early=frame.early,
        tools=frame.request.tools,
        tool_choice=frame.request.tool_choice,
        parallel_tool_calls=frame.request.parallel_tool_calls,
        response_format=frame.request.response_format,
    )
    writer.piece(encode_document(head, _IN_ORDER))
    _write_ids(writer, ids)
    prefix = frame.request.prefix
    write_tokens(writer, prefix[0].index if prefix else 0, prefix)


def _read_prepare(reader: Reader) -> Prepare:
    text = reader.piece("head", MAX_FRAME_BYTES)
    head = decode_document(_PrepareHead, text, what="Prepare", max_bytes=MAX_FRAME_BYTES)
    ids = _read_ids(reader)
    first, prefix = read_tokens(reader)
    if first != 0:
        raise reader.wrong(f"the prefix begins at {first}", "prefix.first")
    if head.hop < 0 or (head.messages is not None) + (head.text is not None) + bool(ids) > 1:
        raise reader.wrong("exactly one of messages, text and ids is the prompt", "prompt")
    prompt: Any = head.messages if head.messages is not None else ids if head.text is None else head.text
    request = TextRequest(
        model=head.model,
        prompt=prompt,
        sampling=head.sampling,
        prefix=prefix,
        tools=head.tools,
        tool_choice=head.tool_choice,
        parallel_tool_calls=head.parallel_tool_calls,
        response_format=head.response_format,
        traceparent=head.traceparent,
    )
    return Prepare(request, head.deadline_s, head.vocabulary, head.hop, head.traceparent, head.early)


def _write_ids(writer: Writer, ids: tuple[int, ...]) -> None:
    writer.varint(len(ids))
    for number in ids:
        writer.varint(number)


def _read_ids(reader: Reader) -> tuple[int, ...]:
    count = reader.varint("ids", MAX_PROMPT_IDS)
    if count > reader.left:
        raise reader.wrong(f"{count} ids, {reader.left} bytes are left", "ids")
    return tuple(reader.varint("id", 1 << 31) for _ in range(count))


def _write_run(writer: Writer, frame: Extend | Tokens) -> None:
    write_tokens(writer, frame.first, frame.tokens)
    if isinstance(frame, Tokens):
        writer.varint(frame.echo_ms)


def _write_vectors(writer: Writer, frame: Vectors) -> None:
    width = len(frame.vectors[0]) if frame.vectors else 0
    writer.varint(len(frame.vectors))
    writer.varint(width)
    for vector in frame.vectors:
        if len(vector) != width:
            raise ProtocolError("vectors have different lengths", field="vectors")
        writer.out += struct.pack(f">{width}f", *vector)


def _read_vectors(reader: Reader) -> Vectors:
    count = reader.varint("count", MAX_EMBED_TEXTS)
    width = reader.varint("width", MAX_VECTOR_FLOATS)
    if count and not width:
        raise reader.wrong("vectors are empty", "width")
    rows = (reader.take(4 * width, "vectors") for _ in range(count))
    return Vectors(tuple(tuple(struct.unpack(f">{width}f", row)) for row in rows))


def _read_embed(reader: Reader) -> Embed:
    found = decode_document(Embed, reader.take(reader.left, "body"), what="Embed", max_bytes=MAX_FRAME_BYTES)
    if len(found.texts) > MAX_EMBED_TEXTS:
        raise reader.wrong(f"{len(found.texts)} texts, at most {MAX_EMBED_TEXTS} are taken", "texts")
    return found


def _document(cls: type[F]) -> _Form[F]:
    """A frame whose body is the JSON form of its class."""

    def write(writer: Writer, frame: F) -> None:
        writer.out += encode_document(frame)

    def read(reader: Reader) -> F:
        return decode_document(cls, reader.take(reader.left, "body"), what=cls.__name__, max_bytes=MAX_FRAME_BYTES)

    return _Form(cls.__name__, write, read)


def _counters(cls: type[F], *names: str, least: int = 0) -> _Form[F]:
    """A frame whose body is its integer fields as varints, each shifted by `least`."""

    def write(writer: Writer, frame: F) -> None:
        for name in names:
            writer.varint(getattr(frame, name) - least)

    def read(reader: Reader) -> F:
        return cls(*[reader.varint(name, 1 << 48) + least for name in names])

    return _Form(cls.__name__, write, read)


_FORMS: dict[int, tuple[type[Any], _Form[Any]]] = {
    1: (Prepare, _Form("Prepare", _write_prepare, _read_prepare)),
    2: (Extend, _Form("Extend", _write_run, lambda r: Extend(*read_tokens(r)))),
    3: (Ready, _document(Ready)),
    4: (Start, _counters(Start, "at", "ahead_tokens")),
    5: (Tokens, _Form("Tokens", _write_run, lambda r: Tokens(*read_tokens(r), r.varint("echo_ms", 1 << 48)))),
    6: (Ack, _counters(Ack, "index", "sent_ms", least=-1)),
    7: (Stop, _counters(Stop, "at")),
    8: (Resume, _counters(Resume, "next")),
    9: (Finish, _document(Finish)),
    10: (Refuse, _document(Refuse)),
    16: (Query, _document(Query)),
    17: (Capabilities, _document(Capabilities)),
    18: (Tokenize, _document(Tokenize)),
    19: (TokenIds, _Form("TokenIds", lambda w, f: _write_ids(w, f.ids), lambda r: TokenIds(_read_ids(r)))),
    20: (Embed, _Form("Embed", _document(Embed).write, _read_embed)),
    21: (Vectors, _Form("Vectors", _write_vectors, _read_vectors)),
}
_BY_CLASS = {cls: (number, form) for number, (cls, form) in _FORMS.items()}
_BY_NUMBER = {number: form for number, (_, form) in _FORMS.items()}
