"""A TFLite model cut for real: head on a device, tail on a server over loopback, chosen by the planner as any other."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from attrs import evolve

from engines.arrays import to_array, to_tensor
from engines.catalogue import shipped_catalogue
from engines.remote_oip import RemoteEndpoint
from engines.slowed import SlowedRuntime
from engines.store import ModelStore
from engines.tflite import TfliteRuntime
from links.http import HttpLink
from protocol.errors import BadRequest
from protocol.models import BundleManifest, CatalogueEntry, Source
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models.arm_cost import Arm
from split_models.arms import Arms, Work
from split_models.bundle import BundleLimits, build_bundle
from tests.tensor_house import Cloud, Device, cloud, device, manifest_of, store_with
from tests.unit.split_models.test_tflite_cutting import free_batch

FACE, FREE = "face-short-range", "free-batch"
SLOW = 300.0
"""Of the device: the face model takes half a millisecond here, so it takes longer there than any round trip."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def files(
    model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[CatalogueEntry, Path]]:
    """The face model and a small one with a free first size, cut for three rows."""
    free = free_batch().save(tmp_path_factory.mktemp("free") / "free.tflite")
    data = free.read_bytes()
    entry = CatalogueEntry(
        FREE, "tflite", free.name, hashlib.sha256(data).hexdigest(), len(data), Source("file"),
        input_shapes={"x": (3, 4)},
    )  # fmt: skip
    return {FACE: (shipped_catalogue()[FACE], model_file(FACE)), FREE: (entry, free)}


@pytest.fixture(scope="module")
def bundles(files: dict[str, tuple[CatalogueEntry, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundles")
    for entry, file in files.values():
        build_bundle(file, entry, root, limits=BundleLimits(max_cuts=6, threads=1))
    return root


def stored(root: Path, files: dict[str, tuple[CatalogueEntry, Path]]) -> ModelStore:
    return store_with(
        root, {name: file for name, (_, file) in files.items()}, {name: entry for name, (entry, _) in files.items()}
    )


@pytest_asyncio.fixture
async def far(bundles: Path, files: dict[str, tuple[CatalogueEntry, Path]], tmp_path: Path) -> AsyncIterator[Cloud]:
    async with cloud(bundles, stored(tmp_path / "far", files)) as running:
        yield running


@pytest_asyncio.fixture
async def near(far: Cloud, files: dict[str, tuple[CatalogueEntry, Path]], tmp_path: Path) -> AsyncIterator[Device]:
    store = stored(tmp_path / "near", files)
    policy = SplitPolicy(period_s=0.05, explore_one_in=4)
    slowed = SlowedRuntime(TfliteRuntime(), SLOW, clock=time.thread_time)
    async with device(store, f"http://127.0.0.1:{far.proxy.port}", policy=policy, tflite=slowed) as running:
        for _ in range(200):
            if {FACE, FREE} <= running.way.runners.keys():
                break
            await asyncio.sleep(0.05)
        yield running


def picture() -> Tensor:
    return to_tensor("input", np.random.default_rng(4).uniform(-1, 1, (1, 128, 128, 3)).astype(np.float32))


def whole_answer(file: Path, tensor: Tensor) -> dict[str, np.ndarray]:
    model = TfliteRuntime().load(file, 1)
    try:
        return {t.name: to_array(t) for t in model.run([tensor])}
    finally:
        model.close()


async def test_every_offered_cut_runs_on_both_sides(
    near: Device, files: dict[str, tuple[CatalogueEntry, Path]]
) -> None:
    plan, manifest = near.way.runners[FACE].plan, manifest_of(near.way, FACE)
    wanted = whole_answer(files[FACE][1], picture())
    arms = Arms(near.parts.local, lambda name: near.remotes[name].endpoint, near.parts.compute, time.monotonic)
    await heads_here(near, manifest)
    assert manifest.format == "tflite"
    assert {cut.codec for cut in manifest.cuts} == {"raw", "fp16", "int8"}
    for cut in manifest.cuts:
        await near.parts.local.preload(plan.head(cut))
        answer = await arms.run(Arm("cut", cut.id, cut.codec, "cloud"), plan, Work(None, (picture(),)), 30.0)
        assert answer.digest == manifest.digest
        for tensor in answer.outputs:
            distance = np.linalg.norm(to_array(tensor) - wanted[tensor.name]) / np.linalg.norm(wanted[tensor.name])
            assert distance <= (0.0 if cut.codec == "raw" else 0.02), (cut.id, cut.codec, tensor.name)


async def heads_here(near: Device, manifest: BundleManifest) -> None:
    names = {near.way.runners[FACE].plan.head(cut) for cut in manifest.cuts}
    for _ in range(200):
        if names <= set(near.parts.local.names()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the heads did not arrive")


@pytest.mark.parametrize(("leaves", "kind"), [(True, "cloud"), (False, "cut:")])
async def test_a_slow_device_sends_its_tensors_or_those_of_a_cut_away(
    near: Device, files: dict[str, tuple[CatalogueEntry, Path]], leaves: bool, kind: str
) -> None:
    """Raw tensors as they came are the cut before the first layer: the policy says whether they may leave."""
    near.policy[0] = evolve(near.policy[0], raw_input_leaves=leaves)
    link = HttpLink("user", f"http://127.0.0.1:{near.server.port}")
    user, wanted = RemoteEndpoint(link), whole_answer(files[FACE][1], picture())
    try:
        for _ in range(60):
            answer = await user.infer(FACE, [picture()], 30.0)
            if near.done()[-1].arm.startswith(kind):
                break
            await asyncio.sleep(0.05)
        assert near.done()[-1].arm.startswith(kind), [done.arm for done in near.done()]
        got = {tensor.name: to_array(tensor) for tensor in answer.outputs}
        assert got.keys() == wanted.keys()
        assert all(np.abs(got[k] - wanted[k]).max() <= 0.05 * np.abs(wanted[k]).max() for k in wanted)
    finally:
        await link.close()


async def test_other_sizes_than_those_of_the_cuts_go_to_the_file_as_it_came(near: Device) -> None:
    link = HttpLink("user", f"http://127.0.0.1:{near.server.port}")
    user = RemoteEndpoint(link)
    try:
        for rows in (3, 2, 5, 3):
            x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
            answer = await user.infer(FREE, [to_tensor("x", x)], 30.0)
            assert np.array_equal(to_array(answer.outputs[0]), x)
        with pytest.raises(BadRequest):
            await user.infer(FREE, [to_tensor("x", np.zeros((3, 5), np.float32))], 30.0)
    finally:
        await link.close()
    assert manifest_of(near.way, FREE).input_shapes == {"x": (3, 4)}


async def test_a_bundle_that_was_fetched_before_is_used_without_a_link(
    near: Device, files: dict[str, tuple[CatalogueEntry, Path]], tmp_path: Path
) -> None:
    await heads_here(near, manifest_of(near.way, FACE))
    async with device(stored(tmp_path / "near", files), policy=near.policy[0]) as again:
        assert manifest_of(again.way, FACE) == manifest_of(near.way, FACE)
        assert near.way.runners[FACE].plan.whole in again.parts.local.names()
