"""User-space shapers: a TCP proxy with rate, delay, loss, stalls and cuts, and a Link that waits as a slow one would.

For demos, benchmarks and tests: no privileges, no kernel modules, everything can be changed while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

from attrs import evolve, frozen

from links.port import FrameStream, Link, Reply, WireTimes
from protocol.clock import Clock
from protocol.errors import ConfigError
from protocol.events import Direction, TransferSample

_SLICE_S = 0.01
_AHEAD_S = 0.03
"""Slices are reserved this long ahead, so that a timer that fires late never costs rate."""
_LEAST_SLICE_BYTES = 512
_MOST_SLICE_BYTES = 16 << 10
_KERNEL_BUFFER_BYTES = 16 << 10
_SEGMENT_BYTES = 1460


class Pace:
    """A rate that many users share: each reserves its bytes on one time line, so sleeping too long is made up for."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self._rate = _checked(rate_bytes_per_s)
        self._free_s = 0.0
        self._changed = asyncio.Event()

    @property
    def rate_bytes_per_s(self) -> float:
        return self._rate

    def set_rate(self, rate_bytes_per_s: float) -> None:
        """0 stalls; infinite means unshaped. Takes effect at once, also on bytes that wait."""
        now_s = time.monotonic()
        if self._rate > 0 and self._free_s > now_s and rate_bytes_per_s > 0:
            self._free_s = now_s + (self._free_s - now_s) * self._rate / rate_bytes_per_s
        self._rate = _checked(rate_bytes_per_s)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def slice_bytes(self) -> int:
        """How much to send at a time so that a change of rate is felt within about 10 ms."""
        return int(min(max(self._rate * _SLICE_S, _LEAST_SLICE_BYTES), _MOST_SLICE_BYTES))

    async def take(self, size_bytes: int) -> float:
        """When `size_bytes` will have passed at the rate, monotonic; returns shortly before that."""
        while self._rate <= 0:
            await self._changed.wait()
        self._free_s = max(time.monotonic(), self._free_s) + size_bytes / self._rate
        while (wait_s := self._free_s - _AHEAD_S - time.monotonic()) > 0 or self._rate <= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._rate <= 0 else wait_s):
                    await self._changed.wait()
        return self._free_s


def _checked(rate_bytes_per_s: float) -> float:
    if not rate_bytes_per_s >= 0:
        raise ConfigError(f"{rate_bytes_per_s} is not a rate", field="rate_bytes_per_s")
    return rate_bytes_per_s


@frozen
class Loss:
    """Lost segments as TCP lets its user feel them: what was lost comes `again_s` later, and nothing overtakes it.

    ratio: share of segments. draw: 0 <= draw() < 1.
    """

    ratio: float
    again_s: float
    draw: Callable[[], float]

    def hits(self) -> bool:
        """Whether the next segment is lost."""
        return self.draw() < self.ratio


class ShaperProxy:
    """A TCP proxy on loopback in front of `host`:`port`.

    Args:
        up_bytes_per_s: rate from the client to the target; infinite means unshaped.
        down_bytes_per_s: rate of the answers; None takes the same.
        delay_s: added one way, in each direction.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        up_bytes_per_s: float = float("inf"),
        down_bytes_per_s: float | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._target = (host, port)
        self._up = Pace(up_bytes_per_s)
        self._down = Pace(up_bytes_per_s if down_bytes_per_s is None else down_bytes_per_s)
        self._delay_s = delay_s
        self._loss: Loss | None = None
        self._server: asyncio.Server | None = None
        self._transports: set[asyncio.WriteTransport] = set()
        self._sessions: set[asyncio.Task[None]] = set()
        self._refusing = False
        self.up_bytes = 0
        """Bytes that have passed towards the target."""
        self.down_bytes = 0

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        assert self._server is not None, "start the proxy first"
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, port: int = 0) -> int:
        """Listen on loopback; returns the port. Raises ConfigError when it is in use."""
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _shrink(listener)
            listener.bind((self.host, port))
        except OSError as err:
            listener.close()
            raise ConfigError(f"cannot listen on port {port}: {err.strerror}", next_step="choose another port") from err
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_MOST_SLICE_BYTES)
        return self.port

    def set_rate(self, up_bytes_per_s: float, down_bytes_per_s: float | None = None) -> None:
        """Change the rates while transfers run; 0 stalls them."""
        self._up.set_rate(up_bytes_per_s)
        self._down.set_rate(up_bytes_per_s if down_bytes_per_s is None else down_bytes_per_s)

    def set_delay(self, delay_s: float) -> None:
        """Change the one-way delay for what comes from now on."""
        self._delay_s = delay_s

    def set_loss(self, loss: Loss | None) -> None:
        """Lose segments of what comes from now on; None loses none."""
        self._loss = loss

    def cut(self) -> None:
        """Break every connection now and refuse new ones until `restore`."""
        self._refusing = True
        for transport in list(self._transports):
            transport.abort()

    def restore(self) -> None:
        """Take connections again."""
        self._refusing = False

    async def close(self) -> None:
        """Stop listening and break what is open."""
        self.cut()
        if self._server is not None:
            self._server.close()
        sessions = list(self._sessions)
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refusing:
                return
            await self._relay(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_socket = socket.socket()
        _shrink(far_socket)
        far_socket.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(far_socket, self._target)
            far_reader, far_writer = await asyncio.open_connection(sock=far_socket, limit=_MOST_SLICE_BYTES)
        except BaseException:
            far_socket.close()
            raise
        transports = {writer.transport, far_writer.transport}
        self._transports |= transports
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer, self._up, "up"))
                group.create_task(self._pump(far_reader, writer, self._down, "down"))
        except* (OSError, ConnectionError):
            pass
        finally:
            self._transports -= transports
            for transport in transports:
                transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace, direction: Direction
    ) -> None:
        """One direction of one connection: pace what is read, deliver it `delay_s` later, then the end mark."""
        pipe = _Delayed()
        deliver = asyncio.get_running_loop().create_task(pipe.deliver(writer))
        try:
            while data := await reader.read(pace.slice_bytes()):
                due_s = await pace.take(len(data)) + self._delay_s
                if self._loss is not None and self._loss.hits():
                    due_s += self._loss.again_s
                if direction == "up":
                    self.up_bytes += len(data)
                else:
                    self.down_bytes += len(data)
                await pipe.put(due_s, data)
                if deliver.done():
                    break
            await pipe.put(time.monotonic() + self._delay_s, b"")
            await deliver
        finally:
            deliver.cancel()
            await asyncio.gather(deliver, return_exceptions=True)


class _Delayed:
    """Bytes on their way, each due at a time; bounded, because a real path holds only so much."""

    MOST_BYTES = 4 << 20

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._changed = asyncio.Condition()

    async def put(self, due_s: float, data: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes < self.MOST_BYTES)
            self._waiting.append((due_s, data))
            self._bytes += len(data)
            self._changed.notify_all()

    async def deliver(self, writer: asyncio.StreamWriter) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._waiting))
                due_s, data = self._waiting.popleft()
                self._bytes -= len(data)
                self._changed.notify_all()
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


def _shrink(sock: socket.socket) -> None:
    """Small kernel buffers, so that the sender feels the rate, and small segments: loopback's 64 KiB ones stall."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


