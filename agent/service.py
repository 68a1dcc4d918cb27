"""The agent under a service manager: READY, STATUS, the watchdog, reload and stop; without a manager only reload.

READY means that the local API answers. Models load, coordinators are searched and devices measured after it, and STATUS
tells of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent.health import Health
from agent.notify import Notifier
from agent.reload import Changes
from agent.watchdog import FEEDS_PER_PERIOD, Watchdog
from protocol.errors import MidstreamError
from protocol.pulse import Pulse

log = logging.getLogger("midstream.agent.service")

STEP_S = 120.0
"""Longest single step of a start on a worn SD card; each step asks for so much time again."""
STATUS_EVERY_S = 5.0
MAX_NAMED = 4


class Loop:
    """The event loop's own pulse; `beat` is called on it."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._beats = 0

    def beat(self) -> None:
        """The loop has come round."""
        self._beats += 1

    def pulse(self) -> Pulse:
        """From any thread."""
        return Pulse("event loop", self._beats, True, self._patience_s)


class Service:
    """What the manager of this process is told. Use it on the event loop.

    Args:
        notifier: the manager; None when there is none.
        period_s: within which it wants to be fed; None when it does not watch.
    """

    def __init__(self, notifier: Notifier | None, period_s: float | None) -> None:
        self._notifier = notifier
        self._period_s = period_s
        self._watchdog: Watchdog | None = None
        self._tracks: tuple[asyncio.Task[None], ...] = ()
        # Not asyncio's own pool: what fills that must not hold up what is told.
        self._speaker = ThreadPoolExecutor(1, "service status")
        self._told = ""

    def step(self, text: str) -> None:
        """A step of the start or the end begins that may take its time."""
        if self._notifier is not None:
            self._notifier.extend(STEP_S)
            self._notifier.status(text)

    def begin(self, line: Callable[[], str], pulses: Callable[[], Iterable[Pulse]]) -> None:
        """The local API answers: READY, then STATUS whenever `line` changes, and the watchdog while `pulses` move."""
        if self._notifier is None:
            return
        self._told = line()
        self._notifier.ready(self._told)
        every_s = STATUS_EVERY_S
        loop = Loop(0.0 if self._period_s is None else self._period_s / 2)
        if self._period_s is not None:
            every_s = min(every_s, self._period_s / (2 * FEEDS_PER_PERIOD))
            self._watchdog = Watchdog(self._notifier, self._period_s, lambda: (loop.pulse(), *pulses()))
            self._watchdog.start()
        running = asyncio.get_running_loop()
        self._tracks = (
            running.create_task(_beat(loop, every_s), name="midstream-beat"),
            running.create_task(self._tell(line, every_s), name="midstream-service"),
        )

    def end(self) -> None:
        """The way to the end has begun; the watchdog is fed on."""
        if self._notifier is not None:
            self._notifier.stopping("answers that run may end; then this agent stops")
            self._notifier.extend(STEP_S)

    async def close(self) -> None:
        """Nothing is left to be told of. Idempotent."""
        for track in self._tracks:
            track.cancel()
        await asyncio.gather(*self._tracks, return_exceptions=True)
        self._speaker.shutdown(cancel_futures=True)  # what is being sent has a bound of its own
        if self._watchdog is not None:
            self._watchdog.stop()

    def reload(self, read: Callable[[], Changes], health: Health) -> None:
        """Read the configuration anew; one that cannot be used changes nothing and is a warning."""
        if self._notifier is not None:
            self._notifier.reloading()
        try:
            changes = read()
        except MidstreamError as err:
            health.warn("config", f"the configuration was not taken: {err.message}", err.next_step)
            text = f"the old configuration stays: {err.message}"
        else:
            health.clear("config")
            text = f"configuration read: {changes.text}"
            log.info("%s", text)
            if changes.next_start:
                step = "restart the agent (systemctl restart midstream)"
                health.warn("restart", f"settings wait for the next start: {', '.join(changes.next_start)}", step)
            else:
                health.clear("restart")
        if self._notifier is not None:
            self._told = text
            self._notifier.ready(text)

    async def _tell(self, line: Callable[[], str], every_s: float) -> None:
        assert self._notifier is not None
        before = self._told
        while True:
            try:
                text = line()
            except Exception:
                log.exception("the status could not be read; the service manager is told the one before")
                text = before
            if text != before:
                before = text
                await asyncio.get_running_loop().run_in_executor(self._speaker, self._notifier.status, text)
            await asyncio.sleep(every_s)


async def _beat(loop: Loop, every_s: float) -> None:
    """A task of its own: what is told, and how long that takes, says nothing of the loop."""
    while True:
        loop.beat()
        await asyncio.sleep(every_s)


def status_line(found: Mapping[str, Any], loading: Iterable[str] = ()) -> str:
    """The status document in one line, for `systemctl status`."""
    parts = [f"{found['life']['serving']} at {found['url']}"]
    names = [*found["tensor_models"], *([found["text_model"]] if found["text_model"] else [])]
    parts.append(f"models: {_listed(names)}")
    waiting = sorted(loading)
    if waiting:
        parts.append(f"loading {_listed(waiting)}")
    where = found["coordinator"]
    parts.append(f"coordinator: {found['life']['connected']}" + (f" {where}" if where else ""))
    count = len(found["warnings"])
    if count:
        latest = found["warnings"][-1]["text"]
        parts.append(f"{count} warnings, the latest: {latest}" if count > 1 else f"warning: {latest}")
    return "; ".join(parts)


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
