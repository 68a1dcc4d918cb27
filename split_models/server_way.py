"""The tensor way on a server: tails and whole models of the bundles, and every other tensor model of the store."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from engines.batching import BatchingEndpoint
from links.port import Mount
from protocol.errors import ConfigError, MidstreamError
from protocol.models import BatchFile, BundleManifest
from protocol.tensor_frames import TENSOR_FRAMES
from split_models.bundle_files import MANIFEST, read_bundle
from split_models.frames_front import FramesFront
from split_models.front import Front
from split_models.plan import ModelPlan
from split_models.recipes import Recipe, recipe
from split_models.service import PLATFORMS, Service, Shown
from split_models.settings import SplitPorts, SplitSettings

_log = logging.getLogger("midstream.split")


class ServerWay:
    """Serves what stands in `settings.bundle_root`; call `refresh` when a bundle was made."""

    def __init__(self, settings: SplitSettings, ports: SplitPorts) -> None:
        if settings.bundle_root is None:
            raise ConfigError("a server needs a folder for bundles", field="bundle_root")
        self._root = settings.bundle_root
        self._ports = ports
        self._shown: dict[str, Shown] = {}
        self._bundles: dict[str, BundleManifest] = {}
        self._registered: dict[str, list[str]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._one_load = asyncio.Lock()
        self._batched: dict[str, str] = {}
        self.batching = BatchingEndpoint(ports.local, lambda: self._batched, lambda: settings.batch, ports.clock)
        service = Service(
            self.batching, ports.compute, ports.clock, lambda: self._shown, side="server", emit=ports.emit
        )
        self.front = Front(service, settings.deadline_s, (TENSOR_FRAMES,))
        self.frames = FramesFront(service)
        self.mount = Mount(
            routes=self.front.routes, frame_routes=(self.frames.route,), start=self.start, stop=self.stop
        )

    async def start(self) -> None:
        """Serve what is there."""
        await self.refresh()

    async def stop(self) -> None:
        """Stop loading ahead; requests under way end by themselves."""
        for task in list(self._loads):
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)

    @property
    def bundles(self) -> dict[str, BundleManifest]:
        """By model."""
        return dict(self._bundles)

    async def refresh(self, model: str | None = None) -> None:
        """Read the bundles (or one) again, and the store."""
        for entry in await asyncio.to_thread(self._ports.store.list):
            if entry.path is not None and entry.entry.format in PLATFORMS and entry.entry.name not in self._shown:
                self._show_stored(entry.entry.name, entry.entry.format, entry.entry.recipe)
        for folder in await asyncio.to_thread(self._folders):
            if model is None or folder.name == model:
                await self._take(folder)

    def _folders(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return sorted(p for p in self._root.iterdir() if not p.name.startswith(".") and (p / MANIFEST).is_file())

    async def _take(self, folder: Path) -> None:
        try:
            manifest = await asyncio.to_thread(read_bundle, folder)
            found = recipe(manifest.recipe) if manifest.recipe is not None else None
        except MidstreamError as err:
            _log.warning("bundle %s is not served: %s", folder.name, err)
            return
        if self._bundles.get(manifest.model) == manifest:
            return
        self._register(folder, manifest, found)

    def _register(self, folder: Path, manifest: BundleManifest, found: Recipe | None) -> None:
        local = self._ports.local
        for name in self._registered.pop(manifest.model, []):
            self._shown.pop(name, None)
            self._batched.pop(name, None)
            local.unregister(name)
        plan, kind, names = ModelPlan(manifest, found), manifest.format, []
        if found is not None or manifest.model not in self._shown:  # without a recipe the store's file takes more sizes
            local.register(manifest.model, folder / manifest.whole_file, manifest.digest, kind)
            shape = (plan.input_name, plan.input_shape)
            self._shown[manifest.model] = Shown(manifest.model, PLATFORMS[kind], found, *shape)
            names += [manifest.model, *self._register_batch(manifest.model, folder, manifest, manifest.whole_batch)]
        if plan.whole != manifest.model:  # devices ask for the model as it was cut
            local.register(plan.whole, folder / manifest.whole_file, manifest.digest, kind)
            self._shown[plan.whole] = Shown(plan.whole, PLATFORMS[kind], listed=False)
            names.append(plan.whole)
        for cut in manifest.cuts:
            name = plan.tail(cut)
            local.register(name, folder / cut.tail_file, manifest.digest, kind)
            self._shown[name] = Shown(name, PLATFORMS[kind], listed=False)
            names += [name, *self._register_batch(name, folder, manifest, cut.batch)]
        self._registered[manifest.model] = names
        self._bundles[manifest.model] = manifest
        task = asyncio.create_task(self._load(manifest.model), name=f"preload {manifest.model}")
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    def _register_batch(
        self, name: str, folder: Path, manifest: BundleManifest, batch: BatchFile | None
    ) -> tuple[str, ...]:
        """The file in which requests of `name` run together; it is not shown, and loaded when requests first wait."""
        if batch is None:
            return ()
        together = f"{name}~batch"
        self._ports.local.register(together, folder / batch.file, manifest.digest, manifest.format)
        self._batched[name] = together
        return (together,)

    async def _load(self, name: str) -> None:
        try:
            async with self._one_load:  # requests that need another model find the loader free
                await self._ports.local.preload(name)
        except MidstreamError as err:
            _log.info("%s is not loaded ahead: %s", name, err)

    def _show_stored(self, name: str, kind: str, recipe_name: str | None) -> None:
        try:
            found = recipe(recipe_name) if recipe_name is not None else None
        except ConfigError:
            found = None
        self._shown[name] = Shown(name, PLATFORMS[kind], found)
