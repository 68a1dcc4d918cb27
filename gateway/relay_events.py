"""A stream of a model server given on in its own bytes: whole events only, the model's name as the client knows it,
usage for those who asked. Every event is read all the same, so that an error, a cut or nonsense is seen. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from protocol.errors import ProtocolError
from protocol.openai_wire import dump
from protocol.text import CallDelta, FinishReason, TextRequest, Usage
from protocol.upstream import MAX_REPLY_BYTES, UpstreamCodec, UpstreamDelta

DONE = b"[DONE]"


_MODEL = re.compile(rb'"model":\s*"(?:[^"\\]|\\.)*"')


def renamed(data: bytes, here: bytes) -> bytes:
    """`data` with the first value of a key `model` replaced by the JSON string `here`, whatever the server calls it.

    Quotes inside a JSON text are escaped and never match.
    """
    found = _MODEL.search(data)
    return data if found is None else b'%b"model":%b%b' % (data[: found.start()], here, data[found.end() :])


class RelayEvents:
    """Feed it the body; it gives what may go to the client, and knows what was said.

    Args:
        here: the model's name at this house.
        asked_usage: the client wants usage; others get none (OpenAI's form).
    """

    def __init__(self, codec: UpstreamCodec, request: TextRequest, here: str, asked_usage: bool) -> None:
        self.spoke = False
        self.finish: FinishReason | None = None
        self.usage: Usage | None = None
        self.texts: list[str] = []
        self.calls: list[CallDelta] = []
        self.pieces = 0
        self._reader = codec.reader(request)
        self._lines = codec.dialect == "ollama"
        self._mark = b"\n" if self._lines else b"\n\n"
        self._strips = codec.dialect == "openai" and not asked_usage
        self._here = dump_text(here)
        self._rest = b""
        self._size_bytes = 0

    @property
    def ended(self) -> bool:
        """The server said that nothing comes after."""
        return self._reader.ended

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Bytes for the client, event by event. Raises the upstream's error, or ProtocolError for nonsense."""
        if b"\r" in chunk or self._rest.endswith(b"\r"):
            chunk, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n"), b""
        *events, self._rest = (self._rest + chunk).split(self._mark)
        self._size_bytes += len(chunk)
        if max(len(self._rest), self._size_bytes) > MAX_REPLY_BYTES:
            raise ProtocolError(f"the answer has more than {MAX_REPLY_BYTES} bytes")
        for event in events:
            block = event + self._mark
            for delta in self._reader.feed(block):
                self._note(delta)
            yield self._shown(block, event)

    def _note(self, delta: UpstreamDelta) -> None:
        if delta.text:
            self.texts.append(delta.text)
            self.pieces += 1
        self.calls += delta.calls
        self.finish = self.finish or delta.finish
        self.usage = delta.usage or self.usage
        self.spoke = self.spoke or bool(delta.text or delta.calls or delta.reasoning or delta.finish)

    def _shown(self, block: bytes, event: bytes) -> bytes:
        if self._strips and b'"usage"' in event:
            block = _without_usage(event)
        return renamed(block, self._here)


@lru_cache(maxsize=64)
def dump_text(text: str) -> bytes:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False).encode()


def _without_usage(event: bytes) -> bytes:
    """One of OpenAI's events as a client gets it that did not ask; empty for the one that is usage alone."""
    if b',"usage":null' in event:
        return event.replace(b',"usage":null', b"", 1) + b"\n\n"
    data = event.partition(b"data:")[2]
    document: Any = json.loads(data)
    if not isinstance(document, dict) or not document.get("choices"):
        return b""
    document.pop("usage", None)
    for choice in document["choices"]:
        if isinstance(choice, dict):
            choice.pop("usage", None)
    return b"data: " + dump(document) + b"\n\n"
