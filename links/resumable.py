"""Work that may be waited for a while, left where it stands, and waited for again: without a task of its own.

A task would begin it a turn of the loop later and tell its end a turn after that. With many requests at once each turn
holds some work of the others, so for the first word of a stream that is most of the wait.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Resumable(Generic[T]):
    """Call `within` until it gives True, then read `result`; or `drop` it. One waiter at a time.

    The work runs in the task of whoever waits, and stands still while nobody does. What it raises, `within` raises.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._on: Any = None
        self._over = False
        self._result: T | None = None

    @property
    def result(self) -> T:
        """What the work gave; only after `within` was True."""
        assert self._over, "it has not ended"
        return self._result  # type: ignore[return-value]

    async def within(self, seconds: float) -> bool:
        """Go on with the work for so long; whether it has ended."""
        return self._over or await self._go(seconds, None)

    async def drop(self) -> None:
        """Cancel it where it stands and let it tidy up; what it made or raised is nobody's any more."""
        if not self._over:
            try:
                await self._go(float("inf"), asyncio.CancelledError())
            except (asyncio.CancelledError, Exception):
                if not self._over:
                    raise  # the cancelled one is who drops it

    @types.coroutine
    def _go(self, seconds: float, error: BaseException | None) -> Generator[Any, Any, bool]:
        """As `yield from` the work, which ends early when the time is over."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while True:
            if self._on is None or error is not None or self._on.done():
                error, thrown = None, error
                if self._step(thrown):
                    return True
            elif loop.time() >= until_s:
                return False
            try:
                if self._on is None:
                    yield
                    continue
                either = _Either(self._on)
                timer = loop.call_at(until_s, either.end, loop) if seconds < float("inf") else None
                try:
                    yield either
                finally:
                    if timer is not None:
                        timer.cancel()
            except BaseException as err:  # noqa: BLE001 - a cancelled waiter or a failed future: the work's matter first
                error = err  # the waiter is cancelled, or what the work waits for failed: the work's matter first

    def _step(self, error: BaseException | None) -> bool:
        """Until it waits for something; whether it has ended."""
        self._over = True
        try:
            self._on = self._work.send(None) if error is None else self._work.throw(error)
        except StopIteration as end:
            self._result = end.value
            return True
        self._over = False
        if self._on is not None:
            self._on._asyncio_future_blocking = False  # as a task says of what it will wait for
        return False


class _Either:
    """What a task waits for instead of a future: that future, or `end`. It is asyncio's own protocol of a future."""

    _asyncio_future_blocking = True

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self._wake: Callable[[Any], object] | None = None
        self._context: Context | None = None

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(self, wake: Callable[[Any], object], *, context: Context | None = None) -> None:
        self._wake, self._context = wake, context
        self._future.add_done_callback(wake, context=context)

    def cancel(self, msg: Any = None) -> bool:
        return self._wake is not None and self._future.cancel(msg)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the task, and leave the future as it is."""
        wake, self._wake = self._wake, None
        if wake is not None and self._future.remove_done_callback(wake):
            loop.call_soon(wake, self, context=self._context)

    def result(self) -> None:
        """Of an end there is none."""
