"""Server-sent events: an encoder, and a parser that takes chunks as they come from the wire.

Format: WHATWG HTML, section 9.2.6 "Interpreting an event stream".
"""

from __future__ import annotations

import codecs

from attrs import frozen

from protocol.errors import ProtocolError

PING = b": ping\n\n"
"""A comment that keeps load balancers from cutting a silent stream."""

DONE = b"data: [DONE]\n\n"
"""End of an OpenAI stream; sent only after a complete answer."""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}

MAX_EVENT_BYTES = 1 << 20


def event(data: str | bytes, *, name: str = "") -> bytes:
    """One event. Line breaks in `data` (CR, LF or both) become several data lines, as the format wants."""
    text = data if isinstance(data, bytes) else data.encode("utf-8")
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    head = b"event: " + name.encode("utf-8") + b"\n" if name else b""
    return head + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


@frozen
class SseEvent:
    """One dispatched event. `name` is `message` unless the stream says otherwise."""

    data: str
    name: str = "message"

    @property
    def done(self) -> bool:
        """True for the `[DONE]` mark of OpenAI streams."""
        return is_done(self.data)


def is_done(data: str) -> bool:
    """Whether an event's data is the `[DONE]` mark of OpenAI streams."""
    return data.strip() == "[DONE]"


class SseParser:
    """Incremental parser: feed chunks cut anywhere, get whole events.

    Comments and unknown fields are skipped. An event without an empty line after it is never dispatched, so a stream
    that was cut does not yield half an event. Raises ProtocolError over `max_event_bytes` or for bytes that are not
    UTF-8; the parser is of no use afterwards.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()
        self._after_cr = False
        self._first = True
        self._data: list[bytes] = []
        self._name = b""
        self._size_bytes = 0

    def plain(self, chunk: bytes) -> str | None:
        """The data of a chunk that is one event of one line, as most are; None for any other, which `feed` takes."""
        if not (chunk.startswith(b"data: ") and chunk.endswith(b"\n\n")) or self._rest or self._data or self._after_cr:
            return None
        if chunk.find(b"\n") != len(chunk) - 2 or b"\r" in chunk or self._name or len(chunk) > self._max_event_bytes:
            return None
        try:
            data = chunk[6:-2].decode("utf-8")
        except UnicodeDecodeError:
            return None
        self._first = False
        return data

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events completed by `chunk`, in order."""
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        *lines, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        found: list[SseEvent] = []
        for line in lines:
            self._grow(line)
            whole = bytes(self._rest)
            self._rest.clear()
            if (ready := self._line(whole)) is not None:
                found.append(ready)
        self._grow(rest)
        return found

    def _grow(self, part: bytes) -> None:
        if self._size_bytes + len(self._rest) + len(part) > self._max_event_bytes:
            raise ProtocolError(f"an event has more than {self._max_event_bytes} bytes", field="data")
        self._rest += part

    def _line(self, line: bytes) -> SseEvent | None:
        if self._first:
            self._first = False
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line:
            return self._dispatch()
        key, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if key == b"data":
            self._data.append(value)
            self._size_bytes += len(value) + 1
        elif key == b"event":
            self._name = value
        return None

    def _dispatch(self) -> SseEvent | None:
        data, name = self._data, self._name
        self._data, self._name, self._size_bytes = [], b"", 0
        if not data:
            return None
        try:
            return SseEvent(b"\n".join(data).decode("utf-8"), name.decode("utf-8") or "message")
        except UnicodeDecodeError as err:
            raise ProtocolError("an event is not UTF-8", field="data") from err
