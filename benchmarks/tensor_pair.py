"""A server of tails in a process of its own, and a device that knows it through a shaper: for live benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from attrs import define

from cloud_stub.bundles import BundleShelf
from engines.executor import BoundedExecutor
from engines.local import LocalEndpoint
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool
from engines.port import TensorRuntime
from engines.remote_oip import RemoteEndpoint, collecting
from engines.slowed import SlowedRuntime
from engines.store import ModelStore
from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.shaped import ShaperProxy
from netprobe.probe import LinkProbe
from protocol.events import RecordingEmit
from protocol.models import BundleManifest
from protocol.policy import SplitPolicy
from split_models.mount import DeviceWay, Remote, ServerWay, SplitPorts, SplitSettings, views_of

POOL_BYTES = 2 << 30
WAIT_TARGET_S = 5.0
START_S = 60.0


@define(eq=False)
class Device:
    """A device with its loopback server, and the shaper between it and the tails."""

    way: DeviceWay
    server: RunningServer
    local: LocalEndpoint
    shaper: ShaperProxy
    probe: LinkProbe
    events: RecordingEmit

    def manifest(self, model: str) -> BundleManifest:
        """The bundle that requests of `model` use now."""
        return self.way.runners[model].plan.manifest

    async def until_cut(self, model: str) -> None:
        """Return when the cuts of `model` are known and their heads are here."""
        async with asyncio.timeout(START_S):
            while not self._has_heads(model):
                await asyncio.sleep(0.05)

    def _has_heads(self, model: str) -> bool:
        runner = self.way.runners.get(model)
        if runner is None or not runner.plan.manifest.cuts:
            return False
        here = set(self.local.names())
        return all(runner.plan.head(cut) in here for cut in runner.plan.manifest.cuts)


@contextlib.asynccontextmanager
async def tails(root: Path) -> AsyncIterator[int]:
    """The bundles below `root`, served by another process on loopback; gives its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.tensor_pair", str(root), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the server of tails did not start")
        yield int(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


@contextlib.asynccontextmanager
async def device(
    store: ModelStore, port: int, policy: SplitPolicy, *, watts: float = 0.0, slowdown: float = 1.0
) -> AsyncIterator[Device]:
    """A device behind a shaper in front of 127.0.0.1:`port`, slowed by `slowdown` (1: as it is)."""
    shaper = ShaperProxy("127.0.0.1", port)
    await shaper.start()
    executor, compute = BoundedExecutor("models", 1, WAIT_TARGET_S), BoundedExecutor("recipes", 1, WAIT_TARGET_S)
    onnx: TensorRuntime = OnnxRuntime() if slowdown == 1.0 else SlowedRuntime(OnnxRuntime(), slowdown)
    pool = ModelPool(POOL_BYTES)
    local = LocalEndpoint(store, pool, executor, {"onnx": onnx})
    probe, events = LinkProbe(time.monotonic), RecordingEmit(100_000)
    link = HttpLink("cloud", f"http://127.0.0.1:{shaper.port}", sink=collecting(probe.add))
    probe.watch("cloud", link.under_way)
    remotes = {"cloud": Remote(RemoteEndpoint(link), link)}
    ports = SplitPorts(
        local=local,
        store=store,
        compute=compute,
        policy=lambda: policy,
        links=lambda: views_of(probe),
        remotes=lambda: remotes,
        emit=events,
    )
    way = DeviceWay(SplitSettings(watts=watts, retry_s=0.1), ports)
    await way.mount.start()
    server = await serve(way.mount.routes, origin_check=True)
    try:
        yield Device(way, server, local, shaper, probe, events)
    finally:
        await server.close()
        await way.mount.stop()
        await link.close()
        await shaper.close()
        await local.close()
        executor.close()
        compute.close()
        pool.close()


async def _serve(root: Path) -> None:
    executor, compute = BoundedExecutor("tails", 1, WAIT_TARGET_S), BoundedExecutor("recipes", 1, WAIT_TARGET_S)
    pool = ModelPool(POOL_BYTES)
    store = ModelStore(root / ".store", {})
    local = LocalEndpoint(store, pool, executor, {"onnx": OnnxRuntime()})
    way = ServerWay(SplitSettings(bundle_root=root), SplitPorts(local=local, store=store, compute=compute))
    await way.mount.start()
    server = await serve([*way.mount.routes, *BundleShelf(root).routes()])
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print(server.port, flush=True)
    await ended.wait()
    await server.close()
    await way.mount.stop()
    await local.close()
    executor.close()
    compute.close()
    pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    asyncio.run(_serve(parser.parse_args().root))
