"""Composition of the tensor way: runtimes, pool and executor of this device, and the cloud's twin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.cloud_link import CloudLink
from agent.config import AgentConfig
from agent.health import Health
from engines.pool import ModelPool
from engines.remote_oip import collecting
from engines.store import ModelStore
from links.port import Mount
from netprobe.probe import LinkProbe
from profiles.benchmark import Probe
from protocol.clock import Clock
from protocol.events import Emit, TransferSample
from protocol.policy import Policy

# Before the facts are known; a Pi 4 has 2 to 8 GiB.
BUDGET_BYTES = 1 << 30


class TensorSide:
    """The tensor engines of this device and the mount of the way."""

    def __init__(
        self,
        config: AgentConfig,
        store: ModelStore,
        cloud: CloudLink,
        probe: LinkProbe,
        health: Health,
        policy: Callable[[], Policy],
        emit: Emit,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._store = store
        self._cloud = cloud
        self._probe = probe
        self._health = health
        self._policy = policy
        self._emit = emit
        self._clock = clock
        self.settled = asyncio.Event()
        self.sink = collecting(self._sample)
        self.pool = ModelPool(BUDGET_BYTES)
        self.mount = Mount(routes=(), frame_routes=(), start=self._start, stop=self._stop)

    @property
    def models(self) -> tuple[str, ...]:
        return self._config.tensor_models

    def status(self) -> Mapping[str, Any]:
        return {}

    def probes(self) -> Sequence[Probe]:
        return ()

    def digests(self) -> frozenset[str]:
        return frozenset()

    async def learn_cloud(self) -> None:
        return None

    def _sample(self, sample: TransferSample) -> None:
        self._probe.add(sample)
        self._emit(sample)

    async def _start(self) -> None:
        self.settled.set()

    async def _stop(self) -> None:
        return None
