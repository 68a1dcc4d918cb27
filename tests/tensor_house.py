"""A device and a server of the tensor way on loopback, with real engines and real models, for route tests."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from attrs import define

from cloud_stub.bundles import BundleShelf
from engines.catalogue import shipped_catalogue
from engines.executor import BoundedExecutor
from engines.local import LocalEndpoint
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool
from engines.port import TensorRuntime
from engines.remote_oip import collecting
from engines.remote_twin import RemoteTwin, oldest
from engines.store import ModelStore
from engines.tflite import TfliteRuntime
from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.shaped import ShaperProxy
from netprobe.probe import LinkProbe
from netprobe.view import LinkView
from protocol.events import RecordingEmit, TensorDone
from protocol.models import BundleManifest, CatalogueEntry
from protocol.policy import SplitPolicy
from split_models.bundle import BundleLimits, build_bundle
from split_models.mount import DeviceWay, Remote, ServerWay, SplitPorts, SplitSettings, views_of

DET, CLS = "ppocr-v4-det", "ppocr-v2-cls"
_built: dict[str, Path] = {}


def bundle_root(names: Sequence[str], file_of: Callable[[str], Path], folder: Path) -> Path:
    """A root with the bundles of these models; built once per test run, since calibration takes seconds."""
    key = "+".join(sorted(names))
    if key not in _built:
        for name in names:
            limits = BundleLimits(max_cuts=2, threads=2)
            build_bundle(file_of(name), shipped_catalogue()[name], folder, limits=limits)
        _built[key] = folder
    return _built[key]


def store_with(root: Path, files: Mapping[str, Path], extra: Mapping[str, CatalogueEntry] | None = None) -> ModelStore:
    """A store of its own that holds links to the pulled files."""
    catalogue = {**shipped_catalogue(), **(extra or {})}
    for name, file in files.items():
        target = root / name / catalogue[name].filename
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copyfile(file, target)
    return ModelStore(root, catalogue)


@define(eq=False)
class Engines:
    """Local engines of one house."""

    pool: ModelPool
    executor: BoundedExecutor
    compute: BoundedExecutor
    local: LocalEndpoint

    async def close(self) -> None:
        await self.local.close()
        self.executor.close()
        self.compute.close()
        self.pool.close()


def engines(
    store: ModelStore,
    onnx: TensorRuntime | None = None,
    wait_target_s: float = 5.0,
    tflite: TensorRuntime | None = None,
) -> Engines:
    """onnx, tflite: stand-ins for the runtimes, for example slowed ones."""
    pool = ModelPool(2 << 30)
    executor = BoundedExecutor("models", 1, wait_target_s)
    compute = BoundedExecutor("recipes", 1, wait_target_s)
    runtimes: dict[str, TensorRuntime] = {"onnx": onnx or OnnxRuntime(), "tflite": tflite or TfliteRuntime()}
    return Engines(pool, executor, compute, LocalEndpoint(store, pool, executor, runtimes, threads=1))


@define(eq=False)
class Cloud:
    """A running server with bundles, and a shaper in front of it."""

    way: ServerWay
    server: RunningServer
    proxy: ShaperProxy
    events: RecordingEmit


@contextlib.asynccontextmanager
async def cloud(root: Path, store: ModelStore) -> AsyncIterator[Cloud]:
    """Serve the bundles below `root` and the models of `store`."""
    parts = engines(store)
    events = RecordingEmit()
    ports = SplitPorts(local=parts.local, store=store, compute=parts.compute, emit=events)
    way = ServerWay(SplitSettings(bundle_root=root), ports)
    await way.mount.start()
    server = await serve([*way.mount.routes, *BundleShelf(root).routes()], way.mount.frame_routes)
    proxy = ShaperProxy("127.0.0.1", server.port)
    await proxy.start()
    try:
        yield Cloud(way, server, proxy, events)
    finally:
        await proxy.close()
        await server.close()
        await way.mount.stop()
        await parts.close()


@define(eq=False)
class Device:
    """A running device with its loopback server."""

    way: DeviceWay
    server: RunningServer
    events: RecordingEmit
    probe: LinkProbe
    parts: Engines
    remotes: dict[str, Remote]
    policy: list[SplitPolicy]

    def done(self) -> list[TensorDone]:
        """Reports of finished requests, in order."""
        return [event for event in self.events.events if isinstance(event, TensorDone)]


@contextlib.asynccontextmanager
async def device(
    store: ModelStore,
    cloud_url: str | None = None,
    *,
    policy: SplitPolicy | None = None,
    onnx: TensorRuntime | None = None,
    views: Callable[[LinkProbe], Mapping[str, LinkView]] = views_of,
    wait_target_s: float = 5.0,
    tflite: TensorRuntime | None = None,
) -> AsyncIterator[Device]:
    """A device that knows the server at `cloud_url` as "cloud"."""
    parts = engines(store, onnx, wait_target_s, tflite)
    events, probe = RecordingEmit(), LinkProbe(time.monotonic)
    policies = [policy or SplitPolicy()]
    remotes: dict[str, Remote] = {}
    link = twin = None
    if cloud_url is not None:
        link = HttpLink("cloud", cloud_url, sink=collecting(probe.add))
        twin = RemoteTwin(link, sink=probe.add)
        probe.watch("cloud", oldest(link.under_way, twin.under_way))
        remotes["cloud"] = Remote(twin, link)
    ports = SplitPorts(
        local=parts.local,
        store=store,
        compute=parts.compute,
        policy=lambda: policies[0],
        links=lambda: views(probe),
        remotes=lambda: remotes,
        emit=events,
    )
    way = DeviceWay(SplitSettings(retry_s=0.05), ports)
    await way.mount.start()
    server = await serve(way.mount.routes, origin_check=True)
    try:
        yield Device(way, server, events, probe, parts, remotes, policies)
    finally:
        await server.close()
        await way.mount.stop()
        if link is not None and twin is not None:
            await twin.close()
            await link.close()
        await parts.close()


def manifest_of(way: DeviceWay, name: str) -> BundleManifest:
    """The manifest that a device uses now."""
    return way.runners[name].plan.manifest
