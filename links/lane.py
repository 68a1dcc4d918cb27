"""A frame stream read by a thread of its own, whose callback may block: while it works, nothing more is read.

Back-pressure then reaches the sender through the transport. This is how a link's reader becomes the caller that runs
the work when an executor is full, without ever holding up the house's event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable

from links.port import FrameStream
from protocol.errors import LinkClosed, LinkTimeout, MidstreamError

log = logging.getLogger("midstream.links.lane")


class ReaderLane:
    """Opens a stream in its own thread and event loop and calls `on_frame(frame)` for each frame, one at a time.

    Args:
        open_stream: opens the stream; called inside the lane's event loop, so a link it uses must be made there too.
        on_frame: may block; what it raises ends the lane and is told to `on_end`.
        on_end: called once, in the lane's thread, with None after an orderly end, else the error.
        after: awaited in the lane's loop when the stream is closed, for example to close the link.
    """

    def __init__(
        self,
        open_stream: Callable[[], Awaitable[FrameStream]],
        on_frame: Callable[[bytes], None],
        *,
        on_end: Callable[[Exception | None], None] = lambda error: None,
        after: Callable[[], Awaitable[None]] | None = None,
        name: str = "reader lane",
    ) -> None:
        self._open_stream = open_stream
        self._on_frame = on_frame
        self._on_end = on_end
        self._after = after
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stream: FrameStream | None = None
        self._stopping = False
        self.frames = 0
        """Frames that have been handled."""

    def start(self, timeout_s: float = 10.0) -> None:
        """Start the thread and wait until the stream is open. Blocks; raises what opening raised, or LinkTimeout."""
        self._thread.start()
        try:
            self._opened.result(timeout_s)
        except concurrent.futures.TimeoutError as err:
            self.close(0.0)
            raise LinkTimeout("the lane's stream did not open in time") from err

    def send(self, frame: bytes, timeout_s: float = 10.0) -> None:
        """Send from any other thread; waits while the lane's callback runs. Raises LinkClosed, LinkTimeout."""
        loop, stream = self._loop, self._stream
        if loop is None or stream is None or not self._thread.is_alive():
            raise LinkClosed("the lane is not open")
        try:
            future = asyncio.run_coroutine_threadsafe(_send(stream, frame), loop)
        except RuntimeError as err:
            raise LinkClosed("the lane has ended") from err
        try:
            future.result(timeout_s)
        except concurrent.futures.TimeoutError as err:
            future.cancel()
            raise LinkTimeout("the lane did not send the frame in time") from err
        except concurrent.futures.CancelledError as err:
            raise LinkClosed("the lane has ended") from err

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop reading after the frame at hand and wait for the thread; idempotent, from any thread but the lane's."""
        self._stopping = True
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                loop.call_soon_threadsafe(self._stop_reading)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _stop_reading(self) -> None:
        """In the lane's loop, where it is known whether the clean-up has begun: that is never cut short."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()

    def _work(self) -> None:
        error: Exception | None = None
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except Exception as err:  # noqa: BLE001 - handed to on_end or to start, never lost
            error = err
        if not self._opened.done():
            self._opened.set_exception(error or LinkClosed("the lane was closed before its stream was open"))
            return
        if error is not None and not isinstance(error, MidstreamError):
            log.error("a lane ended by a bug of its callback", exc_info=error)
        self._on_end(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reading = asyncio.current_task()
        try:
            if self._stopping:
                return
            self._stream = await self._open_stream()
            self._opened.set_result(None)
            while not self._stopping and (frame := await self._stream.receive()) is not None:
                # Blocks this lane's loop on purpose: nothing is read meanwhile.
                self._on_frame(frame)
                self.frames += 1
        finally:
            self._reading = None
            if self._stream is not None:
                await self._stream.close()
            if self._after is not None:
                await self._after()


async def _send(stream: FrameStream, frame: bytes) -> None:
    await stream.send(frame)
