"""A cut whose tail is late over the link: the device goes on from what its head has computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from attrs import define, evolve

from engines.arrays import to_array
from engines.onnx import OnnxRuntime
from engines.port import TensorAnswer
from engines.slowed import SlowedRuntime
from protocol.errors import EngineError, LinkTimeout
from protocol.events import TensorDone
from protocol.models import CutEntry
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models.arm_cost import DEVICE_ARM, Arm
from split_models.arms import Arms, FarEndError, Work
from split_models.bundle_files import read_bundle
from split_models.images import drawn_text, encode
from split_models.measure import zeros
from split_models.plan import ModelPlan
from split_models.recipes import recipe
from tests.tensor_house import CLS, DET, Device, bundle_root, cloud, device, engines, store_with

pytestmark = pytest.mark.timeout(240)  # the first test builds the bundles

MAX_ERROR = 1e-5
POLICY = SplitPolicy(period_s=0.05, explore_one_in=4, raw_input_leaves=False, hedge_ratio=1.0)
SLOW = 80.0
"""The device takes about 0.1 s for the small model, so that a cut is worth it."""

Files = Callable[[str], Path]


class Silent:
    """A far end that never answers in time."""

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        raise LinkTimeout("late")

    def wait_s(self) -> float:
        return 0.0


@pytest.fixture
def root(model_file: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_root([DET, CLS], model_file, tmp_path_factory.mktemp("bundles"))


@pytest.mark.parametrize("name", [DET, CLS])
async def test_the_tail_here_gives_the_whole_models_answer(name: str, root: Path, tmp_path: Path) -> None:
    """Raw within 1e-5 of the whole; other forms exactly what the same tail answers elsewhere."""
    manifest = read_bundle(root / name)
    plan = ModelPlan(manifest, recipe(manifest.recipe or ""))
    parts = engines(store_with(tmp_path, {}))
    parts.local.register(plan.whole, root / name / manifest.whole_file, manifest.digest)
    seen = 0
    try:
        for cut in manifest.cuts:
            _register(parts.local.register, plan, cut, root / name)
            await parts.local.preload(plan.head(cut))
            await parts.local.preload(plan.tail(cut))
            arms = Arms(parts.local, lambda _: Silent(), parts.compute, time.monotonic)
            work = Work(None, tuple(_seeded(tensor) for tensor in map(zeros, _inputs(root / name / cut.head_file))))
            arm = Arm("cut", cut.id, cut.codec, "cloud")
            with pytest.raises(FarEndError):
                await arms.run(arm, plan, work, 30.0)
            assert work.crossed.is_set()
            rest = await arms.run(evolve(arm, link=None), plan, work, 30.0)
            whole = await arms.run(DEVICE_ARM, plan, work, 30.0)
            for ours, theirs in zip(rest.outputs, whole.outputs, strict=True):
                if cut.codec == "raw":
                    np.testing.assert_allclose(to_array(ours), to_array(theirs), atol=MAX_ERROR, rtol=MAX_ERROR)
                    seen += 1
                assert (ours.name, ours.datatype, ours.shape) == (theirs.name, theirs.datatype, theirs.shape)
            assert rest.digest == manifest.digest
    finally:
        await parts.close()
    assert seen, "the bundle has no raw cut"


async def test_a_tail_goes_on_only_from_its_own_head(root: Path, tmp_path: Path) -> None:
    manifest = read_bundle(root / CLS)
    plan = ModelPlan(manifest, None)
    parts = engines(store_with(tmp_path, {}))
    arms = Arms(parts.local, lambda _: None, parts.compute, time.monotonic)
    try:
        with pytest.raises(EngineError, match="has not run"):
            await arms.run(Arm("cut", manifest.cuts[0].id, manifest.cuts[0].codec), plan, Work(None, ()), 1.0)
    finally:
        await parts.close()


def _register(register: Callable[[str, Path, str], None], plan: ModelPlan, cut: CutEntry, folder: Path) -> None:
    register(plan.head(cut), folder / cut.head_file, plan.manifest.digest)
    register(plan.tail(cut), folder / cut.tail_file, plan.manifest.digest)


def _inputs(file: Path) -> Sequence[object]:
    model = OnnxRuntime().load(file, 1)
    try:
        return model.inputs
    finally:
        model.close()


def _seeded(tensor: Tensor) -> Tensor:
    values = np.random.default_rng(5).uniform(-1.0, 1.0, tensor.shape).astype(np.float32)
    return evolve(tensor, data=values.tobytes())


@define(eq=False)
class Scene:
    """A device on a cut of the classifier, whose tail is here as well, and the shaper before its server."""

    near: Device
    stall: Callable[[], None]
    page: bytes

    async def ask(self) -> TensorDone:
        runner = self.near.way.runners[CLS]
        await runner.infer(Work(encoded=self.page, tensors=()), "late", 20.0)
        return self.near.done()[-1]

    @property
    def tail(self) -> str:
        """Local name of the held cut's tail."""
        runner = self.near.way.runners[CLS]
        return runner.plan.tail(runner.plan.cut(runner.held.arm))

    async def on_a_cut(self) -> None:
        """Ask until requests take a cut whose tail is in memory here."""
        for _ in range(200):
            done = await self.ask()
            runner = self.near.way.runners[CLS]
            if done.arm.startswith("cut") and runner.held.arm.kind == "cut" and self.near.parts.local.loaded(self.tail):
                await asyncio.sleep(0.05)
                return
        raise AssertionError(f"never: {self.near.way.status()[CLS]}")


@pytest_asyncio.fixture
async def scene(root: Path, model_file: Files, tmp_path: Path) -> AsyncIterator[Scene]:
    files = {CLS: model_file(CLS)}
    async with cloud(root, store_with(tmp_path / "cloud", files)) as far:
        url = f"http://127.0.0.1:{far.proxy.port}"
        slowed = SlowedRuntime(OnnxRuntime(), SLOW, clock=time.thread_time)
        async with device(store_with(tmp_path / "device", files), url, policy=POLICY, onnx=slowed) as near:
            page = encode(drawn_text(["who is late?"], 300, 64, 22, dark_on_light=True))
            yield Scene(near, lambda: far.proxy.set_rate(1.0), page)


async def test_a_stalled_link_is_answered_from_where_the_head_left_off(scene: Scene) -> None:
    await scene.on_a_cut()
    scene.stall()
    runner = scene.near.way.runners[CLS]
    cut, whole_s = runner.held.arm, runner.table.seconds("device", "whole")
    quick = runner.table.seconds("device", f"tail:{cut.cut}:{cut.form}") < 0.9 * whole_s
    done = await scene.ask()
    # After the first layers the tail is as long as the whole, and then either may be taken.
    assert done.arm.endswith("@device") or not quick, done
    assert (done.status, done.hedged, done.winner) == ("ok", True, "device")
    assert done.up_bytes == done.down_bytes == 0
    assert 0 < runner.hedges.hedged_s < runner.hedges.device_only_s


async def test_without_its_tail_the_whole_model_answers(scene: Scene) -> None:
    await scene.on_a_cut()
    scene.near.parts.pool.drop(scene.tail)
    scene.stall()
    done = await scene.ask()
    assert (done.arm, done.status, done.winner) == ("device", "ok", "device")
