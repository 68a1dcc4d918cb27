"""A fake OpenAI-compatible upstream for load tests: fast, scripted by the prompt, with a ledger of what it saw.

It is a bare asyncio protocol, so that its own cost stays far below that of anything measured through it. The last user
turn may hold words that script the answer:

    n=ABC        a name: the answer says it again (so that a client can tell its own answer), and the ledger keeps it
    tokens=64    pieces of a streamed answer (default 8)
    per=3        tokens that each piece stands for in the usage (default 1)
    rate=100     pieces a second; 0: all at once
    first=0.2    seconds before the first byte
    status=429   refuse with this status; after=2 adds Retry-After
    cut=40       hang up after this many pieces
    stall=40     fall silent after this many pieces
    garble=40    one malformed event after this many pieces
    fail=40      an error event after this many pieces
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

from attrs import define, evolve, field, frozen

MAX_BODY_BYTES = 8 << 20
_SCRIPT = re.compile(rb"\b(n|tokens|per|rate|first|status|after|cut|stall|garble|fail)=([\w.]+)")
_MODEL = re.compile(rb'"model":\s*"([^"]*)"')
_HEAD = b'{"id":"chatcmpl-fake","object":"chat.completion.chunk","created":1,"model":"fake","choices":'
_STREAM_HEADERS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
PROMPT_TOKENS = 12


@define
class Seen:
    """One request as the upstream saw it. Monotonic seconds; closed_s: the client hung up before the answer's end.

    usage: a stream's usage was asked for.
    """

    name: str
    at_s: float
    path: str = ""
    authorization: str = ""
    model: str = ""
    pieces: int = 0
    first_byte_s: float | None = None
    ended_s: float | None = None
    closed_s: float | None = None
    usage: bool = False
    traceparent: str = ""


@define
class Ledger:
    """Requests by name (the last of each name) and in total. sane: this server makes none of the scripted faults."""

    requests: int = 0
    completion_tokens: int = 0
    open_connections: int = 0
    sane: bool = False
    by_name: dict[str, Seen] = field(factory=dict)
    seen: list[Seen] = field(factory=list)

    def clear(self) -> None:
        """Forget what was seen."""
        self.requests = self.completion_tokens = 0
        self.by_name.clear()
        self.seen.clear()


@frozen
class Script:
    """What one answer does."""

    name: str = ""
    stream: bool = False
    usage: bool = False
    tokens: int = 8
    per: int = 1
    rate: float = 0.0
    first_s: float = 0.0
    status: int = 200
    after: str = ""
    cut: int = -1
    stall: int = -1
    garble: int = -1
    fail: int = -1


def script_of(body: bytes) -> Script:
    """Read the words of a request's last mention of each; no JSON is parsed, which would cost more than the answer."""
    found = {key.decode(): value.decode() for key, value in _SCRIPT.findall(body)}
    squeezed = body.replace(b" ", b"")
    return Script(
        name=found.get("n", ""),
        stream=b'"stream":true' in squeezed,
        usage=b'"include_usage":true' in squeezed,
        tokens=int(found.get("tokens", "8")),
        per=int(found.get("per", "1")),
        rate=float(found.get("rate", "0")),
        first_s=float(found.get("first", "0")),
        status=int(found.get("status", "200")),
        after=found.get("after", ""),
        cut=int(found.get("cut", "-1")),
        stall=int(found.get("stall", "-1")),
        garble=int(found.get("garble", "-1")),
        fail=int(found.get("fail", "-1")),
    )


def whole_answer(script: Script) -> bytes:
    """The body of an answer that is not streamed."""
    text = f"reply to {script.name} " + "word " * (script.tokens - 1)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": script.tokens * script.per,
        "total_tokens": PROMPT_TOKENS + script.tokens * script.per,
    }
    document = {"id": "chatcmpl-fake", "object": "chat.completion", "created": 1, "model": "fake"}
    return json.dumps({**document, "choices": [choice], "usage": usage}).encode()


