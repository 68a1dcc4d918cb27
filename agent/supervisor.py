"""Runs the three tracks of one agent: serving first and by itself, then connecting and measuring beside it.

Start and stop are symmetric. Only serving can fail the start (a port in use); the other tracks try again for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from attrs import frozen

from agent.health import Health
from agent.lifecycle import Life, Track, advance
from links.http_server import RunningServer
from links.port import Mount
from protocol.errors import MidstreamError

log = logging.getLogger("midstream.agent")

WAY_STOP_S = 10.0


class LifeKeeper:
    """The current Life, and who is told when a track moves."""

    def __init__(self) -> None:
        self.life = Life()
        self._listeners: list[Callable[[Track, str], None]] = []

    def listen(self, listener: Callable[[Track, str], None]) -> None:
        self._listeners.append(listener)

    def step(self, track: Track, event: str) -> None:
        """Move one track; listeners hear (track, new state) when it really moved."""
        before = getattr(self.life, track)
        self.life = advance(self.life, track, event)
        after = getattr(self.life, track)
        if after != before:
            log.debug("%s: %s -> %s", track, before, after)
            for listener in self._listeners:
                listener(track, after)


@frozen(kw_only=True)
class Parts:
    """What the supervisor runs.

    open_server: listens; raises ConfigError. ways: started after the server listens, for models load after READY.
    tracks: coroutines that run until they are cancelled (connecting, measuring, telemetry). drain: says goodbye to
    the fleet before the ways stop. close: frees what the composition made. lasting: tracks that a pause does not end.
    """

    life: LifeKeeper
    health: Health
    open_server: Callable[[], Awaitable[RunningServer]]
    ways: Sequence[Mount]
    tracks: Sequence[Callable[[], Coroutine[Any, Any, None]]]
    drain: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    lasting: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()


class Supervisor:
    """One agent's life, from `start` to `stop`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._server: RunningServer | None = None
        self._started: list[Mount] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lasting: list[asyncio.Task[None]] = []
        self._paused = False

    @property
    def port(self) -> int:
        """The port the local API listens on; 0 before start."""
        return self._server.port if self._server else 0

    async def start(self) -> None:
        """Listen; everything else begins in the background. Raises ConfigError when the address cannot be used."""
        life = self._parts.life
        life.step("serving", "start")
        try:
            self._server = await self._parts.open_server()
        except MidstreamError:
            life.step("serving", "failed")
            await self._parts.close()
            raise
        life.step("serving", "listening")
        self._lasting = [self._spawn(self._start_ways(), "ways")]
        self._lasting += [self._spawn(work(), "host") for work in self._parts.lasting]
        self._begin_tracks()

    async def pause(self) -> None:
        """End the tracks and keep the server and the models; `resume` begins the tracks anew. Idempotent."""
        self._paused = True
        await self._end_tracks()
        self._parts.life.step("connected", "stop")

    async def resume(self) -> None:
        """Begin the tracks anew after a pause; nothing happens without one, nor once `stop` has begun."""
        if self._paused and self._parts.life.life.serving in ("ready", "paused"):
            self._paused = False
            self._begin_tracks()

    async def stop(self) -> None:
        """Drain: refuse newcomers, let work end, say goodbye, free everything. Safe after a failed start."""
        life = self._parts.life
        life.step("serving", "drain")
        await self._guarded(self._parts.drain(), "drain")
        await self._end_tracks()
        for task in self._lasting:
            task.cancel()
        await asyncio.gather(*self._lasting, return_exceptions=True)
        for way in reversed(self._started):
            await self._guarded(self._stop_way(way), "stop")
        if self._server is not None:
            await self._server.close()
            self._server = None
        await self._guarded(self._parts.close(), "close")
        life.step("serving", "drained")

    def _begin_tracks(self) -> None:
        for track in self._parts.tracks:
            self._tasks.append(self._spawn(track(), getattr(track, "__name__", "track")))

    async def _end_tracks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_ways(self) -> None:
        for way in self._parts.ways:
            self._started.append(way)
            try:
                await way.start()
            except MidstreamError as err:
                self._parts.health.warn("models", err.message, err.next_step)

    async def _stop_way(self, way: Mount) -> None:
        async with asyncio.timeout(WAY_STOP_S):
            await way.stop()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"midstream-{name}")
        task.add_done_callback(self._report_death)
        return task

    def _report_death(self, task: asyncio.Task[None]) -> None:
        """What an operator can repair is a warning with its next step; what is our bug goes to the log as a whole."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MidstreamError):
            self._parts.health.warn(task.get_name(), error.message, error.next_step)
        elif error is not None:
            log.error("%s ended with an error; the agent goes on without it", task.get_name(), exc_info=error)

    async def _guarded(self, work: Awaitable[None], what: str) -> None:
        """Stopping goes on whatever one part does."""
        try:
            await work
        except (MidstreamError, TimeoutError) as err:
            log.warning("%s: %s", what, err)