@frozen
class Conditions:
    """A link at one moment: bytes per second each way and one-way delay in seconds."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    delay_s: float = 0.0


Trace = Callable[[float], Conditions]
"""Conditions at so many seconds after the link was made."""


class ShapedLink:
    """A Link that takes the time which `trace` prescribes, around any other Link.

    It emits the samples of the shaped transfers; give the inner link no sink.
    """

    def __init__(
        self,
        link: Link,
        trace: Trace,
        *,
        sink: Callable[[TransferSample], None] = lambda sample: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._link = link
        self._trace = trace
        self._sink = sink
        self._clock = clock
        self._began_s = clock()

    @property
    def name(self) -> str:
        return self._link.name

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        sent_s = await self._travel("up", len(body))
        reply = await self._link.exchange(path, headers, body, deadline_s, method)
        received_s = await self._travel("down", len(reply.body))
        if reply.times == WireTimes():
            return reply
        times = evolve(reply.times, send_s=reply.times.send_s + sent_s, receive_s=reply.times.receive_s + received_s)
        return evolve(reply, times=times)

    async def lines(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float
    ) -> AsyncIterator[bytes]:
        await self._travel("up", len(body))
        inner = self._link.lines(path, headers, body, deadline_s)
        try:
            async for chunk in inner:
                await self._travel("down", len(chunk), sampled=False)
                yield chunk
        finally:
            close = getattr(inner, "aclose", None)
            if close is not None:
                await close()

    async def open(self, path: str) -> FrameStream:
        return _ShapedStream(await self._link.open(path), self)

    async def close(self) -> None:
        await self._link.close()

    async def _travel(self, direction: Direction, size_bytes: int, sampled: bool = True) -> float:
        """Wait as long as so many bytes take; returns the seconds."""
        now = self._trace(self._clock() - self._began_s)
        rate = now.up_bytes_per_s if direction == "up" else now.down_bytes_per_s
        seconds = now.delay_s + (size_bytes / rate if rate > 0 else float("inf"))
        began_s = self._clock()
        # A dead link waits for the trace to come back to life, which the caller's deadline bounds.
        await asyncio.sleep(min(seconds, 3600.0))
        now_s = self._clock()
        if sampled:
            self._sink(
                TransferSample(
                    at_s=now_s, link=self.name, direction=direction, size_bytes=size_bytes, seconds=now_s - began_s
                )
            )
        return now_s - began_s


class _ShapedStream:
    """A FrameStream whose frames travel at the link's pace, both ways."""

    def __init__(self, stream: FrameStream, link: ShapedLink) -> None:
        self._stream = stream
        self._link = link

    async def send(self, frame: bytes) -> None:
        await self._link._travel("up", len(frame), sampled=False)
        await self._stream.send(frame)

    async def receive(self) -> bytes | None:
        frame = await self._stream.receive()
        if frame is not None:
            await self._link._travel("down", len(frame), sampled=False)
        return frame

    async def close(self) -> None:
        await self._stream.close()
