"""A text engine in a child process of its own, so that a crash of native code is an error here and not our death.

Parent and child speak the handoff protocol over the socket pair of engines.child. The first frame, from the parent, is
JSON: {"target": "module:Class", "settings": {keyword arguments}}. With "serves": true the target is no text engine but
a Served, which has the socket to itself. A child that lets a request time out and then shows no sign of life is ended.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from engines.child import END_S, ChildProcess, SocketFrames
from engines.peer import PeerEngine
from engines.peer_host import serve_stream
from engines.port import Continuation, EngineLoad, TextEngine
from protocol.clock import Clock
from protocol.errors import EngineError, LinkTimeout
from protocol.text import TextCapabilities, TextRequest

ALIVE_S = 30.0
"""Longest wait for a sign of life, twice: this process may have been stopped meanwhile."""

T = TypeVar("T")


class WorkerEngine:
    """TextEngine that runs `target(**settings)` in a child process, started at first use and again after a crash.

    Args:
        target: "module:Class" of a TextEngine.
        settings: its keyword arguments, as JSON can carry them.
    """

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any],
        *,
        name: str = "worker",
        alive_s: float = ALIVE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._alive_s = alive_s
        self._looking: asyncio.Task[None] | None = None
        spec = json.dumps({"target": target, "settings": dict(settings)}).encode()
        self._child = ChildProcess(spec, name=name, clock=clock)
        self._peer = PeerEngine(
            self._child.open,
            name=name,
            resume_s=0.0,
            silence_s=300.0,
            lost=lambda err: self._child.crashed(),
            clock=clock,
        )

    @property
    def process_id(self) -> int | None:
        """The child's id while one was started and not yet waited for."""
        return self._child.process_id

    async def capabilities(self) -> TextCapabilities:
        return await self._watched(self._peer.capabilities())

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        return await self._watched(self._peer.prepare(request, deadline_s))

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._watched(self._peer.tokenize(data))

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return await self._watched(self._peer.embed(texts))

    def load(self) -> EngineLoad:
        return self._peer.load()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self._peer.close()
        await self._child.reap()

    async def _watched(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except LinkTimeout:
            if self._looking is None:
                self._looking = asyncio.create_task(self._end_when_dead(), name="worker-alive")
            raise

    async def _end_when_dead(self) -> None:
        suspect = self._child.process_id
        try:
            alive = await self._peer.answers(self._alive_s) or await self._peer.answers(self._alive_s)
        finally:
            self._looking = None
        if not alive and self._child.process_id == suspect:
            self._child.kill(f"it showed no sign of life for {2 * self._alive_s:.0f} s")


def load_target(target: str, settings: Mapping[str, Any]) -> Any:
    """What a spec names. Raises EngineError."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(**settings)
    except (ImportError, AttributeError, TypeError) as err:
        raise EngineError(f"{target} cannot be made: {err}") from err


class Served(Protocol):
    """What a child may run in place of a text engine."""

    async def serve(self, frames: SocketFrames) -> None:
        """Until the parent closes the socket."""
        ...

    async def close(self) -> None:
        """End what runs."""
        ...


async def serve_socket(descriptor: int) -> None:
    """The child: read the spec, serve what it names until the parent closes the socket."""
    frames = await SocketFrames.over(socket.socket(fileno=descriptor))
    spec = json.loads(await frames.receive() or b"{}")
    if spec.get("serves"):
        served: Served = load_target(spec["target"], spec["settings"])
        try:
            await served.serve(frames)
        finally:
            await _closed(served)
        return
    try:
        engine: TextEngine = load_target(spec["target"], spec["settings"])
    except EngineError as err:
        await serve_stream(_refuses(err), frames)
        return
    try:
        await serve_stream(lambda model: engine, frames)
    finally:
        await _closed(engine)


async def _closed(served: Served | TextEngine) -> None:
    try:
        async with asyncio.timeout(END_S - 1):
            await served.close()
    except TimeoutError:
        return


def _refuses(err: EngineError) -> Callable[[str], TextEngine]:
    def engine_for(model: str) -> TextEngine:
        raise err

    return engine_for


def main() -> None:
    """Entry of the child process: `python -m engines.worker DESCRIPTOR`."""
    code = 1
    try:
        asyncio.run(serve_socket(int(sys.argv[1])))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        # Native threads that do not end must not keep the process.
        os._exit(code)


if __name__ == "__main__":
    main()
