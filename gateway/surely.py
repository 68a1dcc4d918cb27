"""Endings that must happen: a client that leaves may cancel its handler more than once, also while it tidies up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_running: set[asyncio.Task[None]] = set()


async def dropped(task: asyncio.Task[Any] | None) -> None:
    """Cancel it and wait until it is gone; what it made or raised is nobody's any more."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


class Once:
    """One ending, run to its end in a task of its own by whoever asks first; everybody who asks waits for it.

    Who is cancelled while they wait goes; the ending goes on. What a request holds (a place, a reservation) is given
    back there and nowhere else.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def run(self, make: Coroutine[Any, Any, None]) -> None:
        """`make` is closed unused when the ending has begun already."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(make)
            _running.add(self._task)
            self._task.add_done_callback(_running.discard)
        else:
            make.close()
        await asyncio.shield(self._task)
