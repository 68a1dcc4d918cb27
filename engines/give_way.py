"""Long work in Python stands back while a user's piece of work waits for the interpreter.

Threads of one interpreter share it whatever their priority: each step of a user's work would wait for a step of the
work on many answers. So the latter asks now and then, by `give_way`, and waits while there is any of the former.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

GIVE_WAY_S = 0.05
"""Of one run, in all: whoever stands behind never stands still."""


class First(Protocol):
    """Whose work comes first; engines.executor.BoundedExecutor is one."""

    @property
    def busy(self) -> bool: ...

    def wait_until_idle(self, seconds: float) -> None: ...


class _Here(threading.local):
    first: First | None = None
    left_s: float = 0.0


_here = _Here()


@contextmanager
def behind(first: First | None) -> Iterator[None]:
    """What runs in this thread gives way to `first`; it does so at once, too."""
    if first is None:
        yield
        return
    _here.first, _here.left_s = first, GIVE_WAY_S
    try:
        give_way()
        yield
    finally:
        _here.first = None


def given_way_s() -> float:
    """Seconds that the run in this thread has stood back."""
    return GIVE_WAY_S - _here.left_s if _here.first is not None else 0.0


def give_way() -> None:
    """Return when nobody comes first, or when this run has stood back for long enough. Costs nothing elsewhere."""
    first = _here.first
    if first is None or not first.busy or _here.left_s <= 0:
        return
    began_s = time.monotonic()
    first.wait_until_idle(_here.left_s)
    _here.left_s -= time.monotonic() - began_s
