"""Composition of the tensor way: runtimes, pool and executors of this device, and the cloud's twin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

from agent.cloud_link import CloudLink
from agent.config import AgentConfig
from agent.health import Health
from agent.host import Host
from engines.catalogue import load_catalogue
from engines.executor import BoundedExecutor
from engines.laned import NICENESS, LanedEndpoint
from engines.local import LocalEndpoint
from engines.measure import Effort, tensor_probes
from engines.pool import ModelPool
from engines.port import TensorRuntime
from engines.registry import engine_class, installed_engines
from engines.remote_oip import collecting
from engines.remote_twin import RemoteTwin, oldest
from engines.slowed import SlowedRuntime
from engines.store import ModelStore, Stored
from links.port import Mount
from netprobe.probe import LinkProbe, UnderWay
from netprobe.view import LinkView
from profiles.benchmark import Probe
from profiles.facts import model_budget_bytes, usable_cores
from profiles.rates import Slowdowns
from profiles.strategy import UNCLASSED, Strategy
from protocol.clock import Clock
from protocol.device import Measured
from protocol.events import Emit, TransferSample
from protocol.models import BundleManifest
from protocol.policy import Policy, SplitPolicy
from protocol.pulse import Pulse
from split_models.device_way import DeviceWay
from split_models.settings import Remote, SplitPorts, SplitSettings, views_of

FORMATS = frozenset({"onnx", "tflite"})
# Figures for a start; live requests correct them.
PROBE_EFFORT = Effort(runs=5, budget_s=1.5)
LEAST_BUDGET_BYTES = 256 << 20
PICTURE_WAIT_S = 2.0
POST_WAIT_S = 0.05
POST_WAITING = 8
"""However fast this device is: what more answers could wait for, their stream's reader is there, and the server keeps
the rest."""
# Heads come right after the first connection; a benchmark that cannot see them would have to be done again.
HEADS_WAIT_S = 25.0
POLL_S = 0.25


class ChosenStore(ModelStore):
    """The store with only the configured models in its list; an empty choice takes all."""

    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config.models_dir, load_catalogue(config.models_dir / "catalogue.toml"))
        self._chosen = frozenset(config.tensor_models)

    def list(self) -> tuple[Stored, ...]:
        """Every known model that was chosen, by name."""
        return tuple(s for s in super().list() if not self._chosen or s.entry.name in self._chosen)


class TensorSide:
    """The tensor engines of this device and the mount of the way. Make it on the event loop.

    look: called before anything is asked or told of the links, so that another network is noticed first.
    second: another way to the same coordinator; where both are there, the planner takes the better for each request.
    host: the program that this agent is a guest of.
    """

    def __init__(
        self,
        config: AgentConfig,
        cloud: CloudLink,
        probe: LinkProbe,
        policy: Callable[[], Policy],
        emit: Emit,
        health: Health,
        clock: Clock = time.monotonic,
        slowdowns: Slowdowns | None = None,
        look: Callable[[], None] = lambda: None,
        second: CloudLink | None = None,
        strategy: Callable[[], Strategy] = lambda: UNCLASSED,
        host: Host | None = None,
    ) -> None:
        self._look_at_network = look
        self._config, self._health = config, health
        self._probe, self._emit = probe, emit
        self._store = ChosenStore(config)
        ways = (cloud,) if second is None else (cloud, second)
        self._pictures = BoundedExecutor("pictures", 1, PICTURE_WAIT_S, clock, emit)
        # For requests that can wait: their pictures, and their answers, which the reader of their stream works on too.
        first = self._pictures
        self._later = BoundedExecutor("later", 1, PICTURE_WAIT_S, clock, emit, niceness=NICENESS, first=first)
        self._post = BoundedExecutor(
            "post", 1, POST_WAIT_S, clock, emit, max_waiting=POST_WAITING, niceness=NICENESS, first=first
        )
        self._twins = {link.name: self._twin(link, clock) for link in ways}
        self._far = {link.name: (link, Remote(self._twins[link.name], link)) for link in ways}
        self.sink = collecting(self._sample)
        cores = usable_cores()
        begin = strategy()
        self.threads = config.tensor_threads or min(begin.threads, cores) or max(1, cores - 1)
        at_once, wait_s = max(1, cores // self.threads), policy().engines.wait_target_s
        self._executor = BoundedExecutor("tensor", at_once, wait_s, clock, emit, threads_per_run=self.threads)
        self._runtimes = _runtimes(config.slowdown, host.runtimes if host is not None else {})
        budget_bytes = model_budget_bytes(LEAST_BUDGET_BYTES)
        pool = ModelPool(min(budget_bytes, begin.max_models_bytes or budget_bytes))
        engines = self._store, pool, self._executor, self._runtimes
        self._local = LocalEndpoint(*engines, threads=self.threads, clock=clock)
        self._way = self._device_way(policy, strategy, slowdowns or Slowdowns(), host, clock)
        self._models: tuple[str, ...] = ()
        self._files: frozenset[str] = frozenset()
        self._warned: frozenset[str] = frozenset()
        self._started = asyncio.Event()
        way = self._way.mount
        self.mount = Mount(routes=way.routes, frame_routes=way.frame_routes, start=self._start, stop=self._stop)

    def _device_way(
        self,
        policy: Callable[[], Policy],
        strategy: Callable[[], Strategy],
        slowdowns: Slowdowns,
        host: Host | None,
        clock: Clock,
    ) -> DeviceWay:
        ports = SplitPorts(
            local=self._local,
            store=self._store,
            compute=self._pictures,
            later=self._later,
            policy=lambda: bounded(policy().split, strategy()),
            links=self._views,
            remotes=self._remotes,
            slowdowns=slowdowns,
            strategy=strategy,
            may_fetch=(lambda: host.pace.may_fetch) if host is not None else (lambda: True),
            emit=self._emit,
            clock=clock,
        )
        return DeviceWay(SplitSettings(speed_ratio=self._config.slowdown), ports)

    @property
    def models(self) -> tuple[str, ...]:
        """Tensor models that this device answers."""
        return self._models

    @property
    def begun(self) -> bool:
        """Whether the first look at the models is over."""
        return self._started.is_set()

    def status(self) -> Mapping[str, Any]:
        """Held arm and ranking by model, for the status page."""
        return {"arms": dict(self._way.status())}

    async def cloud_met(self) -> None:
        """The coordinator was just connected: bundles may be there."""
        if self._started.is_set():
            await self._refresh()

    async def heads_ready(self, expected: bool) -> None:
        """Return when models are served and, if a coordinator is expected, its heads are here or took too long."""
        await self._started.wait()
        if not expected or not self._way.runners:
            return
        try:
            async with asyncio.timeout(HEADS_WAIT_S):
                while not all(self._complete(name) for name in self._way.runners):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return

    def probes(self) -> Sequence[Probe]:
        """Whole models over thread counts, then the heads that are here. Blocking: it looks into the store."""
        found: list[Probe] = []
        for stored in self._store.list():
            runtime = self._runtimes.get(stored.entry.format)
            if stored.path is not None and runtime is not None:
                found += tensor_probes(
                    runtime,
                    stored.path,
                    stored.entry.sha256,
                    model=stored.entry.name,
                    input_shapes=stored.entry.input_shapes,
                    threads=_thread_counts(self.threads),
                    effort=PROBE_EFFORT,
                )
        return [*found, *self._way.probes(self._runtimes, self.threads)]

    def digests(self) -> frozenset[str]:
        """What the measurements are of: files of the store and prepared models of bundles."""
        prepared = (runner.plan.manifest for runner in self._way.runners.values())
        return frozenset(d for manifest in prepared for d in (manifest.digest, manifest.source_sha256)) | self._files

    def learn(self, measured: Sequence[Measured]) -> None:
        """Give the benchmark's results to the cost tables."""
        self._way.learn(measured)

    def flops_per_s(self, measured: Sequence[Measured]) -> tuple[float, ...]:
        """How fast this device computes each model whose operations are known, with the usual threads."""
        manifests = [runner.plan.manifest for runner in self._way.runners.values()]
        found = [(manifest.flops, _whole_s(manifest, measured)) for manifest in manifests if manifest.flops > 0]
        return tuple(flops / seconds for flops, seconds in found if seconds > 0)

    def under_way(self, link: str, exchanges: UnderWay) -> UnderWay:
        """The oldest transfer of a link, whether it is an exchange of its own or goes in tensor frames."""
        twin = self._twins.get(link)
        return exchanges if twin is None else oldest(exchanges, twin.under_way)

    def pulses(self) -> tuple[Pulse, ...]:
        """Signs of life of every thread that computes or loads here; from any thread."""
        executors = (self._executor, self._pictures, self._later, self._post)
        return (*(pulse for executor in executors for pulse in executor.pulses()), *self._local.pulses())

    def set_wait_target(self, seconds: float) -> None:
        """Model runs may wait this long from now on."""
        self._executor.set_wait_target(seconds)

    def _twin(self, link: CloudLink, clock: Clock) -> RemoteTwin:
        lane = LanedEndpoint(link.name, link.again, self._post, sink=self._sample, clock=clock)
        return RemoteTwin(link, sink=self._sample, clock=clock, bulk=lane)

    def _complete(self, name: str) -> bool:
        plan = self._way.runners[name].plan
        here = set(self._local.names())
        return bool(plan.manifest.cuts) and all(plan.head(cut) in here for cut in plan.manifest.cuts)

    def _remotes(self) -> Mapping[str, Remote]:
        return {name: remote for name, (link, remote) in self._far.items() if link.available}

    def _views(self) -> Mapping[str, LinkView]:
        self._look_at_network()
        return views_of(self._probe)

    def _sample(self, sample: TransferSample) -> None:
        self._look_at_network()
        self._probe.add(sample)
        self._emit(sample)

    def _look(self) -> None:
        here = [s.entry for s in self._store.list() if s.path is not None and s.entry.format in FORMATS]
        self._models = tuple(entry.name for entry in here)
        self._files = frozenset(entry.sha256 for entry in here)

    async def _refresh(self) -> None:
        await self._way.refresh()
        await self._told()

    async def _start(self) -> None:
        try:
            await self._way.mount.start()
            await self._told()
        finally:
            self._started.set()  # whoever waits for the models has nothing more to wait for

    async def _told(self) -> None:
        """After a look of the way: names and digests of what is here, and a warning for each model with a fault."""
        await asyncio.to_thread(self._look)
        faults = self._way.faults
        for name in self._warned - set(faults):
            self._health.clear(f"tensor_model:{name}")
        for name, err in faults.items():
            step = err.next_step or f"midstream models verify {name}"
            self._health.warn(f"tensor_model:{name}", f"{name} is served without its recipe: {err.message}", step)
        self._warned = frozenset(faults)

    async def _stop(self) -> None:
        await self._way.mount.stop()
        for twin in self._twins.values():
            await twin.close()
        await self._local.close()
        await asyncio.to_thread(self._executor.close)
        await asyncio.to_thread(self._pictures.close)
        await asyncio.to_thread(self._later.close)
        await asyncio.to_thread(self._post.close)


def bounded(policy: SplitPolicy, strategy: Strategy) -> SplitPolicy:
    """The policy within what this class of device allows."""
    if policy.hedge_ratio <= strategy.hedge_ratio:
        return policy
    return evolve(policy, hedge_ratio=strategy.hedge_ratio)


def _whole_s(manifest: BundleManifest, measured: Sequence[Measured]) -> float:
    digests = (manifest.digest, manifest.source_sha256)
    return next((m.median_s for m in measured if m.what == "whole" and m.digest in digests), 0.0)


def _runtimes(slowdown: float, brought: Mapping[str, TensorRuntime]) -> dict[str, TensorRuntime]:
    """The host's runtimes by format, then those installed here; libraries are imported at the first load."""
    found: dict[str, TensorRuntime] = {}
    for name in sorted(FORMATS & {*installed_engines(), *brought}):
        runtime: TensorRuntime = brought[name] if name in brought else engine_class(name)()
        found[name] = SlowedRuntime(runtime, slowdown) if slowdown > 1.0 else runtime
    return found


def _thread_counts(usual: int) -> tuple[int, ...]:
    """The usual count first, then one thread and all cores."""
    return tuple(dict.fromkeys((usual, 1, usable_cores())))
