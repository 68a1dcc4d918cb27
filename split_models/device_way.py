"""The tensor way on a device: models with arms, their heads, and the bundles they come from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engines.port import TensorEndpoint, TensorRuntime
from engines.remote_oip import ask_to_load
from links.port import Mount
from protocol.decode import encode
from protocol.device import Measured
from protocol.durable import read_durable, write_durable
from protocol.errors import EngineError, MidstreamError, NotFound, ProtocolError
from protocol.models import BUNDLE_SCHEMA, BundleManifest, CatalogueEntry, CutEntry
from split_models.arm_cost import Arm
from split_models.arms import Arms, compressing
from split_models.bundle_client import BundleClient, kept_as
from split_models.bundle_files import files_of, parse_manifest
from split_models.cost_memory import CostMemory, KeptCosts
from split_models.costs import CostTable
from split_models.front import Front
from split_models.heads import Heads
from split_models.images import check_libraries
from split_models.measure import Probe, head_probes
from split_models.plan import ModelPlan
from split_models.recipes import Recipe, recipe
from split_models.report_route import report_route
from split_models.runner import Runner
from split_models.runner_ports import RunnerPorts
from split_models.service import PLATFORMS, Service, Shown
from split_models.settings import Remote, SplitPorts, SplitSettings

TAIL_LOAD_S = 30.0
"""Longest wait for the far end to load a tail."""

RETIRE_POLL_S = 0.05
"""Between looks whether the requests of a model that was removed or replaced have ended."""

_log = logging.getLogger("midstream.split")


class DeviceWay:
    """Serves every tensor model of the store.

    Those with a recipe get a runner, and cuts once a bundle is here; the others a runner when a bundle is here.
    """

    def __init__(self, settings: SplitSettings, ports: SplitPorts) -> None:
        self._settings = settings
        self._ports = ports
        self._client = BundleClient(ports.store)
        self._shown: dict[str, Shown] = {}
        self._runners: dict[str, Runner] = {}
        self._registered: dict[str, list[str]] = {}
        self._looking = asyncio.Lock()
        self._measured: tuple[Measured, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._troubles: dict[str, str] = {}
        self._faults: dict[str, MidstreamError] = {}
        self._wake = asyncio.Event()
        self._heads = Heads(ports.local, ports.clock, self._spawn, self._warmed)
        engine = f"{ports.local.versions()}, {settings.speed_ratio:g} times as slow as a server"
        self._costs = CostMemory(self._costs_path, engine, ports.clock)
        self._coming: frozenset[str] | None = None
        service = Service(
            ports.local, ports.compute, ports.clock, lambda: self._shown, self._runners, "device", ports.emit,
            self._loading,
        )  # fmt: skip
        self.front = Front(service, settings.deadline_s)
        routes = (*self.front.routes, report_route(self._runners))
        self.mount = Mount(routes=routes, frame_routes=(), start=self.start, stop=self.stop)

    @property
    def runners(self) -> Mapping[str, Runner]:
        """By model."""
        return self._runners

    @property
    def faults(self) -> Mapping[str, MidstreamError]:
        """Models that are served without their recipe, and why; each is tried again at the next refresh."""
        return dict(self._faults)

    async def start(self) -> None:
        """Serve what is here; bundles are looked for in the background from then on, whatever the first look found."""
        self._spawn(self._follow(), "bundles")
        await self.refresh()

    async def stop(self) -> None:
        """Stop the background work; requests under way end by themselves."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for runner in self._runners.values():
            await runner.close()
        await self._keep_costs(now=True)

    async def refresh(self) -> None:
        """Look at the store again: after a pull, an add or a removal."""
        try:
            async with self._looking:
                await self._look()
        finally:
            # A model that cannot be shown is not on its way either.
            self._coming = frozenset()
            self._wake.set()

    async def _look(self) -> None:
        stored = await asyncio.to_thread(self._ports.store.list)
        present = {s.entry.name: s.entry for s in stored if s.path is not None and s.entry.format in PLATFORMS}
        self._coming = frozenset(present)
        for name in [name for name in self._shown if name not in present]:
            self._shown.pop(name)
            self._faults.pop(name, None)
            self._troubles.pop(name, None)
            runner = self._runners.pop(name, None)
            self._retire(name, runner, [name, *self._registered.pop(name, [])])
            if runner is not None:
                await runner.close()
        for entry in present.values():
            if entry.name not in self._shown or entry.name in self._faults:
                await self._try_to_show(entry)

    def learn(self, measured: Sequence[Measured]) -> None:
        """Take the device's benchmark as priors of all cost tables."""
        self._measured = tuple(measured)
        for runner in self._runners.values():
            runner.learn(self._measured)

    def probes(self, runtimes: Mapping[str, TensorRuntime], threads: int) -> Sequence[Probe]:
        """Measurements of the heads that are here, for the benchmark."""
        found: list[Probe] = []
        for runner in self._runners.values():
            manifest = runner.plan.manifest
            runtime = runtimes.get(manifest.format)
            if manifest.cuts and runtime is not None:
                found += head_probes(manifest, partial(self._head_path, manifest), runtime, threads)
        return found

    def status(self) -> Mapping[str, Any]:
        """Per model: held arm, why, number of cuts, and the last ranking in milliseconds."""
        return {name: _status(runner) for name, runner in self._runners.items()}

    def _loading(self, name: str) -> bool:
        """Whether a model of the store is not served yet; before the first look into it, any that is here."""
        if self._coming is not None:
            return name in self._coming and name not in self._shown
        try:
            self._ports.store.path(name)
            return self._ports.store.entry(name).format in PLATFORMS
        except MidstreamError:
            return False

    # -- models ------------------------------------------------------------------------------------------------------

    async def _try_to_show(self, entry: CatalogueEntry) -> None:
        """One model that cannot be used as its entry says takes no other one with it."""
        try:
            await self._show(entry)
        except MidstreamError as err:
            if entry.name not in self._faults:
                _log.info("%s is served without its recipe: %s", entry.name, err)
            self._faults[entry.name] = err
            self._shown[entry.name] = Shown(entry.name, PLATFORMS[entry.format])
        else:
            self._faults.pop(entry.name, None)

    async def _show(self, entry: CatalogueEntry) -> None:
        if entry.recipe is None:
            self._shown[entry.name] = Shown(entry.name, PLATFORMS[entry.format])
            kept = await asyncio.to_thread(self._kept, entry)
            if kept is not None:
                await self._use(kept, None, None)
            return
        found = recipe(entry.recipe)
        check_libraries()
        shapes = dict(entry.input_shapes)
        if not shapes:
            inputs, _, _ = await self._ports.local.describe(entry.name)
            if not inputs:
                raise EngineError(f"{entry.name} has no input for a picture", next_step="add it without a recipe")
            shapes = {inputs[0].name: found.input_shape}
        kept = await asyncio.to_thread(self._kept, entry)
        if kept is not None and await self._use(kept, found, None):
            return
        self._install(ModelPlan(_bare(entry, shapes), found))

    def _kept(self, entry: CatalogueEntry) -> BundleManifest | None:
        """The bundle that was fetched before, if it is of this file."""
        manifest = read_durable(self._manifest_path(entry.name), parse_manifest)
        return manifest if manifest is not None and manifest.source_sha256 == entry.source_sha256 else None

    def _install(self, plan: ModelPlan, kept: KeptCosts | None = None, names: Sequence[str] = ()) -> None:
        """Serve a model by this plan from now on; requests under way finish on the old one.

        kept: what the same bundle cost before the last start. names: under which its parts are registered; those of
        the bundle before are forgotten.
        """
        platform = PLATFORMS[plan.manifest.format]
        self._shown[plan.name] = Shown(plan.name, platform, plan.recipe, plan.input_name, plan.input_shape)
        old = self._runners.get(plan.name)
        ports = self._ports
        arms = Arms(ports.local, self._endpoint, ports.compute, ports.clock, ports.later)
        table = CostTable(
            plan.manifest,
            speed_ratio=self._settings.speed_ratio * self._ports.strategy().speed_ratio,
            watts=self._settings.watts,
            engine=plan.manifest.format,
            slowdowns=self._ports.slowdowns,
        )
        if kept is not None:
            table.recall({"device": kept.device, "server": kept.server})
        runner = Runner(plan, arms, self._runner_ports(plan), table)
        runner.learn(self._measured)
        self._runners[plan.name] = runner
        before, self._registered[plan.name] = self._registered.get(plan.name, []), list(names)
        self._retire(plan.name, old, [name for name in before if name not in names])

    def _register(self, model: str, name: str, path: Path, manifest: BundleManifest) -> None:
        self._ports.local.register(name, path, manifest.digest, manifest.format)
        known = self._registered.setdefault(model, [])
        if name not in known:
            known.append(name)

    def _retire(self, model: str, old: Runner | None, names: Sequence[str]) -> None:
        self._spawn(self._retired(model, old, names), f"close {model}")

    async def _retired(self, model: str, old: Runner | None, names: Sequence[str]) -> None:
        """Close what served a model, and free the memory of its parts when its last request has ended."""
        if old is not None:
            await old.close()
            while old.running:
                await asyncio.sleep(RETIRE_POLL_S)
        for name in names:
            if name not in self._registered.get(model, ()):  # it may be in use again
                self._heads.forget(name)
                self._ports.local.unregister(name)

    def _runner_ports(self, plan: ModelPlan) -> RunnerPorts:
        ports = self._ports
        cut = bool(plan.manifest.cuts) or plan.manifest.digest != plan.manifest.source_sha256
        return RunnerPorts(
            policy=ports.policy,
            links=ports.links,
            link_names=lambda: tuple(ports.remotes()) if cut else (),
            device_wait_s=ports.local.wait_s,
            server_wait_s=lambda name: remote.endpoint.wait_s() if (remote := ports.remotes().get(name)) else 0.0,
            loaded=self._heads.ready,
            ran=self._heads.ran,
            zstd=self._takes_zstd,
            strategy=ports.strategy,
            preload=partial(self._preload, plan),
            rest=partial(self.want_rest, plan),
            stale=self._wake.set,
            emit=ports.emit,
            clock=ports.clock,
        )

    def _endpoint(self, name: str) -> TensorEndpoint | None:
        remote = self._ports.remotes().get(name)
        return remote.endpoint if remote is not None else None

    def _takes_zstd(self, link: str) -> bool:
        endpoint = self._endpoint(link)
        return endpoint is not None and compressing(endpoint) is not None

    def _preload(self, plan: ModelPlan, arm: Arm) -> None:
        cut = plan.cut(arm)
        self._heads.want(plan.head(cut), partial(self._load_tail, arm.link or "", plan.tail(cut)))

    def want_rest(self, plan: ModelPlan, arm: Arm) -> None:
        """Have the tail of a cut here too, in the background: fetched, loaded into free memory and warmed."""
        cut = plan.cut(arm)
        self._heads.want_rest(plan.tail(cut), partial(self._fetch_tail, plan, cut, arm.link or ""))

    async def _fetch_tail(self, plan: ModelPlan, cut: CutEntry, link: str) -> None:
        """A tail's file, so that it can run here; fetched when it is wanted first, over a link that may carry it."""
        remote = self._ports.remotes().get(link) if self._ports.may_fetch() else None
        path = await self._client.tail(remote.link if remote else None, plan.manifest, cut)
        runner = self._runners.get(plan.name)
        if runner is None or runner.plan.manifest != plan.manifest:
            raise NotFound(f"{plan.name} has another bundle now")
        self._register(plan.name, plan.tail(cut), path, plan.manifest)

    async def _load_tail(self, link: str, tail: str) -> None:
        """Have the far end load the tail too; what it makes of that shows in its answers."""
        remote = self._ports.remotes().get(link)
        try:
            if remote is not None:
                await ask_to_load(remote.link, tail, TAIL_LOAD_S)
        except MidstreamError as err:
            _log.debug("%s is not loaded ahead: %s", tail, err)

    def _warmed(self, head: str, seconds: float) -> None:
        for runner in self._runners.values():
            runner.warmed(head, seconds)

    # -- bundles -----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Look for bundles whenever a link is there, on a refresh, and when an answer came from other weights."""
        await self._wake.wait()
        while True:
            self._wake.clear()
            complete = await self._sync()
            await self._keep_costs()
            pause_s = self._settings.refresh_s if complete else self._settings.retry_s
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
                await asyncio.sleep(min(1.0, self._settings.retry_s))
            except TimeoutError:
                continue

    async def _sync(self) -> bool:
        """One look at every model. False when one of them has no bundle yet."""
        complete = True
        for name in list(self._shown):
            remote = next(iter(self._ports.remotes().values()), None)
            if remote is None or not self._ports.may_fetch():
                return False
            try:
                await self._sync_model(name, remote)
                self._troubles.pop(name, None)
            except NotFound:
                complete = complete and name not in self._runners  # of models without a recipe few are cut
            except MidstreamError as err:
                complete = False
                if self._troubles.get(name) != str(err):  # once, not at every try
                    self._troubles[name] = str(err)
                    _log.info("the bundle of %s is not fetched: %s", name, err)
            except Exception as err:  # noqa: BLE001 - a fault of one model; the others go on
                complete = False
                if self._troubles.get(name) != repr(err):
                    self._troubles[name] = repr(err)
                    _log.exception("the bundle of %s is not fetched", name)
        return complete

    async def _sync_model(self, name: str, remote: Remote) -> None:
        manifest = await self._client.manifest(remote.link, name)
        if name not in self._shown:
            return  # removed meanwhile
        runner = self._runners.get(name)
        if runner is None and manifest.recipe is not None:
            return  # our own recipe could not be used
        if runner is not None and manifest == runner.plan.manifest:
            await self._fetch_heads(manifest, remote)
            return
        entry = self._ports.store.entry(name)
        if manifest.source_sha256 != entry.source_sha256:
            raise ProtocolError(f"the coordinator's {name} is another model than ours", field="source_sha256")
        if await self._use(manifest, runner.plan.recipe if runner is not None else None, remote):
            await asyncio.to_thread(self._keep, manifest)
            await self._fetch_heads(manifest, remote)

    async def _use(self, manifest: BundleManifest, found: Recipe | None, remote: Remote | None) -> bool:
        """Put a bundle to work. False when its whole model is not here and cannot be fetched now, or nobody wants it.

        remote: where it is fetched from; None at the first look at a model, which is not shown yet.
        """
        try:
            whole = await self._client.whole(remote.link if remote else None, manifest)
        except NotFound:
            return False
        plan, model = ModelPlan(manifest, found), manifest.model
        kept = await self._costs.read(model, manifest.digest)
        if remote is not None and model not in self._shown:
            return False  # removed meanwhile
        self._register(model, plan.whole, whole, manifest)
        if self._settings.preload:
            await self._heads.keep(plan.whole)
            if remote is not None and model not in self._shown:
                return False
        names = [plan.whole]
        for cut in manifest.cuts:
            path = self._head_path(manifest, cut)
            if path.is_file():
                self._register(model, plan.head(cut), path, manifest)
                names.append(plan.head(cut))
        self._install(plan, kept, names)
        return True

    async def _fetch_heads(self, manifest: BundleManifest, remote: Remote) -> None:
        for cut in manifest.cuts:
            path = await self._client.head(remote.link, manifest, cut)
            runner = self._runners.get(manifest.model)
            if runner is None or runner.plan.manifest != manifest:
                return  # removed meanwhile
            self._register(manifest.model, runner.plan.head(cut), path, manifest)

    async def _keep_costs(self, *, now: bool = False) -> None:
        for name, runner in list(self._runners.items()):
            manifest = runner.plan.manifest
            if manifest.cuts:
                await self._costs.keep(name, manifest.digest, runner.table, now=now)

    def _keep(self, manifest: BundleManifest) -> None:
        """Remember the manifest for a start without a link, and drop files of bundles before."""
        path = self._manifest_path(manifest.model)
        write_durable(path, encode(manifest))
        wanted = {f"{sha256[:16]}-{name}" for name, (sha256, _) in files_of(manifest).items()}
        for file in path.parent.glob(f"*.{manifest.format}"):
            if file.name not in wanted:
                file.unlink(missing_ok=True)

    def _manifest_path(self, model: str) -> Path:
        return self._ports.store.file_path(kept_as(model), "manifest.json")

    def _costs_path(self, model: str) -> Path:
        return self._ports.store.file_path(kept_as(model), "costs.json")

    def _head_path(self, manifest: BundleManifest, cut: CutEntry) -> Path:
        return self._ports.store.file_path(kept_as(manifest.model), f"{cut.head_sha256[:16]}-{cut.head_file}")

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"split {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _bare(entry: CatalogueEntry, shapes: Mapping[str, tuple[int, ...]]) -> BundleManifest:
    """A model without a bundle: the file as it came, no cuts, and no far end that has the same weights."""
    return BundleManifest(
        schema=BUNDLE_SCHEMA,
        model=entry.name,
        digest=entry.sha256,
        source_sha256=entry.sha256,
        recipe=entry.recipe,
        input_shapes=shapes,
        whole_file=entry.filename,
        whole_sha256=entry.sha256,
        whole_size_bytes=entry.size_bytes,
        whole_s=0.0,
        encoded_bytes=0,
        down_bytes=0,
        cuts=(),
        format="tflite" if entry.format == "tflite" else "onnx",
    )


def _status(runner: Runner) -> Mapping[str, Any]:
    ranking = runner.last.ranking if runner.last is not None else ()
    return {
        "arm": str(runner.held.arm),
        "reason": runner.held.reason,
        "digest": runner.plan.manifest.digest,
        "cuts": len(runner.plan.manifest.cuts),
        "ranking": [
            {"arm": str(e.arm), "ms": None if e.predicted_s == float("inf") else round(e.predicted_s * 1e3, 1),
             "excluded": e.excluded}
            for e in ranking[:8]
        ],
    }  # fmt: skip
