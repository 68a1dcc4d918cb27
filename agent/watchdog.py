"""Feeds the service manager's watchdog while this process gets on with its work, and for no other reason.

What counts is whether our own loop, the control channel and the engines' workers move, never whether a network, a
broker or a clock is there: a restart repairs a deadlock and no outage.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable

from agent.notify import Notifier
from protocol.clock import Clock
from protocol.pulse import Listening, Pulse

log = logging.getLogger("midstream.agent.service")

FEEDS_PER_PERIOD = 4


class Watchdog:
    """A thread that looks at pulses and feeds; it says which one is hung, with every thread's stack, before the end.

    Args:
        notifier: the manager.
        period_s: within which it wants to be fed; it is fed four times as often.
        pulses: called in the thread; must not block.
    """

    def __init__(
        self,
        notifier: Notifier,
        period_s: float,
        pulses: Callable[[], Iterable[Pulse]],
        clock: Clock = time.monotonic,
    ) -> None:
        self._notifier = notifier
        self._every_s = period_s / FEEDS_PER_PERIOD
        self._pulses = pulses
        self._clock = clock
        self._listening = Listening()
        self._hung: tuple[str, ...] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def hung(self) -> tuple[str, ...]:
        """What was found hung at the last look."""
        return self._hung

    def start(self) -> None:
        """Begin; the first feed is at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the manager then waits for the process to end."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._look()
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        try:
            hung = self._listening.hung(self._pulses(), self._clock())
        except Exception:
            log.exception("the pulses could not be read; the watchdog is not fed")
            return
        if not hung:
            if self._hung:
                log.warning("%s: moves again", ", ".join(self._hung))
            self._notifier.feed()
        elif hung != self._hung:
            self._tell(hung)
        self._hung = hung

    def _tell(self, hung: tuple[str, ...]) -> None:
        text = f"hung: {', '.join(hung)}; the service manager will restart this agent"
        log.error("%s", text)
        self._notifier.status(text)
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # a stderr without a file behind it
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
