"""A child process of ours and the socket pair to it: started when it is needed, at most so often, named when it dies.

A frame is a u32 length, big-endian, and the bytes. The child ends when the socket does: it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path

from links.port import MAX_FRAME_BYTES
from protocol.clock import Clock
from protocol.errors import EngineCrashed, EngineError, LinkClosed, LinkError, TooLarge

END_S = 5.0
MAX_STARTS = 5
STARTS_WINDOW_S = 60.0
_POLL_S = 0.01
DYING_S = 1.0
"""A process that dies closes its sockets before it can be waited for."""
_LENGTH = struct.Struct(">I")


class SocketFrames:
    """FrameStream over one end of a connected socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connected: socket.socket) -> SocketFrames:
        """Takes the socket over."""
        return cls(*await asyncio.open_connection(sock=connected))

    async def send(self, frame: bytes) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise TooLarge(f"a frame has {len(frame)} bytes, at most {MAX_FRAME_BYTES} are sent")
        try:
            self._writer.write(_LENGTH.pack(len(frame)) + frame)
            await self._writer.drain()
        except (OSError, RuntimeError) as err:
            raise LinkClosed("the other process is gone") from err

    async def receive(self) -> bytes | None:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise LinkError(f"a frame claims {length} bytes, at most {MAX_FRAME_BYTES} are taken")
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as err:
            if err.partial:
                raise LinkClosed("the other process vanished in the middle of a frame") from err
            return None
        except OSError as err:
            raise LinkClosed("the other process is gone") from err

    def abort(self) -> None:
        """Close it at once."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return


class ChildProcess:
    """`python -m engines.worker`, whose first frame is `spec`.

    Args:
        spec: JSON; see engines.worker.
        name: of what it runs, in messages.
    """

    def __init__(self, spec: bytes, *, name: str, clock: Clock) -> None:
        self._spec = spec
        self._name = name
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._why = ""
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)

    @property
    def process_id(self) -> int | None:
        """The child's id while one was started and not yet waited for."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether one was started that has not ended."""
        return self._process is not None and self._process.poll() is None

    async def open(self) -> SocketFrames:
        """Start it, after the end of the one before. Raises EngineError when that died too often, or none can start."""
        await self.reap()
        now_s = self._clock()
        if len(self._starts) == MAX_STARTS and now_s - self._starts[0] < STARTS_WINDOW_S:
            raise EngineError(
                f"the worker process of {self._name} died {MAX_STARTS} times within {STARTS_WINDOW_S:.0f} s",
                next_step="look at its messages, or use another engine",
            )
        self._starts.append(now_s)
        self._why = ""
        here, there = socket.socketpair()
        try:
            self._process = _spawn(there)
        except OSError as err:
            here.close()
            raise EngineError(f"the worker process of {self._name} cannot be started: {err}") from err
        finally:
            there.close()
        try:
            frames = await SocketFrames.over(here)
        except BaseException:
            here.close()  # which ends the child
            raise
        try:
            await frames.send(self._spec)
        except LinkClosed as err:
            frames.abort()
            await self.ended(DYING_S)
            raise self.crashed() from err
        except BaseException:
            frames.abort()
            raise
        return frames

    async def reap(self) -> None:
        """Wait for the child, whose socket is closed by now; end it if it does not go."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def ended(self, within_s: float) -> bool:
        """Whether it is gone, at the latest so many seconds from now: its sockets close a moment before it ends."""
        end_s = self._clock() + within_s
        while self.alive and self._clock() < end_s:
            await asyncio.sleep(_POLL_S)
        return not self.alive

    def kill(self, why: str) -> None:
        """End it at once, also when it is stopped or stuck; `why` is told to the requests that this breaks."""
        if self._process is not None:
            self._why = why
            self._process.kill()

    def crashed(self) -> EngineCrashed:
        """What its loss means to a request."""
        code = None if self._process is None else self._process.poll()
        how = f" by signal {signal.Signals(-code).name}" if code is not None and code < 0 else ""
        if self._why:
            how = f": {self._why}"
        return EngineCrashed(
            f"the worker process of {self._name} ended{how}", next_step="ask again: it is started anew"
        )


def _spawn(there: socket.socket) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.Popen(
        [sys.executable, "-m", "engines.worker", str(there.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(there.fileno(),),
        # Ctrl-C at a terminal is the parent's to handle.
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
