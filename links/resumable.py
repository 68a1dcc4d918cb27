"""Work that may be waited for a while, left where it stands, and waited for again: a task in the turns of who waits.

A task of the loop would begin it a turn later and tell its end a turn after that. With many requests at once each turn
holds some work of the others, so for the first word of a stream that is most of the wait.
"""

from __future__ import annotations

import asyncio
import types
from asyncio.tasks import _enter_task, _leave_task  # of asyncio's documented way to make tasks of another kind
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Resumable(Generic[T]):
    """Call `within` until it gives True, then read `result`; or `drop` it. One waiter at a time.

    The work runs in the turns of whoever waits, and stands still while nobody does. To the work it is a task: a limit
    in it (`asyncio.timeout`, Patience) cancels the work and never the one who waits, who may be at something else when
    its time comes. The work hears of it when it is waited for again.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._on: Any = None
        """The future that it waits for."""
        self._cancels = 0
        self._must_cancel = False
        """It is cancelled with its next step, for there was no future that could be."""
        self._leaving = False
        """Who waits was cancelled, and waits no longer than until it has tidied up."""
        self._over = False
        self._error: BaseException | None = None
        self._result: T | None = None

    @property
    def result(self) -> T:
        """What the work gave; only after `within` was True."""
        assert self._over, "it has not ended"
        return self._result  # type: ignore[return-value]

    async def within(self, seconds: float) -> bool:
        """Go on with the work for so long; whether it has ended. Raises what the work raised, each time."""
        if not self._over:
            await self._go(seconds)
        if self._error is not None:
            raise self._error
        return self._over

    async def drop(self) -> None:
        """Cancel it where it stands and let it tidy up; what it made or raised is nobody's any more."""
        if self._over:
            return
        waiter = asyncio.current_task()
        cancels = waiter.cancelling() if waiter is not None else 0
        self.cancel()
        await self._go(float("inf"))
        if waiter is not None and waiter.cancelling() > cancels:
            raise asyncio.CancelledError  # who drops it was cancelled meanwhile

    # What a task is to its work.

    def cancel(self, msg: Any = None) -> bool:
        """As a task's: CancelledError is raised in the work where it waits. False when it is over."""
        if self._over:
            return False
        self._cancels += 1
        if self._on is None or not self._on.cancel(msg):
            self._must_cancel = True
        return True

    def cancelling(self) -> int:
        """Cancels that nobody took back."""
        return self._cancels

    def uncancel(self) -> int:
        """Take a cancel back; returns how many are left."""
        self._cancels = max(0, self._cancels - 1)
        if not self._cancels:
            self._must_cancel = False
        return self._cancels

    def leave(self, msg: Any = None) -> bool:
        """Who waits is cancelled: the work is, and their wait ends with it."""
        self._leaving = True
        return self.cancel(msg)

    @types.coroutine
    def _go(self, seconds: float) -> Generator[Any, Any, None]:
        """As `yield from` the work, which ends early when the time is over."""
        loop = asyncio.get_running_loop()
        until_s, self._leaving = loop.time() + seconds, False
        while True:
            if self._on is None or self._on.done():
                self._step(loop)
            if self._leaving:
                until_s = float("inf")
            if self._over or loop.time() >= until_s:
                return
            try:
                yield from self._turn(loop, until_s)
            except (asyncio.CancelledError, Exception):  # noqa: BLE001 - what the work waits for failed: its own matter
                if self._on is None or not self._on.done():
                    self.leave()  # no, who waits was cancelled

    def _turn(self, loop: asyncio.AbstractEventLoop, until_s: float) -> Generator[Any, Any, None]:
        """Until the work can go on, or the time is over."""
        if self._on is None:
            yield
            return
        either = _Either(self, self._on)
        timer = loop.call_at(until_s, either.end, loop) if until_s < float("inf") else None
        try:
            yield either
        finally:
            if timer is not None:
                timer.cancel()

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until the work waits for something, or ends. Meanwhile it has a task of its own in `current_task`."""
        cancelled, self._must_cancel, self._on = self._must_cancel, False, None
        waiter: Any = asyncio.current_task(loop)
        me: Any = self
        if waiter is not None:
            _leave_task(loop, waiter)
        _enter_task(loop, me)
        try:
            self._on = self._work.throw(asyncio.CancelledError()) if cancelled else self._work.send(None)
        except StopIteration as end:
            self._over, self._result = True, end.value
        except BaseException as err:  # noqa: BLE001 - `within` raises it
            self._over, self._error = True, err
        finally:
            _leave_task(loop, me)
            if waiter is not None:
                _enter_task(loop, waiter)
        if self._on is not None:
            self._on._asyncio_future_blocking = False  # as a task says of what it will wait for
            if self._must_cancel and self._on.cancel():
                self._must_cancel = False


class _Either:
    """What a task waits for instead of a future: that future, or `end`. It is asyncio's own protocol of a future."""

    _asyncio_future_blocking = True

    def __init__(self, work: Resumable[Any], future: asyncio.Future[Any]) -> None:
        self._work = work
        self._future = future
        self._wake: Callable[[Any], object] | None = None
        self._context: Context | None = None

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(self, wake: Callable[[Any], object], *, context: Context | None = None) -> None:
        self._wake, self._context = wake, context
        self._future.add_done_callback(wake, context=context)

    def cancel(self, msg: Any = None) -> bool:
        return self._work.leave(msg)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the task, and leave the future as it is."""
        wake, self._wake = self._wake, None
        if wake is not None and self._future.remove_done_callback(wake):
            loop.call_soon(wake, self, context=self._context)

    def result(self) -> None:
        """Of an end there is none."""