class UpstreamProtocol(asyncio.Protocol):
    """One connection; requests one after the other."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buffer = b""
        self._transport: Any = None
        self._current: Seen | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ledger.open_connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._ledger.open_connections -= 1
        if self._timer is not None:
            self._timer.cancel()
        if self._current is not None:
            self._current.closed_s = time.monotonic()
            self._current = None

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if len(self._buffer) > MAX_BODY_BYTES:
            self._transport.abort()
            return
        while self._current is None and (request := self._take()) is not None:
            self._answer(*request)

    def _take(self) -> tuple[bytes, bytes] | None:
        """(head, body) of the next whole request."""
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return None
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at >= 0:
            length = int(lower[at + 15 :].split(b"\r\n", 1)[0])
            if len(rest) < length:
                return None
            self._buffer = rest[length:]
            return head, rest[:length]
        if b"transfer-encoding: chunked" in lower:
            return self._take_chunked(head, rest)
        self._buffer = rest
        return head, b""

    def _take_chunked(self, head: bytes, rest: bytes) -> tuple[bytes, bytes] | None:
        body = b""
        while True:
            size, mark, rest = rest.partition(b"\r\n")
            if not mark:
                return None
            length = int(size.split(b";")[0], 16)
            if len(rest) < length + 2:
                return None
            body, rest = body + rest[:length], rest[length + 2 :]
            if length == 0:
                self._buffer = rest
                return head, body

    def _answer(self, head: bytes, body: bytes) -> None:
        script = script_of(body)
        if self._ledger.sane:
            script = evolve(script, status=200, cut=-1, stall=-1, garble=-1, fail=-1)
        seen = Seen(script.name, time.monotonic(), path=head.split(b" ", 2)[1].decode("latin-1"))
        if script.name:
            seen.usage = script.usage
            seen.authorization = _header(head, b"authorization")
            seen.traceparent = _header(head, b"traceparent")
            seen.model = model.group(1).decode() if (model := _MODEL.search(body)) else ""
            self._ledger.by_name[script.name] = seen
            self._ledger.seen.append(seen)
        self._ledger.requests += 1
        self._current = seen
        if script.first_s > 0:
            self._timer = asyncio.get_running_loop().call_later(script.first_s, self._begin, script)
        else:
            self._begin(script)

    def _begin(self, script: Script) -> None:
        assert self._current is not None
        self._current.first_byte_s = time.monotonic()
        if script.status != 200:
            self._refuse(script)
        elif script.stream:
            self._transport.write(_STREAM_HEADERS)
            self._piece(script, 0)
        else:
            body = whole_answer(script)
            self._current.pieces = script.tokens
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            self._end()

    def _refuse(self, script: Script) -> None:
        body = b'{"error":{"message":"refused as asked","type":"server_error","param":null,"code":null}}'
        more = b"retry-after: " + script.after.encode() + b"\r\n" if script.after else b""
        self._transport.write(
            b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
            % (script.status, more, len(body))
            + body
        )
        self._end()

    def _piece(self, script: Script, number: int) -> None:
        loop = asyncio.get_running_loop()
        assert self._current is not None
        while True:
            if number == script.cut:
                self._current.ended_s, self._current = time.monotonic(), None
                self._transport.abort()
                return
            if number == script.stall:
                return
            if number == script.garble:
                self._event(b'{"choices":[{"index":0,"delta":{"content":')
            if number == script.fail:
                self._event(b'{"error":{"message":"overloaded","type":"overloaded_error","code":null}}')
            if number >= script.tokens:
                self._last(script)
                return
            self._event(_piece_of(script, number))
            self._current.pieces = number = number + 1
            if script.rate > 0:
                self._timer = loop.call_later(1.0 / script.rate, self._piece, script, number)
                return

    def _last(self, script: Script) -> None:
        self._event(_HEAD + b'[{"index":0,"delta":{},"finish_reason":"stop"}]}')
        if script.usage:
            made = script.tokens * script.per
            self._event(
                _HEAD
                + b'[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
                % (PROMPT_TOKENS, made, PROMPT_TOKENS + made)
            )
        self._event(b"[DONE]")
        self._transport.write(b"0\r\n\r\n")
        self._end()

    def _event(self, data: bytes) -> None:
        block = b"data: " + data + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(block), block))

    def _end(self) -> None:
        seen, self._current = self._current, None
        if seen is not None:
            seen.ended_s = time.monotonic()
            self._ledger.completion_tokens += seen.pieces
        if self._buffer:
            asyncio.get_running_loop().call_soon(self.data_received, b"")


def _piece_of(script: Script, number: int) -> bytes:
    if number == 0:
        return _HEAD + b'[{"index":0,"delta":{"role":"assistant","content":"%s"},"finish_reason":null}]}' % (
            f"reply to {script.name} ".encode()
        )
    return _HEAD + b'[{"index":0,"delta":{"content":"w%d "},"finish_reason":null}]}' % number


def _header(head: bytes, name: bytes) -> str:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().decode("latin-1")
    return ""


async def serve_upstream(
    host: str = "127.0.0.1", port: int = 0, ledger: Ledger | None = None
) -> tuple[int, Ledger, Callable[[], None]]:
    """Listen; gives the port, the ledger and the way to stop listening."""
    kept = ledger if ledger is not None else Ledger()
    server = await asyncio.get_running_loop().create_server(lambda: UpstreamProtocol(kept), host, port, backlog=512)
    return server.sockets[0].getsockname()[1], kept, server.close
