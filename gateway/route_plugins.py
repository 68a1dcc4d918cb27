"""Routing plugins: code of others that may decide before the rules, within a deadline, and that can break nothing.

A plugin is a Python entry point of the group `midstream.routers`: a callable that takes `Asked` and returns a
`Suggestion` or None. It runs in a thread of its own. One that is late, raises, or returns something else is passed
over; one that is still busy with an earlier request is not waited for, so that a plugin that hangs costs one deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from queue import Empty, SimpleQueue
from typing import cast

from attrs import frozen

from gateway.context import Caller
from gateway.route_rules import Facts
from protocol.chat import ChatRequest

GROUP = "midstream.routers"

log = logging.getLogger("midstream.routing")


@frozen
class Asked:
    """What a plugin may look at."""

    chat: ChatRequest
    caller: Caller
    facts: Facts


@frozen
class Suggestion:
    """Where a plugin wants the request: edge, cloud or a target's name, with a model or the side's own."""

    target: str
    model: str | None = None
    reason: str = ""


Plugin = Callable[[Asked], object]
"""Returns a Suggestion or None; anything else is an error of its own."""


def installed(name: str) -> Plugin | None:
    """The entry point of this name, or None when nobody has it or it cannot be imported."""
    for found in entry_points(group=GROUP, name=name):
        try:
            return cast(Plugin, found.load())
        except Exception:
            log.exception("routing plugin %s cannot be loaded", name)
    return None


class PluginRunner:
    """Runs one plugin in its own thread, one request at a time."""

    def __init__(self, name: str, plugin: Plugin) -> None:
        self.name = name
        self.failures = 0
        self._plugin = plugin
        self._asked: SimpleQueue[tuple[Asked, SimpleQueue[Suggestion | None]] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name=f"route-plugin-{name}", daemon=True)
        self._thread.start()

    def ask(self, asked: Asked, deadline_s: float) -> Suggestion | None:
        """What it suggests, or None: nothing, an error, or no answer in time."""
        if not self._idle.is_set():
            return None
        self._idle.clear()
        answer: SimpleQueue[Suggestion | None] = SimpleQueue()
        self._asked.put((asked, answer))
        try:
            return answer.get(timeout=deadline_s)
        except Empty:
            self.failures += 1
            log.warning("routing plugin %s gave no answer within %g s", self.name, deadline_s)
            return None

    def close(self) -> None:
        """Ends its thread once it is idle; one that hangs dies with the process."""
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            asked, answer = work
            found = self._called(asked)
            self._idle.set()
            answer.put(found)

    def _called(self, asked: Asked) -> Suggestion | None:
        try:
            found = self._plugin(asked)
        except Exception:
            self.failures += 1
            log.exception("routing plugin %s failed", self.name)
            return None
        if found is None or isinstance(found, Suggestion):
            return found
        self.failures += 1
        log.warning("routing plugin %s returned %s, not a Suggestion", self.name, type(found).__name__)
        return None


class Plugins:
    """The plugins that policy names, loaded when it first does."""

    def __init__(self, find: Callable[[str], Plugin | None] = installed) -> None:
        self._find = find
        self._runners: dict[str, PluginRunner | None] = {}

    def suggestions(self, names: tuple[str, ...], asked: Asked, deadline_s: float) -> Iterator[tuple[str, Suggestion]]:
        """(plugin, suggestion) of those that have one, in order."""
        for name in names:
            runner = self._runner(name)
            found = runner.ask(asked, deadline_s) if runner is not None else None
            if found is not None:
                yield name, found

    def close(self) -> None:
        """End all threads."""
        for runner in self._runners.values():
            if runner is not None:
                runner.close()
        self._runners.clear()

    def _runner(self, name: str) -> PluginRunner | None:
        if name not in self._runners:
            plugin = self._find(name)
            if plugin is None:
                log.warning("there is no routing plugin %s; the rules decide without it", name)
            self._runners[name] = None if plugin is None else PluginRunner(name, plugin)
        return self._runners[name]
