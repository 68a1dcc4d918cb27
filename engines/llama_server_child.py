"""llama-server in a child process, which this process asks directly: the child starts it and lives as long as we do.

A token then crosses one process border, and the child has nothing to do for it but to make it. A child that shows no
sign of life while a request waits for it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from engines.child import DYING_S, ChildProcess, SocketFrames
from engines.llama_server import Embedded, ServerEngine, default_threads
from engines.llama_server_local import LocalServer
from engines.llama_server_stream import NativeServer
from engines.port import Continuation
from engines.text_admission import PREFILL_BATCH_TOKENS
from engines.unix_http import LocalReply
from engines.vocabulary import read_vocabulary
from protocol.clock import Clock
from protocol.errors import EngineError, LinkClosed, LinkTimeout, MidstreamError
from protocol.text import TextRequest

START_S = 30.0
"""Longest wait of one request for a server that loads its model; it goes on loading for the next."""

LOAD_S = 600.0
"""Longest time that a child may take to load its model."""

LOOK_S = 15.0
"""A request that takes so long is a reason to ask whether the server is alive, and again after as long."""

ALIVE_S = 15.0
"""Longest wait for that answer, twice: this process may have been stopped meanwhile."""


class ServedLlamaServer:
    """The child's side (engines.worker.Served): tells where the server listens, or why there is none, then waits."""

    def __init__(
        self,
        model_path: str,
        context_tokens: int,
        threads: int,
        slots: int,
        chat_template: str | None,
        embeds: bool,
        batch_tokens: int,
    ) -> None:
        self._settings = (Path(model_path), context_tokens, threads, slots, chat_template, embeds, batch_tokens, None)
        self._server: Embedded | None = None

    async def serve(self, frames: SocketFrames) -> None:
        """Load, tell, and return when the parent is gone."""
        try:
            self._server = await asyncio.to_thread(Embedded, *self._settings)
            await self._server.begun()
            told = {"address": self._server.address, "key": self._server.key}
        except MidstreamError as err:
            told = {"problem": err.message, "next_step": err.next_step or ""}
        with contextlib.suppress(LinkClosed):  # a parent that died has no use for it
            await frames.send(json.dumps(told).encode())
            while await frames.receive() is not None:
                pass

    async def close(self) -> None:
        """Stop the server."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)


class ChildLlamaServer(ServerEngine):
    """The parent's side: a TextEngine whose server is started at first use and again after a crash.

    Args as LlamaServerEngine, and the seconds after which a child is looked at and given up.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        context_tokens: int = 2048,
        threads: int = 0,
        slots: int = 2,
        chat_template: str | None = None,
        embeds: bool = False,
        batch_tokens: int = PREFILL_BATCH_TOKENS,
        name: str = "",
        look_s: float = LOOK_S,
        alive_s: float = ALIVE_S,
        load_s: float = LOAD_S,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(slots=slots, clock=clock)
        self._look_s, self._alive_s, self._load_s = look_s, alive_s, load_s
        self._path = Path(model_path)
        self._name = name or self._path.stem
        self._context_limit = context_tokens
        self._embed_tokens = batch_tokens
        settings: dict[str, Any] = {
            "model_path": str(model_path),
            "context_tokens": context_tokens,
            "threads": threads or default_threads(),
            "slots": slots,
            "chat_template": chat_template,
            "embeds": embeds,
            "batch_tokens": batch_tokens,
        }
        target = f"{ServedLlamaServer.__module__}:{ServedLlamaServer.__qualname__}"
        spec = json.dumps({"target": target, "settings": settings, "serves": True}).encode()
        self._child = ChildProcess(spec, name=self._name, clock=clock)
        self._frames: SocketFrames | None = None
        self._server: LocalServer | None = None
        self._starting: asyncio.Task[LocalServer] | None = None
        self._stopped = False

    @property
    def process_id(self) -> int | None:
        """The child's id while one was started and not yet waited for."""
        return self._child.process_id

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        try:
            async with asyncio.timeout(deadline_s):
                return await super().prepare(request, deadline_s)
        except TimeoutError as err:
            raise LinkTimeout(f"{self._name} was not ready within {deadline_s:.1f} s") from err

    async def close(self) -> None:
        self._stopped = True
        await super().close()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        self._server = None
        await self._part()
        await self._child.reap()

    async def _native(self) -> NativeServer:
        if self._stopped:
            raise EngineError(f"the engine of {self._name} was closed")
        if self._server is not None and self._child.alive:
            return self._server
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="llama-server-start")
            self._starting.add_done_callback(self._started)
        try:
            # Whoever gives up does not end it for the others.
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._starting)
        except TimeoutError as err:
            raise LinkTimeout(f"{self._name} still loads after {START_S:.0f} s", next_step="ask again") from err

    def _started(self, starting: asyncio.Task[LocalServer]) -> None:
        self._starting = None
        if not starting.cancelled():
            starting.exception()  # whoever waits for it raises it

    async def _start(self) -> LocalServer:
        self._server = None  # nobody asks the old one while the next loads
        await self._part()
        if self._vocabulary is None:
            # The server starts even from a broken file with a bare message, so the file is read here first.
            self._vocabulary = await asyncio.to_thread(read_vocabulary, self._path)
        self._frames = await self._child.open()
        try:
            async with asyncio.timeout(self._load_s):
                answer = await self._frames.receive()
        except TimeoutError:
            self._child.kill(f"it did not load its model within {self._load_s:.0f} s")
            answer = None
        except LinkClosed:
            answer = None
        if answer is None:
            await self._child.ended(DYING_S)
            raise self._child.crashed()
        told = json.loads(answer)
        if "problem" in told:
            await self._part()
            raise EngineError(told["problem"], next_step=told["next_step"])
        self._server = _Watched(told["address"], told["key"], self._child, self._look_s, self._alive_s)
        return self._server

    async def _part(self) -> None:
        """Close the socket, which is what ends the child."""
        frames, self._frames = self._frames, None
        if frames is not None:
            await frames.close()


