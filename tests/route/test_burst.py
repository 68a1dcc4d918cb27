"""A burst of requests that can wait, on a cut arm of a real model: the link's own lane works on their answers."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from engines.arrays import to_array, to_tensor
from engines.executor import BoundedExecutor
from engines.laned import LanedEndpoint
from engines.onnx import OnnxRuntime
from engines.remote_frames import FramesEndpoint
from engines.remote_twin import RemoteTwin
from links.http import HttpLink
from protocol.decode import encode
from protocol.errors import BadRequest, EngineError
from protocol.models import BatchFile, CutEntry
from protocol.oip import InferRequest
from protocol.tensors import Tensor
from split_models.arm_cost import Arm
from split_models.arms import ArmAnswer, Arms, Work
from split_models.batch_onnx import error_of, try_batch
from split_models.bundle_files import MANIFEST, read_bundle, verify_files
from split_models.plan import ModelPlan
from split_models.recipes import recipe
from split_models.service import can_wait
from tests.tensor_house import CLS, bundle_root, cloud, engines, store_with

pytestmark = pytest.mark.timeout(180)  # the first test builds a bundle of the real model

REQUESTS = 60
MAX_WAITING = 4


async def test_a_burst_on_a_cut_arm_gives_the_same_answers_and_fills_no_queue(
    model_file: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = {CLS: model_file(CLS)}
    root = await asyncio.to_thread(bundle_root, [CLS], files.__getitem__, tmp_path_factory.mktemp("bundles"))
    store = store_with(tmp_path / "store", files)
    post = BoundedExecutor("post", 1, 0.02, max_waiting=MAX_WAITING, niceness=10)
    async with cloud(root, store) as far:
        manifest = far.way.bundles[CLS]
        plan = ModelPlan(manifest, recipe(str(manifest.recipe)))
        cut = manifest.cuts[0]
        parts = engines(store)
        parts.local.register(plan.head(cut), root / CLS / cut.head_file, manifest.digest)
        await parts.local.preload(plan.head(cut))
        link = HttpLink("cloud", f"http://127.0.0.1:{far.proxy.port}")
        twin = RemoteTwin(link, bulk=LanedEndpoint("cloud", link.again, post))
        later = BoundedExecutor("later", 1, 60.0)
        arms = Arms(parts.local, lambda name: twin, parts.compute, time.monotonic, later)
        pictures = list(recipe("ppocr-cls").calibration())
        arm = Arm("cut", cut.id, cut.codec, "cloud")

        async def ask(number: int, *, later: bool) -> ArmAnswer:
            work = Work(pictures[number % len(pictures)], (), can_wait=later)
            return await arms.run(arm, plan, work, 60.0)

        alone = [await ask(number, later=False) for number in range(len(pictures))]
        while twin.working() is None:
            await ask(0, later=False)
        await ask(0, later=True)  # from here on the executors know how many may wait
        burst = await asyncio.gather(*(ask(number, later=True) for number in range(REQUESTS)))
        for number, answer in enumerate(burst):
            wanted = alone[number % len(pictures)].outputs
            for found, reference in zip(answer.outputs, wanted, strict=True):
                np.testing.assert_allclose(to_array(found), to_array(reference), rtol=1e-5)
            assert answer.digest == manifest.digest
            assert answer.spent.after_s > 0
            assert answer.spent.server_s >= 0
        assert post.metrics().peak_waiting <= MAX_WAITING + 1, "and what the reader holds itself"
        assert later.service_s is not None  # the burst's pictures were read there, out of everyone's way
        assert any(thread.name == "cloud-lane" for thread in threading.enumerate())
        # A recipe that fails is this device's fault and not the link's.
        with pytest.raises(EngineError, match="upside down"):
            await arms.run(arm, ModelPlan(manifest, _Fails()), Work(pictures[0], (), can_wait=True), 5.0)
        await twin.close()
        await link.close()
        await parts.close()
        later.close()
    post.close()


async def test_requests_that_wait_for_one_tail_run_together_on_the_server(
    model_file: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = {CLS: model_file(CLS)}
    built = await asyncio.to_thread(bundle_root, [CLS], files.__getitem__, tmp_path_factory.mktemp("bundles"))
    folder = tmp_path / "root" / CLS
    shutil.copytree(built / CLS, folder)
    cut, asked = with_batch(folder)
    store = store_with(tmp_path / "store", files)
    async with cloud(tmp_path / "root", store) as far:
        plan = ModelPlan(far.way.bundles[CLS], recipe("ppocr-cls"))
        link = HttpLink("cloud", f"http://127.0.0.1:{far.proxy.port}")
        endpoint = FramesEndpoint("cloud", link.open)
        alone = [await endpoint.infer(plan.tail(cut), inputs, 30.0) for inputs in asked]
        assert not far.way.batching.runs or set(far.way.batching.runs) == {1}
        await far.way.batching.preload(f"{plan.tail(cut)}~batch")
        for _ in range(20):  # a tail of a millisecond may be done before the next request has come
            together = await asyncio.gather(*(endpoint.infer(plan.tail(cut), inputs, 30.0) for inputs in asked))
            if max(far.way.batching.runs) > 1:
                break
        assert sum(requests * runs for requests, runs in far.way.batching.runs.items()) >= len(asked)
        assert max(far.way.batching.runs) > 1
        for found, reference in zip(together, alone, strict=True):
            assert found.digest == reference.digest
            for a, b in zip(found.outputs, reference.outputs, strict=True):
                assert error_of(a, b) <= 1e-5
        await endpoint.close()
        await link.close()


def with_batch(folder: Path) -> tuple[CutEntry, list[list[Tensor]]]:
    """The bundle with a batch form of its first tail, whether it gains anything here or not; inputs of that tail."""
    manifest = read_bundle(folder)
    cut, rng = manifest.cuts[0], np.random.default_rng(3)
    kinds = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}
    asked = [
        [to_tensor(name, rng.uniform(0, 9, shape).astype(kinds[kind])) for name, kind, shape in cut.crossing]
        for _ in range(16)
    ]
    form = try_batch((folder / cut.tail_file).read_bytes(), asked, OnnxRuntime(), least_gain_ratio=0.0)
    assert form is not None
    (folder / "tail.batch.onnx").write_bytes(form.data)
    batch = BatchFile("tail.batch.onnx", hashlib.sha256(form.data).hexdigest(), len(form.data), form.gain_ratio)
    cuts = (evolve(cut, batch=batch), *manifest.cuts[1:])
    (folder / MANIFEST).write_bytes(encode(evolve(manifest, cuts=cuts)))
    assert read_bundle(folder).cuts[0].batch == batch
    assert verify_files(folder, read_bundle(folder)) == []
    return cut, asked


class _Fails(type(recipe("ppocr-cls"))):  # type: ignore[misc]
    """The real recipe with an end that fails."""

    def after(self, outputs: object, context: object) -> object:
        raise EngineError("upside down")


@pytest.mark.parametrize(("priority", "waits"), [(None, False), (0, False), (1, False), (2, True), (9, True)])
def test_priorities_are_tritons(priority: int | None, waits: bool) -> None:
    parameters = {} if priority is None else {"priority": priority}
    assert can_wait(InferRequest("m", (), parameters=parameters)) is waits


@pytest.mark.parametrize("priority", [-1, "high", 1.5, True])
def test_what_is_no_priority_is_refused_by_its_name(priority: object) -> None:
    with pytest.raises(BadRequest) as refused:
        can_wait(InferRequest("m", (), parameters={"priority": priority}))
    assert refused.value.field == "parameters.priority"
