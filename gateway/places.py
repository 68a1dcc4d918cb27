"""Places for what is under way: so many at once, none once the process stops, and a bounded end for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from protocol.clock import Clock
from protocol.errors import Full

ABORT_S = 1.0
"""Answers that were cut get this long to tell their clients."""

LOOK_S = 0.02
"""While the last answers end, the places are counted this often."""


class Running(Protocol):
    """Something under way that holds a place."""

    async def abort(self, reason: str) -> None:
        """End it from outside with an error that names `reason`."""
        ...


class Places:
    """At most `limit` at once; len() tells how many are taken."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._running: dict[int, Running] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def hold(self, running: Running) -> Callable[[], None]:
        """Take a place; returns the way to give it back, once or more often. Raises Full."""
        if self._closed:
            raise Full("this process is stopping", retry_after_s=5.0)
        if len(self._running) >= self._limit:
            raise Full(f"{len(self._running)} requests are under way already", retry_after_s=1.0)
        key = id(running)
        self._running[key] = running
        return lambda: self._release(key)

    def _release(self, key: int) -> None:
        self._running.pop(key, None)

    def close(self) -> None:
        """Nothing new takes a place from now on."""
        self._closed = True

    async def emptied(self, drain_s: float) -> None:
        """Let what runs end for `drain_s`, then cut the rest with an error that says so."""
        await self._ended(drain_s)
        for running in tuple(self._running.values()):
            await running.abort("this process is stopping")
        await self._ended(ABORT_S)

    async def _ended(self, seconds: float) -> None:
        end_s = self._clock() + seconds
        while self._running and self._clock() < end_s:
            await asyncio.sleep(LOOK_S)
