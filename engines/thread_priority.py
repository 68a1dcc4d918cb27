"""Which of this process's threads go first: for a core, by the system's priority, and for the interpreter."""

from __future__ import annotations

import logging
import os
import sys
import threading

_log = logging.getLogger("midstream.engines.thread_priority")

SWITCH_S = 0.001
"""A thread that runs Python hands over after this long, where others want to (CPython's own value is 5 ms). A user's
request changes threads a dozen times, and each time it waits behind answers of others that are worked on just then."""


def hand_over_soon() -> None:
    """Once, in a process of our own: a host that we are a guest of keeps its setting. Costs crowded work about 3 %."""
    sys.setswitchinterval(SWITCH_S)


LAST_NICENESS = 19


def stand_back(niceness: int) -> None:
    """Let the process's other threads have the cores first, from the calling thread on: so far behind what the process
    itself was started with. Linux alone has that per thread."""
    if niceness > 0 and sys.platform == "linux":
        try:
            behind_all = min(LAST_NICENESS, os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), behind_all)
        except OSError as err:
            _log.debug("a thread keeps its priority: %s", err)
