"""The app's side of the control channel: connects, resumes, sends again, and hands instructions on, one by one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from links.port import FrameStream, Link
from protocol.clock import Clock
from protocol.control_frames import (
    PATH,
    Ack,
    Beat,
    Bye,
    Frame,
    Hello,
    Instruction,
    Outbox,
    Result,
    Welcome,
    read_frame,
    write_frame,
)
from protocol.errors import LinkError, MidstreamError, ProtocolError

Obey = Callable[[Instruction], Awaitable[Mapping[str, Any]]]
"""Carries an instruction out; what it returns is its result. A MidstreamError becomes a failed one."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
WELCOME_S = 10.0
BEATS_PER_HEARTBEAT = 3
SILENT_BEATS = 2.0


class Channel:
    """Runs until close(). Results are kept until the gateway has them, over any number of connections.

    Args:
        link: to the gateway; it carries the key, where one is needed.
        obey: instructions come in order, each once.
        about: engines and models of this app, told at each connection.
    """

    def __init__(
        self,
        link: Link,
        obey: Obey,
        about: Callable[[], tuple[tuple[str, ...], tuple[str, ...]]],
        *,
        device: str = "",
        session: str | None = None,
        clock: Clock = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.session = session or secrets.token_hex(16)
        self.connections = 0
        self.lost = 0
        """Instructions that the gateway gave up, for too many waited for this app's acknowledgement."""
        self._link = link
        self._obey = obey
        self._about = about
        self._device = device
        self._clock = clock
        self._draw = draw
        self._outbox = Outbox()
        self._taken = 0
        self._stream: FrameStream | None = None
        self._heard_s = 0.0
        self._connected = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._orders: asyncio.Queue[Instruction] = asyncio.Queue(1_000)
        self._tasks = {asyncio.create_task(self._run()), asyncio.create_task(self._obey_on())}

    @property
    def waiting(self) -> int:
        """Results that the gateway has not confirmed."""
        return len(self._outbox)

    async def connected(self, timeout_s: float = 10.0) -> None:
        """Return once the gateway has welcomed the app. Raises TimeoutError."""
        await asyncio.wait_for(self._connected.wait(), timeout_s)

    async def settled(self, timeout_s: float = 10.0) -> None:
        """Return once every result is confirmed. Raises TimeoutError."""
        await asyncio.wait_for(self._empty.wait(), timeout_s)

    def report(self, of: str, kind: str, body: Mapping[str, Any]) -> None:
        """Send a result now or when the gateway is back. Raises Full, or ProtocolError for one that is too large."""
        data = self._outbox.put(Result(of=of, kind=kind, body=body))  # type: ignore[arg-type]
        self._empty.clear()
        if self._stream is not None:
            task = asyncio.create_task(self._send(self._stream, data))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Say goodbye; results that were not confirmed stay with this object only."""
        if self._stream is not None:
            await self._send(self._stream, write_frame(Bye(reason="the app ends")))
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            begun_s = self._clock()
            with contextlib.suppress(MidstreamError, TimeoutError):
                await self._connect()
            lived = self._clock() - begun_s > LONGEST_WAIT_S or self._connected.is_set()
            self._connected.clear()
            wait_s = FIRST_WAIT_S if lived else min(LONGEST_WAIT_S, 2 * wait_s)
            await asyncio.sleep(wait_s * self._draw())

    async def _connect(self) -> None:
        """One connection, from hello to its end."""
        stream = await self._link.open(PATH)
        try:
            engines, models = self._about()
            hello = Hello(
                session=self.session, device=self._device, received=self._taken, engines=engines, models=models
            )
            await stream.send(write_frame(hello))
            welcome = await asyncio.wait_for(self._next(stream), WELCOME_S)
            if not isinstance(welcome, Welcome):
                raise ProtocolError(getattr(welcome, "reason", "") or "the gateway did not welcome this app")
            if self.connections:
                self._outbox.resume(welcome.received)
            else:  # what waits was never sent; an earlier life of the app may have been
                self._outbox.renumber(welcome.received)
            self._confirmed(0)
            for frame in self._outbox.waiting():
                await stream.send(frame)
            self._stream, self._heard_s = stream, self._clock()
            self.connections += 1
            self.lost += welcome.lost
            self._connected.set()
            beating = asyncio.create_task(self._beat_on(stream, welcome.heartbeat_s))
            try:
                await self._listen(stream)
            finally:
                self._stream = None
                beating.cancel()
                await asyncio.wait({beating})
        finally:
            await stream.close()

    async def _listen(self, stream: FrameStream) -> None:
        while (frame := await self._next(stream)) is not None:
            self._heard_s = self._clock()
            if isinstance(frame, Ack):
                self._confirmed(frame.seq)
            elif isinstance(frame, Instruction):
                # Its number is taken with it: what was read here is obeyed here, also over a new connection.
                if frame.seq == self._taken + 1:
                    await self._orders.put(frame)
                    self._taken = frame.seq
                await stream.send(write_frame(Ack(seq=self._taken)))
            elif isinstance(frame, Bye):
                return

    async def _obey_on(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                body = await self._obey(order)
                self.report(order.id, "done", {"do": order.do, **body})
            except MidstreamError as err:
                with contextlib.suppress(MidstreamError):
                    self.report(order.id, "failed", {"do": order.do, "code": err.code, "message": err.message[:500]})

    async def _beat_on(self, stream: FrameStream, heartbeat_s: float) -> None:
        while True:
            await asyncio.sleep(heartbeat_s / BEATS_PER_HEARTBEAT)
            if self._clock() - self._heard_s > SILENT_BEATS * heartbeat_s:
                await stream.close()
                return
            await self._send(stream, write_frame(Beat()))

    async def _next(self, stream: FrameStream) -> Frame | None:
        while (data := await stream.receive()) is not None:
            frame = read_frame(data)
            if frame is not None:
                return frame
        return None

    async def _send(self, stream: FrameStream, data: bytes) -> None:
        with contextlib.suppress(LinkError):
            await stream.send(data)

    def _confirmed(self, seq: int) -> None:
        self._outbox.acknowledge(seq)
        if not len(self._outbox):
            self._empty.set()
