"""One line of the log per text request: route, target, tokens, time, fallback; never a word of it.

Requests only leave their record in a bounded queue; a thread makes lines of them, so that a log that is slow to take
lines holds nobody up.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from protocol.events import Event, TextDone

log = logging.getLogger("midstream.requests")

MAX_WAITING = 10_000
"""Records that wait for the log; further ones are counted only."""
PAUSE_S = 0.2
"""Lines are written this often at the most, so that a busy house wakes the thread seldom."""


class RequestLog:
    """An Emit: one line per TextDone at level info. A thread lives while there is something to write.

    `close` ends it once what waits is written; records that come later are not taken.
    """

    def __init__(self) -> None:
        self._waiting: deque[TextDone] = deque()
        self._dropped = 0
        self._ending = threading.Event()
        self._lock = threading.Lock()  # held while the thread decides that nothing waits, and while one is started
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if not isinstance(event, TextDone) or not log.isEnabledFor(logging.INFO):
            return
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        with self._lock:
            if self._ending.is_set():
                return
            self._waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="midstream-requests", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """For threads; idempotent."""
        with self._lock:
            self._ending.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            self._ending.wait(PAUSE_S)
            self._write()
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return

    def _write(self) -> None:
        while self._waiting:
            log.info("%s", request_line(self._waiting.popleft()))
        dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("%d requests are not in the log: it takes lines too slowly", dropped)


def request_line(done: TextDone) -> str:
    """What is told of a request that ended; one line, whatever its model is called."""
    sides = " ".join(f"{name}:{tokens}" for name, tokens in done.sides) or "nobody"
    ttft = "-" if done.ttft_s is None else f"{done.ttft_s:.3f}"
    words = [
        f"{done.request_id} {done.status} model={done.model} level={done.level or '-'} targets={sides}",
        f"in={done.prompt_tokens} out={done.completion_tokens} ttft_s={ttft} total_s={done.total_s:.3f}",
        f"usd={done.usd:.6f} cached={str(done.cached).lower()} fallback={str(done.moved).lower()}",
    ]
    if done.trace is not None:
        words.append(f"trace={done.trace.trace_id}")
    return (" ".join(words) + f" reason={done.reason}").translate(_ONE_LINE)


_ONE_LINE = dict.fromkeys((*range(32), 127, 133, 8232, 8233), " ")
"""A model's name comes from the client: it must not begin a line of its own."""
