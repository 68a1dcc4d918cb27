"""The cloud's side of tensors: whole models and tails behind the OIP front, bundles cut in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloud_stub.bundles import BundleShelf
from cloud_stub.config import CoordinatorConfig
from cloud_stub.cutting import CutJob, Cutter, usable_samples
from engines.batching import BatchSettings
from engines.executor import BoundedExecutor
from engines.forward import ForwardingEndpoint
from engines.local import LocalEndpoint
from engines.pool import ModelPool
from engines.port import TensorRuntime
from engines.registry import engine_class, installed_engines
from engines.remote_oip import RemoteEndpoint
from engines.store import ModelStore, Stored
from links.port import Link, Mount
from profiles.facts import model_budget_bytes, usable_cores
from protocol.events import Emit
from protocol.models import CatalogueEntry
from split_models.backend import CUTTABLE
from split_models.mount import ServerWay, SplitPorts, SplitSettings

log = logging.getLogger("midstream.coordinator.tails")

WAIT_TARGET_S = 1.0
"""A device has other arms: it is told to use them rather than to wait for longer than this."""

SAMPLE_PREFIX = "sample-"

LEAST_BUDGET_BYTES = 512 << 20


class ServedStore(ModelStore):
    """The store as this coordinator shows it: models that are not wanted are not listed."""

    def __init__(self, root: Path, catalogue: dict[str, CatalogueEntry], wanted: Callable[[str], bool]) -> None:
        super().__init__(root, catalogue)
        self._wanted = wanted

    def list(self) -> tuple[Stored, ...]:
        """Wanted models with where they are, by name."""
        return tuple(stored for stored in super().list() if self._wanted(stored.entry.name))

    def samples(self) -> tuple[Path, ...]:
        """Files of pulled samples, wanted or not: nobody is served them, bundles are calibrated with them."""
        found = (s.path for s in super().list() if s.entry.name.startswith(SAMPLE_PREFIX))
        return tuple(path for path in found if path is not None)


class TailHouse:
    """Holds the pool, the executors and the mount of the tensor way.

    on_bundle: told of each model whose bundle is served from now on. server: a foreign inference server that bundles'
    tails and whole models are asked of first; they run here while it cannot.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        store: ServedStore,
        emit: Emit,
        on_bundle: Callable[[str], None],
        server: Link | None = None,
    ) -> None:
        threads = config.tensor_threads or 1
        cores = usable_cores()
        self._runs = BoundedExecutor(
            "tails", max(1, cores // threads), WAIT_TARGET_S, emit=emit, threads_per_run=threads
        )
        self._images = BoundedExecutor("images", max(1, cores // 2), WAIT_TARGET_S, emit=emit)
        self._server = server
        self._local = _endpoint(store, self._runs, threads, server)
        self._on_bundle = on_bundle
        bundles_dir = config.state_dir / "bundles"
        ports = SplitPorts(local=self._local, store=store, compute=self._images, emit=emit)
        # A server that runs the tails makes batches of its own.
        rows = config.tensor_batch_rows if server is None else 1
        batch = BatchSettings(rows, config.tensor_batch_wait_ms / 1000)
        self._way = ServerWay(SplitSettings(bundle_root=bundles_dir, batch=batch), ports)
        samples = usable_samples(store.samples())
        self.cutter = Cutter(bundles_dir, cut_jobs(config, store), self._ready, config.tensor_threads, samples)
        self.shelf = BundleShelf(bundles_dir, lambda: dict(self.cutter.state))

    @property
    def mount(self) -> Mount:
        return self._way.mount

    async def prepare(self) -> None:
        """Cut what is to be cut; every finished bundle is served at once."""
        await self.cutter.run()

    async def close(self) -> None:
        """After the mount was stopped."""
        await self._local.close()
        await asyncio.to_thread(self._runs.close)
        await asyncio.to_thread(self._images.close)
        if self._server is not None:
            await self._server.close()

    async def _ready(self, model: str) -> None:
        await self._way.refresh(model)
        self._on_bundle(model)


def _endpoint(store: ModelStore, runs: BoundedExecutor, threads: int, server: Link | None) -> LocalEndpoint:
    pool = ModelPool(model_budget_bytes(LEAST_BUDGET_BYTES))
    if server is None:
        return LocalEndpoint(store, pool, runs, _runtimes(), threads=threads)
    return ForwardingEndpoint(store, pool, runs, _runtimes(), threads=threads, server=RemoteEndpoint(server))


def cut_jobs(config: CoordinatorConfig, store: ModelStore) -> list[CutJob]:
    """Pulled models that are named in `bundles`; where that names none, those with a recipe."""
    if not config.cut:
        return []
    found = []
    for stored in store.list():
        entry = stored.entry
        wanted = entry.name in config.bundles if config.bundles else entry.recipe is not None
        if stored.path is not None and wanted and entry.format in CUTTABLE:
            found.append(CutJob(entry, stored.path))
    return found


def _runtimes() -> dict[str, TensorRuntime]:
    """Runtimes of the installed engines, by format; none of their libraries is loaded yet."""
    installed = installed_engines()
    found: dict[str, Any] = {name: engine_class(name)() for name in ("onnx", "tflite") if name in installed}
    return found
