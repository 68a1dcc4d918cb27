"""A text engine in a child process of its own, so that a crash of native code is an error here and not our death.

Parent and child speak the handoff protocol over a socket pair: a frame is a u32 length, big-endian, and the bytes.
The first frame, from the parent, is JSON: {"target": "module:Class", "settings": {keyword arguments}}. The child ends
when the socket does, so it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.peer import PeerEngine
from engines.peer_host import serve_stream
from engines.port import Continuation, EngineLoad, TextEngine
from links.port import MAX_FRAME_BYTES
from protocol.clock import Clock
from protocol.errors import EngineCrashed, EngineError, LinkClosed, LinkError, MidstreamError, TooLarge
from protocol.text import TextCapabilities, TextRequest

END_S = 5.0
MAX_STARTS = 5
STARTS_WINDOW_S = 60.0
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

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return


class WorkerEngine:
    """TextEngine that runs `target(**settings)` in a child process, started at first use and again after a crash.

    Args:
        target: "module:Class" of a TextEngine.
        settings: its keyword arguments, as JSON can carry them.
    """

    def __init__(
        self, target: str, settings: Mapping[str, Any], *, name: str = "worker", clock: Clock = time.monotonic
    ) -> None:
        self._spec = json.dumps({"target": target, "settings": dict(settings)}).encode()
        self._name = name
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)
        self._peer = PeerEngine(self._open, name=name, resume_s=0.0, silence_s=300.0, lost=self._crashed, clock=clock)

    @property
    def process_id(self) -> int | None:
        """The child's id while one was started and not yet waited for."""
        return None if self._process is None else self._process.pid

    async def capabilities(self) -> TextCapabilities:
        return await self._peer.capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        return await self._peer.prepare(request, deadline_s)

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._peer.tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return await self._peer.embed(texts)

    def load(self) -> EngineLoad:
        return self._peer.load()

    async def close(self) -> None:
        await self._peer.close()
        await self._reap()

    async def _open(self) -> SocketFrames:
        await self._reap()
        now_s = self._clock()
        if len(self._starts) == MAX_STARTS and now_s - self._starts[0] < STARTS_WINDOW_S:
            raise EngineError(
                f"the worker process of {self._name} died {MAX_STARTS} times within {STARTS_WINDOW_S:.0f} s",
                next_step="look at its messages, or use another engine",
            )
        self._starts.append(now_s)
        here, there = socket.socketpair()
        try:
            self._process = _spawn(there)
        except OSError as err:
            here.close()
            raise EngineError(f"the worker process of {self._name} cannot be started: {err}") from err
        finally:
            there.close()
        frames = await SocketFrames.over(here)
        await frames.send(self._spec)
        return frames

    async def _reap(self) -> None:
        """Wait for the child, whose socket is closed by now; end it if it does not go."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _crashed(self, err: MidstreamError) -> MidstreamError:
        code = None if self._process is None else self._process.poll()
        how = f" by signal {signal.Signals(-code).name}" if code is not None and code < 0 else ""
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


def load_target(target: str, settings: Mapping[str, Any]) -> TextEngine:
    """The engine that a spec names. Raises EngineError."""
    module, _, name = target.partition(":")
    try:
        engine: TextEngine = getattr(importlib.import_module(module), name)(**settings)
    except (ImportError, AttributeError, TypeError) as err:
        raise EngineError(f"{target} cannot be made: {err}") from err
    return engine


async def serve_socket(descriptor: int) -> None:
    """The child: read the spec, serve the engine until the parent closes the socket."""
    frames = await SocketFrames.over(socket.socket(fileno=descriptor))
    spec = json.loads(await frames.receive() or b"{}")
    try:
        engine = load_target(spec["target"], spec["settings"])
    except EngineError as err:
        await serve_stream(_refuses(err), frames)
        return
    await serve_stream(lambda model: engine, frames)
    try:
        async with asyncio.timeout(END_S - 1):
            await engine.close()
    except TimeoutError:
        return


def _refuses(err: EngineError) -> Callable[[str], TextEngine]:
    def engine_for(model: str) -> TextEngine:
        raise err

    return engine_for


def main() -> None:
    """Entry of the child process: `python -m engines.worker DESCRIPTOR`."""
    asyncio.run(serve_socket(int(sys.argv[1])))
    # Native threads that do not end must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
