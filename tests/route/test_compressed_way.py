"""Compressed activations between a real device and a real server, by both of our ways, and none to a server without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from attrs import frozen

from engines.port import TensorEndpoint
from engines.remote_oip import RemoteEndpoint
from links.http import HttpLink
from protocol.policy import SplitPolicy
from split_models.arm_cost import Arm
from split_models.arms import Arms, Work, compressing
from split_models.images import drawn_text, encode
from split_models.plan import ModelPlan
from tests.tensor_house import CLS, DET, Cloud, Device, bundle_root, cloud, device, store_with

LINE = encode(drawn_text(["compressed or not?"], 300, 64, 22, dark_on_light=True))

pytestmark = pytest.mark.timeout(240)  # the first test builds the bundles


@pytest_asyncio.fixture
async def far(
    model_file: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cloud]:
    root = bundle_root([DET, CLS], model_file, tmp_path_factory.mktemp("bundles"))
    async with cloud(root, store_with(tmp_path / "far", {CLS: model_file(CLS)})) as running:
        yield running


@pytest_asyncio.fixture(params=["http", "default"])
async def near(
    request: pytest.FixtureRequest, far: Cloud, model_file: Callable[[str], Path], tmp_path: Path
) -> AsyncIterator[Near]:
    store = store_with(tmp_path / "near", {CLS: model_file(CLS)})
    url = f"http://127.0.0.1:{far.proxy.port}"
    async with device(store, url, policy=SplitPolicy(raw_input_leaves=False, explore_one_in=0)) as running:
        plan = await fetched(running)
        link = HttpLink("cloud", url)
        endpoint = RemoteEndpoint(link) if request.param == "http" else running.remotes["cloud"].endpoint
        yield Near(running, plan, endpoint)
        await link.close()


@frozen
class Near:
    """A device that has its heads, and an endpoint of the server, by HTTP alone or whichever way is the default."""

    device: Device
    plan: ModelPlan
    endpoint: TensorEndpoint

    async def answer(self, codec: str) -> tuple[list[bytes], int]:
        """The answer by the first cut with that form, and the bytes that went up."""
        cut = next(cut for cut in self.plan.manifest.cuts if codec.startswith(cut.codec))
        parts = self.device.parts
        await parts.local.preload(self.plan.head(cut))
        arms = Arms(parts.local, lambda _: self.endpoint, parts.compute, time.monotonic)
        done = await arms.run(Arm("cut", cut.id, codec, "cloud"), self.plan, Work(LINE, ()), 30.0)
        return [bytes(tensor.data) for tensor in done.outputs], done.spent.up_bytes

    async def met(self) -> None:
        """Ask until the server has said what it takes."""
        for _ in range(50):
            await self.answer("int8")
            if compressing(self.endpoint) is not None:
                return
        raise AssertionError("the server never said that it takes zstd")


async def fetched(running: Device) -> ModelPlan:
    for _ in range(400):
        runner = running.way.runners.get(CLS)
        plan = runner.plan if runner is not None else None
        heads = {plan.head(cut) for cut in plan.manifest.cuts} if plan is not None else set()
        if plan is not None and heads and heads <= set(running.parts.local.names()):
            return plan
        await asyncio.sleep(0.05)
    raise AssertionError("the heads did not arrive")


async def test_the_compressed_form_gives_the_same_answer_in_fewer_bytes(near: Near) -> None:
    plain, plain_bytes = await near.answer("int8")
    await near.met()
    packed, packed_bytes = await near.answer("int8+zstd")
    assert packed == plain
    assert packed_bytes < 0.9 * plain_bytes


async def test_nothing_is_compressed_before_the_server_has_said_that_it_takes_it(near: Near) -> None:
    _, plain_bytes = await near.answer("int8+zstd")
    await near.met()
    _, packed_bytes = await near.answer("int8+zstd")
    assert packed_bytes < 0.9 * plain_bytes
