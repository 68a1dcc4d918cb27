"""The client's end of one handoff connection: many streams over one FrameStream, a reader and a writer."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from links.port import FrameStream
from protocol.errors import LinkClosed, LinkError, MidstreamError, ProtocolError
from protocol.handoff import NO_STREAM, STREAM_BYTES, Ack, Frame, Framed, Refuse
from protocol.handoff_headers import TAIL_BYTES, HandoffReader, HandoffWriter
from protocol.refusals import MAX_MESSAGE_CHARS

OnFrame = Callable[[Framed], None]
OnLost = Callable[[MidstreamError], None]


class PeerConnection:
    """Sends frames in order without making the caller wait, and hands received ones to the stream they name.

    An Ack that has not left yet is replaced by a later one of the same stream, so slow links carry few of them.
    """

    def __init__(self, frames: FrameStream) -> None:
        self._frames = frames
        self._reader, self._writer = HandoffReader(), HandoffWriter()
        self._base = b""
        self._number = 0
        self._streams: dict[bytes, tuple[OnFrame, OnLost]] = {}
        self._outgoing: deque[tuple[bytes, int, Frame]] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.lost: MidstreamError | None = None
        self._tasks = [
            asyncio.create_task(self._read(), name="peer-read"),
            asyncio.create_task(self._write(), name="peer-write"),
        ]

    def new_stream(self) -> bytes:
        """A stream id that nobody can guess; those of one connection are near each other, which shortens headers."""
        if not self._number:
            self._base = os.urandom(STREAM_BYTES - TAIL_BYTES)
        number = self._number
        self._number = (number + 1) % (1 << 8 * TAIL_BYTES)
        return self._base + number.to_bytes(TAIL_BYTES, "big")

    def attach(self, stream: bytes, on_frame: OnFrame, on_lost: OnLost) -> None:
        """Frames of `stream` go to `on_frame`; `on_lost` is called once if the connection dies before `detach`."""
        self._streams[stream] = (on_frame, on_lost)

    def detach(self, stream: bytes) -> None:
        """Forget `stream`; late frames of it are dropped."""
        self._streams.pop(stream, None)

    def post(self, stream: bytes, epoch: int, frame: Frame) -> None:
        """Queue a frame. Raises what the connection was lost by."""
        if self.lost is not None:
            raise self.lost
        if isinstance(frame, Ack):
            for place, (other, _, waiting) in enumerate(self._outgoing):
                if other == stream and isinstance(waiting, Ack):
                    self._outgoing[place] = (stream, epoch, frame)
                    return
        self._outgoing.append((stream, epoch, frame))
        self._idle.clear()
        self._work.set()

    async def close(self) -> None:
        """Send what is queued (for at most a second), say goodbye, end both tasks."""
        if self.lost is None:
            try:
                async with asyncio.timeout(1.0):
                    await self._idle.wait()
            except TimeoutError:
                pass
            self.lost = LinkClosed("the connection was closed here")
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._frames.close()

    async def _read(self) -> None:
        try:
            while (data := await self._frames.receive()) is not None:
                framed = self._reader.decode(data)
                if framed.stream == NO_STREAM and isinstance(framed.frame, Refuse):
                    raise LinkClosed(f"the peer ended the connection: {framed.frame.message[:MAX_MESSAGE_CHARS]}")
                known = self._streams.get(framed.stream)
                if known is not None:
                    known[0](framed)
        except MidstreamError as err:
            self._lose(err)
        else:
            self._lose(LinkClosed("the peer ended the connection"))

    async def _write(self) -> None:
        try:
            while True:
                await self._work.wait()
                while self._outgoing:
                    stream, epoch, frame = self._outgoing.popleft()
                    await self._send(stream, epoch, frame)
                self._work.clear()
                self._idle.set()
        except MidstreamError as err:
            self._lose(err)

    async def _send(self, stream: bytes, epoch: int, frame: Frame) -> None:
        try:
            data = self._writer.encode(stream, epoch, frame)
        except MidstreamError as err:
            # Only this stream is at fault; the connection goes on.
            known = self._streams.pop(stream, None)
            if known is not None:
                known[1](err)
            return
        await self._frames.send(data)
        self._writer.sent()

    def _lose(self, error: MidstreamError) -> None:
        if self.lost is not None:
            return
        self.lost = error if isinstance(error, LinkError | ProtocolError) else LinkClosed(str(error))
        self._idle.set()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        streams, self._streams = self._streams, {}
        for _, on_lost in streams.values():
            on_lost(self.lost)
