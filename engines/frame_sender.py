"""The writing half of a stream of tensor frames: small frames first, then messages in fragments, within the credit."""

from __future__ import annotations

import asyncio
from collections import deque

from engines.begun import Begun
from engines.frame_parts import Outgoing, OutgoingQueue
from links.port import FrameStream
from protocol.errors import ProtocolError
from protocol.tensor_frames import TensorFrame, encode

MAX_SMALL = 4_096
"""Frames without data that wait for a far end that does not read; several for each request that a stream takes."""


class FrameSender:
    """Sends until its task ends. For one event loop.

    credit_bytes: data that may be sent before `grant` allows more; None: no such bound.
    """

    def __init__(self, stream: FrameStream, credit_bytes: int | None = None) -> None:
        self._stream = stream
        self._credit_bytes = credit_bytes
        self._data_bytes = 0
        self._small: deque[bytes] = deque()
        self._messages = OutgoingQueue()
        self._running: asyncio.Task[None] | None = None
        self._writing = False
        self._broken: ProtocolError | None = None
        self._begun: Begun | None = None
        self._work = asyncio.Event()
        self.sent_bytes = 0
        """Of all frames whose sending has begun."""

    @property
    def waiting(self) -> int:
        """Messages that have not left entirely."""
        return len(self._messages)

    def say(self, request: int, frame: TensorFrame) -> None:
        """A frame without tensor data: it overtakes every message. Over MAX_SMALL of them waiting end the stream."""
        if len(self._small) >= MAX_SMALL:
            self._end()
            return
        self._small.append(encode(request, frame))
        self._work.set()

    def post(self, message: Outgoing) -> None:
        """Where nothing else is being written, what is next leaves from here, without a turn of the loop; with what has
        to wait for room `run` goes on, before anything else. What goes wrong ends `run`, and raises nothing here.
        """
        self._messages.add(message)
        if self._running is not None and self._begun is None and not self._writing:
            begun = Begun(self._send_next())
            self._begun = None if begun.done else begun
        if self._begun is not None or self._small or self._messages:
            self._work.set()

    def drop(self, request: int) -> Outgoing | None:
        """Do not send (the rest of) this message; what was dropped, if anything."""
        return self._messages.drop(request)

    def grant(self, total_bytes: int) -> None:
        """The other side takes `total_bytes` of data in all; a smaller figure than before changes nothing."""
        if self._credit_bytes is not None and total_bytes > self._credit_bytes:
            self._credit_bytes = total_bytes
            self._work.set()

    async def run(self) -> None:
        """Send what comes; ends with the LinkError of the stream, ProtocolError when the far end does not read, or the
        TooLarge or ProtocolError of a message that cannot be told."""
        self._running = task = asyncio.current_task()
        try:
            await self._send_all()
        except asyncio.CancelledError:
            if self._broken is not None and task is not None and task.uncancel() == 0:
                raise self._broken from None
            raise
        finally:
            self._running = None  # what is posted from now on does not leave
            if self._begun is not None:
                self._begun.drop()

    def _end(self) -> None:
        if self._broken is None:
            self._broken = ProtocolError(f"{MAX_SMALL} frames wait and are not read", next_step="read the stream")
            if self._running is not None:
                self._running.cancel()

    async def _send_all(self) -> None:
        if self._broken is not None:
            raise self._broken
        while True:
            self._work.clear()
            if self._begun is not None:
                await self._begun
                self._begun = None
            if not await self._send_next():
                await self._work.wait()

    async def _send_next(self) -> bool:
        """All small frames and one of a message; False when nothing more can leave now."""
        self._writing = True
        try:
            while self._small:
                await self._send(self._small.popleft())
            message = self._messages.next()
            return message is not None and await self._send_part(message)
        finally:
            self._writing = False

    async def _send_part(self, message: Outgoing) -> bool:
        """One frame of `message`; False when there is no credit for it."""
        room_bytes = 1 << 62 if self._credit_bytes is None else self._credit_bytes - self._data_bytes
        if room_bytes <= 0 and message.left_bytes:
            self._messages.stalled()
            return False
        if not message.begun:
            message.on_begin(self.sent_bytes)
        frame, data_bytes = message.frame(room_bytes)
        self._data_bytes += data_bytes
        done = message.left_bytes == 0
        self._messages.back(message, done)
        await self._send(frame)
        if done:
            message.on_end(self.sent_bytes)
        return True

    async def _send(self, frame: bytes) -> None:
        self.sent_bytes += len(frame)
        await self._stream.send(frame)
