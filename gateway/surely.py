"""Endings that must happen: a client that leaves may cancel its handler more than once, also while it tidies up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from math import inf
from typing import Any

from links.resumable import Resumable

_running: set[asyncio.Task[bool]] = set()


async def dropped(task: asyncio.Task[Any] | None) -> None:
    """Cancel it and wait until it is gone; what it made or raised is nobody's any more."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


class Once:
    """One ending, begun at once by whoever asks first; everybody who asks waits for it.

    What does not end in that turn goes on in a task of its own: who is cancelled while they wait goes, the ending goes
    on. What a request holds (a place, a reservation) is given back there and nowhere else.
    """

    def __init__(self) -> None:
        self._ending: Resumable[None] | None = None
        self._rest: asyncio.Task[bool] | None = None

    async def run(self, make: Coroutine[Any, Any, None]) -> None:
        """`make` is closed unused when the ending has begun already."""
        if self._ending is not None:
            make.close()
        else:
            self._ending = Resumable(make)
            if not await self._ending.within(0.0):
                self._rest = asyncio.get_running_loop().create_task(self._ending.within(inf))
                _running.add(self._rest)
                self._rest.add_done_callback(_running.discard)
        if self._rest is not None:
            await asyncio.shield(self._rest)
        else:
            await self._ending.within(0.0)  # it is over: what it raised, everybody is told
