"""The host as the agent uses it: every call guarded, its state followed, locks taken and left in order off the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from attrs import evolve

from agent.device_key import KeyKeeper, SecretKey
from agent.health import Health
from agent.host_bridge import HostBridge, HostState
from agent.pacing import Pace, pace, too_hot
from engines.port import TensorRuntime, TextEngine
from links.port import Found
from profiles.facts import Facts
from protocol.errors import ConfigError, LinkError, MidstreamError

log = logging.getLogger("midstream.agent.host")

KEY_NAME = "midstream.device.key"
# A host that forgets to tell is looked at all the same.
LOOK_S = 60.0
# Of an end: longest wait for calls that the host has not returned from.
CLOSE_S = 5.0

T = TypeVar("T")


class Host:
    """One bridge over one run of the agent. Make and use it on the event loop; blocking calls say so.

    on_pace: called on the loop when what the host allows has changed, with what it allowed before.
    """

    def __init__(self, bridge: HostBridge, health: Health, on_pace: Callable[[Pace, Pace], None]) -> None:
        self._bridge = bridge
        self._health = health
        self._on_pace = on_pace
        # Locks are taken and left in the order of the calls, and a slow host does not hold the loop up.
        self._calls = ThreadPoolExecutor(1, "host bridge")
        self._changed = asyncio.Event()
        self._holders = 0
        self.state = self._guarded("state", bridge.state, HostState())
        self.pace = pace(self.state)
        none: Mapping[str, TensorRuntime] = {}
        self.runtimes = dict(self._guarded("runtimes", bridge.runtimes, none))

    async def run(self) -> None:
        """Follow the host's state; a track of the house."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody is left to tell
                loop.call_soon_threadsafe(self._changed.set)

        stop = self._guarded("watch", lambda: self._bridge.watch(changed), _nothing)
        try:
            while True:
                await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            self._guarded("watch", stop, None)

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave the wake lock and end the thread; a host that holds a call for longer ends it when it returns."""
        if self._holders > 0:
            self._holders = 1
            self.hold_awake(False)
        try:
            last = self._calls.submit(_nothing)
        except RuntimeError:
            return  # closed already
        self._calls.shutdown(wait=False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(last)
        except TimeoutError:
            log.warning("the host has held a call for %g s; it is not waited for any longer", timeout_s)
        else:
            self._calls.shutdown()  # the thread has nothing left to do

    def key(self, folder: Path) -> KeyKeeper | None:
        """The device's key in the host's store of secrets; None when it has none."""
        secrets = self._guarded("secrets", lambda: self._bridge.secrets, None)
        if secrets is None:
            return None
        return SecretKey(
            lambda: _secret("read", lambda: secrets.read(KEY_NAME)),
            lambda key_pem: _secret("write", lambda: secrets.write(KEY_NAME, key_pem)),
            folder,
        )

    def text_engine(self, model: str) -> TextEngine | None:
        """The host's engine for a model, if it has one."""
        return self._guarded("text_engine", lambda: self._bridge.text_engine(model), None)

    def hold_awake(self, on: bool) -> None:
        """Take or leave the wake lock, soon; does not wait. Held until everyone who took it has left it."""
        self._holders += 1 if on else -1
        if self._holders == (1 if on else 0):
            self._soon("hold_awake", lambda: self._bridge.hold_awake(on))

    async def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        """Services by the host's discovery, under its multicast lock. Raises LinkError."""
        self._soon("hold_multicast", lambda: self._bridge.hold_multicast(True))
        try:
            return tuple(await asyncio.to_thread(self._bridge.browse, service_type, seconds))
        except Exception as err:
            raise LinkError(
                f"the host's service discovery failed: {err}", next_step="set the coordinator's address"
            ) from err
        finally:
            self._soon("hold_multicast", lambda: self._bridge.hold_multicast(False))

    def facts(self, facts: Facts) -> Facts:
        """Facts with what the host knows better."""
        state = self.state
        if state.charging is None and state.battery_ratio is None:
            return facts
        return evolve(
            facts,
            power="mains" if state.charging else "battery",
            battery_ratio=facts.battery_ratio if state.battery_ratio is None else state.battery_ratio,
        )

    def status(self) -> Mapping[str, Any]:
        """For the status document."""
        state = self.state
        return {
            "battery_ratio": state.battery_ratio, "charging": state.charging, "thermal": state.thermal,
            "network": state.network, "metered": state.metered, "idle": state.idle,
            "keepalive_s": self.pace.keepalive_s, "pace": self.pace.reason,
        }  # fmt: skip

    async def _look(self) -> None:
        self.state = await asyncio.to_thread(self._guarded, "state", self._bridge.state, self.state)
        if too_hot(self.state):
            self._health.warn(
                "thermal", f"this device is hot ({self.state.thermal})", "let it cool; it computes slowly"
            )
        else:
            self._health.clear("thermal")
        before, self.pace = self.pace, pace(self.state)
        if before != self.pace:
            log.info("the host's state has changed: %s", self.pace.reason)
            self._on_pace(before, self.pace)

    def _soon(self, name: str, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self._calls.submit(self._guarded, name, call, None)

    def _guarded(self, name: str, call: Callable[[], T], default: T) -> T:
        """What the host says; `default` and one warning when it fails. Any thread."""
        try:
            return call()
        except Exception as err:  # noqa: BLE001 - a bridge may raise whatever its language has
            log.warning("the host's %s failed: %s: %s", name, type(err).__name__, err)
            return default


def _nothing() -> None:
    """Stands for a watch that could not be begun, and ends the queue of calls."""


def _secret(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except MidstreamError:
        raise
    except Exception as err:
        raise ConfigError(
            f"the host's secret store failed to {what} the device's key: {err}",
            next_step="unlock the device and start again",
        ) from err
