"""A burst of requests that can wait, on a cut arm of a real model: the link's own lane works on their answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.arrays import to_array
from engines.executor import BoundedExecutor
from engines.laned import LanedEndpoint
from engines.remote_twin import RemoteTwin
from links.http import HttpLink
from protocol.errors import BadRequest, EngineError
from protocol.oip import InferRequest
from split_models.arm_cost import Arm
from split_models.arms import ArmAnswer, Arms, Work
from split_models.plan import ModelPlan
from split_models.recipes import recipe
from split_models.service import can_wait
from tests.tensor_house import CLS, bundle_root, cloud, engines, store_with

pytestmark = pytest.mark.timeout(180)  # the first test builds a bundle of the real model

REQUESTS = 60


async def test_a_burst_on_a_cut_arm_gives_the_same_answers_and_fills_no_queue(
    model_file: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = {CLS: model_file(CLS)}
    root = await asyncio.to_thread(bundle_root, [CLS], files.__getitem__, tmp_path_factory.mktemp("bundles"))
    store = store_with(tmp_path / "store", files)
    post = BoundedExecutor("post", 1, 0.02, niceness=10)
    async with cloud(root, store) as far:
        manifest = far.way.bundles[CLS]
        plan = ModelPlan(manifest, recipe(str(manifest.recipe)))
        cut = manifest.cuts[0]
        parts = engines(store)
        parts.local.register(plan.head(cut), root / CLS / cut.head_file, manifest.digest)
        await parts.local.preload(plan.head(cut))
        link = HttpLink("cloud", f"http://127.0.0.1:{far.proxy.port}")
        twin = RemoteTwin(link, bulk=LanedEndpoint("cloud", link.again, post))
        arms = Arms(parts.local, lambda name: twin, parts.compute, time.monotonic)
        pictures = list(recipe("ppocr-cls").calibration())
        arm = Arm("cut", cut.id, cut.codec, "cloud")

        async def ask(number: int, *, later: bool) -> ArmAnswer:
            work = Work(pictures[number % len(pictures)], (), can_wait=later)
            return await arms.run(arm, plan, work, 60.0)

        alone = [await ask(number, later=False) for number in range(len(pictures))]
        while twin.working() is None:
            await ask(0, later=False)
        burst = await asyncio.gather(*(ask(number, later=True) for number in range(REQUESTS)))
        for number, answer in enumerate(burst):
            wanted = alone[number % len(pictures)].outputs
            for found, reference in zip(answer.outputs, wanted, strict=True):
                np.testing.assert_allclose(to_array(found), to_array(reference), rtol=1e-5)
            assert answer.digest == manifest.digest
            assert answer.spent.after_s > 0
            assert answer.spent.server_s >= 0
        assert post.metrics().peak_waiting < 10
        assert any(thread.name == "cloud-lane" for thread in threading.enumerate())
        # A recipe that fails is this device's fault and not the link's.
        with pytest.raises(EngineError, match="upside down"):
            await arms.run(arm, ModelPlan(manifest, _Fails()), Work(pictures[0], (), can_wait=True), 5.0)
        await twin.close()
        await link.close()
        await parts.close()
    post.close()


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
