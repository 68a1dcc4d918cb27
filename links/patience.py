"""Time limits for many waits one after the other, with one timer for all of them.

`asyncio.timeout` makes and cancels a timer per wait, which for the chunks of a stream costs more than reading them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from math import inf, isfinite
from typing import Any, TypeVar

T = TypeVar("T")


class Patience:
    """`wait` for one thing at a time, from whichever task; `close` when nothing is waited for any more."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._until_s = inf
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, coming: Awaitable[T], seconds: float = inf) -> T:
        """What comes. Raises TimeoutError after `seconds`, or when `end` was called meanwhile."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        cancelling = task.cancelling()
        self._task, self._over = task, False
        if isfinite(seconds):
            self._watch(loop, loop.time() + seconds)
        else:
            self._until_s = inf
        try:
            found = await coming
        except BaseException as err:
            ours = self._over and task.uncancel() <= cancelling
            if ours and isinstance(err, asyncio.CancelledError):
                raise TimeoutError from err
            raise
        else:
            if self._over:
                task.uncancel()  # it came in the turn in which patience ended
            return found
        finally:
            self._task = None

    def end(self) -> None:
        """No more patience: a wait that is under way ends with TimeoutError."""
        if self._task is not None and not self._over:
            self._over = True
            self._task.cancel()

    def close(self) -> None:
        """Let the timer go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self, loop: asyncio.AbstractEventLoop, until_s: float) -> None:
        """A timer that is due before the limit is kept: it looks again when its time has come."""
        self._until_s = until_s
        if self._timer is not None and self._timer.when() > until_s:
            self.close()
        if self._timer is None:
            self._timer = loop.call_at(until_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None or not isfinite(self._until_s):
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until_s:
            self.end()
        else:
            self._timer = loop.call_at(self._until_s, self._look)
