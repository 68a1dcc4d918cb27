"""The cloud's side of tensors: whole models and tails behind the OIP front, bundles cut in the background."""

from __future__ import annotations

from collections.abc import Callable

from cloud_stub.bundles import BundleShelf
from cloud_stub.config import CoordinatorConfig
from cloud_stub.cutting import CutJob, Cutter
from engines.store import ModelStore
from links.port import Mount
from protocol.events import Emit


class TailHouse:
    """Holds the pool, the executor and the mount of the tensor way."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: ModelStore,
        wanted: Callable[[str], bool],
        emit: Emit,
        on_bundle: Callable[[str], None],
    ) -> None:
        self._config = config
        self._store = store
        self._wanted = wanted
        self._emit = emit
        self._on_bundle = on_bundle
        self.bundles_dir = config.state_dir / "bundles"
        self.cutter = Cutter(self.bundles_dir, self._jobs(), self._ready, config.tensor_threads)
        self.shelf = BundleShelf(self.bundles_dir, lambda: dict(self.cutter.state))
        self.mount = Mount((), (), self._nothing, self._nothing)

    async def _nothing(self) -> None:
        return None

    async def prepare(self) -> None:
        await self.cutter.run()

    async def close(self) -> None:
        return None

    def _ready(self, model: str) -> None:
        self._on_bundle(model)

    def _jobs(self) -> list[CutJob]:
        if not self._config.cut:
            return []
        found = []
        for stored in self._store.list():
            entry = stored.entry
            named = entry.name in self._config.bundles if self._config.bundles else self._wanted(entry.name)
            if stored.path is not None and named and entry.recipe and entry.format == "onnx":
                found.append(CutJob(entry, stored.path))
        return found