class _Watched(LocalServer):
    """Tells a server that hung up from a process that died, and ends one that does nothing any more."""

    def __init__(self, address: str, key: str, child: ChildProcess, look_s: float, alive_s: float) -> None:
        super().__init__(address, key)
        self._child = child
        self._process_id = child.process_id
        self._look_s = look_s
        self._alive_s = alive_s
        self._running = 0
        self._look_timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def asked(self, path: str, data: bytes | None) -> AsyncGenerator[LocalReply, None]:
        self._running += 1
        self._look_later()
        try:
            async with super().asked(path, data) as reply:
                yield reply
        finally:
            self._running -= 1
            if not self._running and self._look_timer is not None:
                self._look_timer.cancel()
                self._look_timer = None

    def _look_later(self) -> None:
        if self._look_timer is None and self._looking is None:
            self._look_timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        self._look_timer = None
        self._looking = asyncio.create_task(self._end_when_dead(), name="llama-server-alive")

    async def _end_when_dead(self) -> None:
        try:
            alive = await self._alive() or await self._alive()
        finally:
            self._looking = None
        if not alive and self._child.process_id == self._process_id:
            self._child.kill(f"it showed no sign of life for {2 * self._alive_s:.0f} s")
        elif alive and self._running:
            self._look_later()

    async def _alive(self) -> bool:
        """Whether the server answers at all; one that hung up tells the requests under way itself."""
        try:
            async with asyncio.timeout(self._alive_s), super().asked("/health", None) as reply:
                await reply.body()
        except TimeoutError:
            return False
        except MidstreamError:
            return True
        return True

    async def gone(self, err: LinkClosed) -> MidstreamError:
        replaced = self._child.process_id != self._process_id
        return self._child.crashed() if replaced or await self._child.ended(DYING_S) else err
