"""A load generator on bare asyncio protocols: keep-alive connections, whole answers checked, times per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field, frozen


@frozen
class Sent:
    """A request on the wire and what a right answer has in it."""

    data: bytes
    wanted: bytes


@define
class Outcome:
    """Seconds per correct answer, how many were wrong, and the span from the first request to the last answer."""

    seconds: list[float] = field(factory=list)
    wrong: int = 0
    span_s: float = 0.0
    example: bytes = b""

    @property
    def per_s(self) -> float:
        """Correct answers a second."""
        return len(self.seconds) / self.span_s if self.span_s > 0 else 0.0


def request_bytes(path: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A POST as it goes on the wire."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append(f"content-length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Connection(asyncio.Protocol):
    """One keep-alive connection: `ask` sends and waits for the whole answer. pieces_s: when data with events came."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._waiter: asyncio.Future[bytes] | None = None
        self._buffer = b""
        self.pieces_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(exc or ConnectionResetError("closed"))

    def data_received(self, data: bytes) -> None:
        if b"data: {" in data:
            self.pieces_s.append(time.monotonic())
        self._buffer = self._buffer + data if self._buffer else data
        if self._waiter is not None and not self._waiter.done() and _complete(self._buffer):
            self._waiter.set_result(self._buffer)

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """Send one request; the future gives head and body as they came."""
        self._buffer = b""
        self.pieces_s = []
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiter

    def abort(self) -> None:
        """Hang up without a goodbye."""
        if self._waiter is not None:
            self._waiter.cancel()
        self._transport.abort()

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


def _complete(buffer: bytes) -> bool:
    head, mark, rest = buffer.partition(b"\r\n\r\n")
    if not mark:
        return False
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at >= 0:
        return len(rest) >= int(lower[at + 15 :].split(b"\r\n", 1)[0])
    return rest.endswith(b"0\r\n\r\n")


async def connect(port: int, host: str = "127.0.0.1") -> Connection:
    """A fresh connection."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


async def closed_loop(
    port: int, make: Callable[[], Sent], concurrency: int, *, seconds: float, most: int = 1 << 30
) -> Outcome:
    """One request after the other on each of `concurrency` connections, for `seconds` or `most` requests in all.

    Only an answer with status 200 and the wanted text counts.
    """
    outcome = Outcome()
    connections = [await connect(port) for _ in range(concurrency)]
    began_s = time.perf_counter()
    asked = 0

    async def work(connection: Connection) -> None:
        nonlocal asked
        while asked < most and time.perf_counter() - began_s < seconds:
            asked += 1
            sent = make()
            sent_s = time.perf_counter()
            try:
                answer = await connection.ask(sent.data)
            except OSError:
                outcome.wrong += 1
                connection = await connect(port)
                continue
            took_s = time.perf_counter() - sent_s
            if answer.startswith(b"HTTP/1.1 200") and sent.wanted in answer:
                outcome.seconds.append(took_s)
            else:
                outcome.wrong += 1
                outcome.example = answer[:400]
            if b"onnection: close" in answer[:1024]:
                connection.close()
                connection = await connect(port)
        connection.close()

    await asyncio.gather(*(work(connection) for connection in connections))
    outcome.span_s = time.perf_counter() - began_s
    return outcome
