"""Exported tails on an independent inference server (KServe's, in an environment of its own), and a coordinator's
endpoint in front of it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from attrs import define, field

from cloud_stub.tails_export import export_repository
from engines.arrays import to_array
from engines.executor import BoundedExecutor
from engines.forward import ForwardingEndpoint
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool
from engines.port import TensorAnswer, TensorEndpoint
from engines.remote_oip import RemoteEndpoint, collecting
from links.http import HttpLink
from protocol.errors import BadRequest, MidstreamError, NotFound
from protocol.events import TransferSample
from protocol.models import BundleManifest, foreign_name
from protocol.tensors import Tensor
from split_models.bundle_files import read_bundle
from split_models.plan import ModelPlan
from split_models.recipes import recipe
from tests.conftest import ROOT, make_environment
from tests.tensor_house import CLS, bundle_root

PACKAGES = ("kserve==0.21.0", "onnxruntime>=1.20")
HERE = Path(__file__).parent
ENVIRONMENT = ROOT / ".setup" / "kserve"

pytestmark = pytest.mark.slow  # the first run installs the server


def foreign_python() -> Path:
    """An environment of the server's own; nothing of it is in ours."""
    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / ".installed"
    if not done.is_file() or done.read_text() != " ".join(PACKAGES):
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        make_environment(ENVIRONMENT)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=840)
        done.write_text(" ".join(PACKAGES))
    return python


@pytest.fixture(scope="module")
def bundle(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_root([CLS], model_file, tmp_path_factory.mktemp("bundles")) / CLS


@pytest.fixture
async def server(bundle: Path, tmp_path: Path, free_port: Callable[[], int]) -> AsyncIterator[HttpLink]:
    """A link to the running server."""
    export_repository([bundle], tmp_path / "repository", OnnxRuntime())
    port, log = free_port(), tmp_path / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [foreign_python(), HERE / "kserve_onnx.py", tmp_path / "repository", str(port)],
            stdout=stream, stderr=subprocess.STDOUT, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )  # fmt: skip
    samples: list[TransferSample] = []
    link = HttpLink("kserve", f"http://127.0.0.1:{port}", sink=collecting(samples.append), keep_idle_s=2.0)
    try:
        await ready(link, process, log)
        yield link
    finally:
        await link.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


async def ready(link: HttpLink, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if (await link.exchange("/v2/health/ready", {}, b"", 2.0, method="GET")).status == 200:
                return
        except MidstreamError:
            pass
        await asyncio.sleep(0.25)
    raise AssertionError(log.read_text()[-2000:])


def sent(manifest: BundleManifest, bundle: Path) -> dict[tuple[str, str], tuple[Tensor, ...]]:
    """What the head of each cut sends for the recipe's first calibration picture."""
    found = recipe(manifest.recipe or "")
    plan = ModelPlan(manifest, found)
    made = found.before(found.calibration()[0], plan.input_name, plan.input_shape)
    crossing = {}
    for cut in manifest.cuts:
        head = OnnxRuntime().load(bundle / cut.head_file, 1)
        crossing[cut.id, cut.codec] = tuple(head.run(made.inputs))
        head.close()
    return crossing


async def test_every_exported_tail_answers_our_client_as_here(bundle: Path, server: HttpLink) -> None:
    manifest = read_bundle(bundle)
    plan, remote = ModelPlan(manifest, None), RemoteEndpoint(server)
    assert len(manifest.cuts) >= 2
    for cut, inputs in zip(manifest.cuts, sent(manifest, bundle).values(), strict=True):
        tail = OnnxRuntime().load(bundle / cut.tail_file, 1)
        here = tail.run(inputs)
        there = (await remote.infer(plan.tail(cut), inputs, 20.0)).outputs
        tail.close()
        for mine, theirs in zip(here, there, strict=True):
            assert (mine.datatype, mine.shape) == (theirs.datatype, theirs.shape)
            assert abs(to_array(mine).astype("f8") - to_array(theirs).astype("f8")).max() < 1e-6
    with pytest.raises(NotFound):
        await remote.infer("nothing", inputs, 5.0)


@define
class Listening:
    """An endpoint that keeps the names it is asked for."""

    endpoint: TensorEndpoint
    asked: list[str] = field(factory=list)

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        self.asked.append(model)
        return await self.endpoint.infer(model, inputs, deadline_s)

    def wait_s(self) -> float:
        return self.endpoint.wait_s()


async def test_a_coordinator_forwards_and_runs_here_when_the_server_is_gone(bundle: Path, server: HttpLink) -> None:
    manifest = read_bundle(bundle)
    plan, cut = ModelPlan(manifest, recipe(manifest.recipe or "")), manifest.cuts[0]
    inputs = sent(manifest, bundle)[cut.id, cut.codec]
    executor, pool, remote = BoundedExecutor("tails", 1, 1.0), ModelPool(1 << 30), Listening(RemoteEndpoint(server))
    endpoint = ForwardingEndpoint(None, pool, executor, {"onnx": OnnxRuntime()}, server=remote)
    try:
        endpoint.register(plan.tail(cut), bundle / cut.tail_file, manifest.digest, "onnx")
        endpoint.register(CLS, bundle / manifest.whole_file, manifest.digest, "onnx")
        there = await endpoint.infer(plan.tail(cut), inputs, 20.0)
        assert remote.asked == [plan.tail(cut)] and there.digest == manifest.digest and there.compute_s > 0
        with pytest.raises(BadRequest):
            await endpoint.infer(CLS, inputs, 20.0)
        assert remote.asked[-1] == foreign_name(CLS, manifest.digest)
        await server.close()
        here = await endpoint.infer(plan.tail(cut), inputs, 20.0)
        assert abs(to_array(here.outputs[0]) - to_array(there.outputs[0])).max() < 1e-6
    finally:
        await endpoint.close()
        executor.close()
        pool.close()
