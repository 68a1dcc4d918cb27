"""Work that is begun in one's own turn of the loop and, where it has to wait for something, belongs to another task.

Work that does not wait costs no turn then, and who began it may be cancelled without harm to the work. (An eager task
of Python 3.12 is like it, but is always a task of its own.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from typing import Any


class Begun:
    """Takes the first step of `work` at once. Unless it is `done` then, one task awaits the rest of it.

    What the work raises, `await` raises, were it in the first step: who makes this hears nothing of it. The first step
    runs in the maker's task, so `work` may not begin with what holds on to its task, as asyncio.timeout does.
    """

    def __init__(self, work: Coroutine[Any, Any, object]) -> None:
        self._work = work
        self._on: Any = None
        self._over = False
        self._error: BaseException | None = None
        try:
            self._step(None)
        except (asyncio.CancelledError, Exception) as err:  # noqa: BLE001 - not its maker's to hear
            self._error = err

    @property
    def done(self) -> bool:
        """Whether nothing is left of it: neither work nor an error to be raised."""
        return self._over and self._error is None

    def __await__(self) -> Generator[Any, None, None]:
        if self._error is not None:
            raise self._error
        while not self._over:
            error: BaseException | None = None
            try:
                if self._on is None:
                    yield
                elif not self._on.done():
                    self._on._asyncio_future_blocking = True  # as `await` of a future says to its task
                    yield self._on
            except BaseException as err:  # noqa: BLE001 - a cancelled task, or what failed: the work's matter
                error = err
            self._step(error)

    def drop(self) -> None:
        """Cancel what is left, where it stands: it lets go within this call, and what it raises is nobody's."""
        if not self._over:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self._step(asyncio.CancelledError())
            with contextlib.suppress(Exception):  # it would go on waiting
                self._work.close()
            self._over = True

    def _step(self, error: BaseException | None) -> None:
        """Until it waits for something, or ends."""
        self._over = True
        try:
            self._on = self._work.send(None) if error is None else self._work.throw(error)
        except StopIteration:
            return
        self._over = False
        if self._on is not None:
            self._on._asyncio_future_blocking = False  # as a task says of what it will wait for
