"""The in-tree fake of HostBridge: a host whose state is set by hand and whose calls are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

from agent.host_bridge import HostState
from engines.port import TensorRuntime, TextEngine
from links.port import Found


class MemorySecrets:
    """Secrets for as long as the process lives."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self.held.get(name)

    def write(self, name: str, secret: bytes) -> None:
        self.held[name] = bytes(secret)


class FakeHost:
    """A HostBridge. `calls` keeps what was asked of it, with its argument; any thread.

    failing: names of the methods that raise.
    """

    def __init__(
        self,
        state: HostState | None = None,
        *,
        secrets: MemorySecrets | None = None,
        runtimes: Mapping[str, TensorRuntime] | None = None,
        engines: Mapping[str, TextEngine] | None = None,
        found: Sequence[Found] = (),
        failing: frozenset[str] = frozenset(),
    ) -> None:
        self._state = state or HostState(network="wifi")
        self.secrets = secrets
        self._runtimes = dict(runtimes or {})
        self._engines = dict(engines or {})
        self._found = tuple(found)
        self._failing = failing
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.calls: list[tuple[str, Any]] = []

    def change(self, **fields: Any) -> None:
        """Set fields of the state and tell who watches."""
        with self._lock:
            self._state = evolve(self._state, **fields)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    @property
    def watchers(self) -> int:
        return len(self._listeners)

    def state(self) -> HostState:
        self._fail("state")
        return self._state

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._fail("watch")
        with self._lock:
            self._listeners.append(on_change)

        def stop() -> None:
            with self._lock:
                self._listeners.remove(on_change)

        return stop

    def hold_awake(self, on: bool) -> None:
        self._note("hold_awake", on)

    def hold_multicast(self, on: bool) -> None:
        self._note("hold_multicast", on)

    def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        self._note("browse", service_type)
        return self._found

    def runtimes(self) -> Mapping[str, TensorRuntime]:
        self._fail("runtimes")
        return self._runtimes

    def text_engine(self, model: str) -> TextEngine | None:
        self._note("text_engine", model)
        return self._engines.get(model)

    def _note(self, name: str, argument: Any) -> None:
        with self._lock:
            self.calls.append((name, argument))
        self._fail(name)

    def _fail(self, name: str) -> None:
        if name in self._failing:
            raise OSError(f"{name} is not allowed")
