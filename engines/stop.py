"""Asks a run under way to end early, from any thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from protocol.errors import EngineError


class Stopped(EngineError):
    """The run was ended early: nobody waits for its answer."""


class Stop:
    """Of one run. A model that can be stopped says how by `during`; one that cannot runs to its end."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._lock = threading.Lock()
        self._act: Callable[[], None] | None = None

    @property
    def asked(self) -> bool:
        """Whether the run should end."""
        return self._asked.is_set()

    def ask(self) -> None:
        """End the run, now or when it begins; again is fine."""
        with self._lock:
            self._asked.set()
            if self._act is not None:
                self._act()

    @contextlib.contextmanager
    def during(self, act: Callable[[], None]) -> Iterator[None]:
        """Call `act`, which must be quick, once the end is asked for while the body runs. Raises Stopped before it."""
        with self._lock:
            self.check()
            self._act = act
        try:
            yield
        finally:
            with self._lock:
                self._act = None

    def check(self) -> None:
        """Raise Stopped when the end was asked for."""
        if self.asked:
            raise Stopped("the run was stopped", next_step="ask again: its caller had left")

    def wait(self, seconds: float) -> None:
        """Wait so long. Raises Stopped when the end is asked for before or meanwhile."""
        self._asked.wait(max(0.0, seconds))
        self.check()
