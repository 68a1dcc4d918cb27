"""The profiled track: facts at once, measurements in the background when the kept ones do not fit any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from agent.benchmark import Benchmark
from agent.config import AgentConfig
from agent.health import Health
from agent.host import Host
from agent.supervisor import LifeKeeper
from engines.registry import installed_engines
from profiles.facts import Facts, collect, device_profile
from protocol.device import DeviceProfile, Measured
from protocol.errors import MidstreamError

log = logging.getLogger("midstream.agent.profile")


class Profiler:
    """Holds the device profile; `current` may be asked at any time."""

    def __init__(
        self,
        config: AgentConfig,
        device_id: str,
        labels: Mapping[str, str],
        life: LifeKeeper,
        health: Health,
        host: Host | None = None,
    ) -> None:
        self._host = host
        self._config = config
        self._device_id = device_id
        self._labels = labels
        self._life = life
        self._health = health
        self._facts = Facts()
        self._measured: tuple[Measured, ...] = ()
        self._key = ""

    def current(self) -> DeviceProfile:
        """What is known now; None for what is not."""
        brought = {} if self._host is None else {name: r.version for name, r in self._host.runtimes.items()}
        return device_profile(
            self._facts if self._host is None else self._host.facts(self._facts),
            self._device_id,
            labels=self._labels,
            engines={**installed_engines(), **brought},
            measured=self._measured,
            key=self._key,
            slowdown_declared=self._config.slowdown,
        )

    async def collect(self) -> None:
        """Read the facts, off the loop: some come from slow files."""
        self._facts = await asyncio.to_thread(collect)

    @property
    def facts(self) -> Facts:
        """The facts as collected; all unknown before."""
        return self._facts

    async def measure(self, benchmark: Benchmark, changed: Callable[[], None]) -> None:
        """Take kept measurements that still fit, else measure; `changed` is called when the profile did."""
        kept = await asyncio.to_thread(benchmark.kept, self._facts)
        if kept is not None:
            self._measured, self._key = kept.measured, kept.key
            self._life.step("profiled", "cached")
            changed()
            return
        self._life.step("profiled", "measure")
        try:
            found = await benchmark.run(self._facts)
        except MidstreamError as err:
            self._life.step("profiled", "failed")
            self._health.warn("profile", f"this device was not measured: {err.message}", err.next_step)
            return
        self._measured, self._key = found.measured, found.key
        self._life.step("profiled", "measured")
        changed()
