"""The agent within another program: started, paused, resumed and stopped from any thread of it.

It lives in one thread with an event loop of its own. It sets no signal handler, starts no child process, changes no
logging, and leaves nothing behind when it stops, so that it can be started again in the same process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, TypeVar

from agent.config import AgentConfig
from agent.host_bridge import HostBridge, PlainHost
from agent.house import House
from protocol.errors import EngineError
from protocol.events import Event, ignore
from protocol.held_folder import hold_folder

log = logging.getLogger("midstream.agent.embed")

READY_S = 30.0
COMMAND_S = 20.0
STOP_S = 30.0

State = Literal["stopped", "starting", "ready", "paused", "failed"]

T = TypeVar("T")

Say = Callable[[str, str, Mapping[str, Any]], None]
"""(name, sentence, facts) of each change of the agent's state."""


def _say_nothing(name: str, text: str, facts: Mapping[str, Any]) -> None:
    """For hosts that do not listen."""


class EmbeddedAgent:
    """One agent; every method may be called from any thread but the agent's own, and is idempotent.

    Args:
        config: `agent.config.load({"state_dir": ..., "models_dir": ...}, environ={})`.
        bridge: the host's side; PlainHost when there is nothing to tell.
        say: told of state changes, in the agent's thread; it must not call this object.
        emit: told of every event (requests, switches, links), in whichever thread it happens.

    Errors of the agent are raised to the caller as they are: MidstreamError (ConfigError above all) with its next step,
    TimeoutError when something took too long.
    """

    def __init__(
        self,
        config: AgentConfig,
        bridge: HostBridge | None = None,
        *,
        say: Say = _say_nothing,
        emit: Callable[[Event], None] = ignore,
    ) -> None:
        self._config = config
        self._bridge: HostBridge = PlainHost() if bridge is None else bridge
        self._voice = _Voice(say, emit)
        self._lock = threading.RLock()
        self._run: _Run | None = None

    @property
    def state(self) -> State:
        """Where it stands now; `failed`: it ended by itself, the next `wait_ready` says why."""
        run = self._run
        return "stopped" if run is None else run.state

    def start(self) -> None:
        """Begin; returns at once. A running agent is left alone; the end of one that was told to stop is waited for.

        Raises TimeoutError when that takes longer than STOP_S.
        """
        end_s = time.monotonic() + STOP_S
        while (ending := self._begin()) is not None:
            self._not_from_within(ending)
            ending.thread.join(max(0.0, end_s - time.monotonic()))
            if ending.thread.is_alive():
                raise TimeoutError(f"the agent that was told to stop did not within {STOP_S:g} s")

    def _begin(self) -> _Run | None:
        """The run whose end must be waited for first; None when there is one that goes on."""
        with self._lock:
            run = self._run
            if run is None or run.over:
                self._run = _Run(self._config, self._bridge, self._voice)
                self._run.begin()
                return None
            return run if run.asked else None

    def wait_ready(self, timeout_s: float = READY_S) -> str:
        """The base URL of the local API, once it listens. Raises why it does not."""
        run = self._running()
        try:
            run.ready.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the agent was not ready within {timeout_s:g} s") from None
        return run.url

    def pause(self, *, drain: bool = True, timeout_s: float = COMMAND_S) -> None:
        """Tell the fleet `sleeping`, end the session and all background work; the local API refuses with 503.

        drain: False goes on answering requests, on this device and over the way that is there.
        """
        self._command(lambda house: house.pause(drain=drain), timeout_s)

    def resume(self, *, timeout_s: float = COMMAND_S) -> None:
        """Wake from a pause: requests are answered at once, the fleet is met in the background."""
        self._command(lambda house: house.resume(), timeout_s)

    def stop(self, *, timeout_s: float = STOP_S) -> None:
        """Drain, say goodbye, free everything and end the thread. Harmless when it does not run."""
        with self._lock:
            run = self._run
        if run is None:
            return
        self._not_from_within(run)
        run.ask_to_stop()
        run.thread.join(timeout_s)
        if run.thread.is_alive():
            raise TimeoutError(f"the agent did not stop within {timeout_s:g} s")
        with self._lock:
            if self._run is run:
                self._run = None

    def status(self, *, timeout_s: float = COMMAND_S) -> Mapping[str, Any]:
        """The status document, as GET /midstream/v1/status gives it."""
        return self._command(_status, timeout_s)

    def __enter__(self) -> EmbeddedAgent:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _running(self) -> _Run:
        run = self._run
        if run is None:
            raise EngineError("the agent does not run", next_step="call start() first")
        self._not_from_within(run)
        return run

    def _command(self, work: Callable[[House], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        self.wait_ready(timeout_s)
        return self._running().command(work, timeout_s)

    @staticmethod
    def _not_from_within(run: _Run) -> None:
        if threading.current_thread() is run.thread:
            raise RuntimeError("call this from another thread than the agent's: it would wait for itself")


class _Run:
    """One life of the agent, from `begin` to the end of its thread."""

    def __init__(self, config: AgentConfig, bridge: HostBridge, voice: _Voice) -> None:
        self._config = config
        self._bridge = bridge
        self._voice = voice
        self.ready: Future[None] = Future()
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._house: House | None = None
        self._asked = threading.Event()
        self.thread = threading.Thread(target=self._main, name="midstream", daemon=True)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def over(self) -> bool:
        return self.ready.done() and not self.thread.is_alive()

    @property
    def state(self) -> State:
        house = self._house
        if self.over:
            return "stopped" if self._asked.is_set() else "failed"
        if house is None or not self.ready.done():
            return "starting"
        return "paused" if house.paused else "ready"

    def begin(self) -> None:
        self.thread.start()

    def ask_to_stop(self) -> None:
        self._asked.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                return  # it has ended meanwhile

    def command(self, work: Callable[[House], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        house, loop = self._house, self._loop
        if house is None or loop is None or self.over:
            raise EngineError("the agent has stopped", next_step="call start() again")
        try:
            answer = asyncio.run_coroutine_threadsafe(work(house), loop)
        except RuntimeError as err:
            raise EngineError("the agent has stopped", next_step="call start() again") from err
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise TimeoutError(f"the agent did not answer within {timeout_s:g} s") from None
        except CancelledError:
            raise EngineError("the agent has stopped meanwhile", next_step="call start() again") from None

    def _main(self) -> None:
        """The thread. Whatever ends it, whoever waits is told."""
        try:
            with asyncio.Runner() as runner:
                runner.run(self._live())
        except BaseException as err:
            if self.ready.done():
                log.exception("the agent ended with an error")
                self.ready = Future()
            self.ready.set_exception(err)
        else:
            if not self.ready.done():
                self.ready.set_exception(EngineError("the agent was stopped before it was ready"))

    async def _live(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._asked.is_set():
            return
        with hold_folder(self._config.state_dir, "agent"):
            house = House(self._config, self._voice, self._bridge)
            await house.supervisor.start()
            try:
                self._house, self.url = house, house.url
                house.tell_ready()
                self.ready.set_result(None)
                await self._stop.wait()
            finally:
                await house.supervisor.stop()


class _Voice:
    """What the host hears; its errors are its own."""

    def __init__(self, say: Say, emit: Callable[[Event], None]) -> None:
        self._say = say
        self._emit = emit

    def emit(self, event: Event) -> None:
        try:
            self._emit(event)
        except Exception:
            log.exception("the host's listener for events failed")

    def say(self, name: str, text: str, **facts: Any) -> None:
        try:
            self._say(name, text, facts)
        except Exception:
            log.exception("the host's listener for state changes failed")


async def _status(house: House) -> Mapping[str, Any]:
    return house.status()
