"""Bundles that come and go on a device: what is no longer used leaves memory, and one bad bundle ends no follower."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
from attrs import define, evolve

from engines.fakes_tensor import MAGIC, FakeTensorEndpoint, FakeTensorRuntime
from engines.store import ModelStore
from links.memory import MemoryLink
from links.port import Reply
from protocol.decode import encode
from protocol.models import BundleManifest, CatalogueEntry, Source, head_name, tail_name
from split_models.arm_cost import Arm
from split_models.device_way import DeviceWay
from split_models.settings import Remote, SplitPorts, SplitSettings
from tests.tensor_house import Engines, engines
from tests.unit.split_models.parts import cut, manifest

SOURCE = MAGIC + b"source"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class BundleLink(MemoryLink):
    """Serves one bundle of model `m`; files come when `go` is set."""

    def __init__(self) -> None:
        super().__init__("cloud", [])
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        self.manifest: BundleManifest | None = None

    def offer(self, version: str) -> BundleManifest:
        """A bundle with one cut, whose files are of this version."""
        whole, head, tail = (MAGIC + part + version.encode() for part in (b"", b"head", b"tail"))
        self.files = {"whole.onnx": whole, "head_003_int8.onnx": head, "tail_003_int8.onnx": tail}
        one = evolve(
            cut(), head_sha256=sha256(head), head_size_bytes=len(head), tail_sha256=sha256(tail),
            tail_size_bytes=len(tail),
        )  # fmt: skip
        self.manifest = evolve(
            manifest(one), digest=sha256(whole), source_sha256=sha256(SOURCE), whole_sha256=sha256(whole),
            whole_size_bytes=len(whole),
        )  # fmt: skip
        return self.manifest

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        self.asked.append(path)
        if path.endswith("manifest.json"):
            return Reply(404, {}, b"") if self.manifest is None else Reply(200, {}, encode(self.manifest))
        await self.go.wait()
        return Reply(200, {}, self.files[path.rpartition("/")[2]])


@define(eq=False)
class House:
    way: DeviceWay
    parts: Engines
    link: BundleLink
    store: ModelStore
    runtime: FakeTensorRuntime

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not done():
                await asyncio.sleep(0.01)

    async def fetched(self, offered: BundleManifest) -> None:
        """Wait until a bundle with its head is in use."""
        await self.way.refresh()
        await self.until(
            lambda: (
                self.head(offered) in self.parts.local.names()
                and self.way.runners["m"].plan.manifest == offered
                and self.parts.local.loaded(self.whole(offered))
            )
        )

    def head(self, offered: BundleManifest) -> str:
        return head_name("m", offered.digest, "003", "int8")

    def whole(self, offered: BundleManifest) -> str:
        return f"m-{offered.digest[:8]}"

    def follows(self) -> bool:
        return "split bundles" in {task.get_name() for task in asyncio.all_tasks()}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    entry = CatalogueEntry("m", "onnx", "m.onnx", sha256(SOURCE), len(SOURCE), Source("file"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "m.onnx").write_bytes(SOURCE)
    store, runtime, link = ModelStore(tmp_path, {"m": entry}), FakeTensorRuntime(), BundleLink()
    parts = engines(store, onnx=runtime)
    remotes = {"cloud": Remote(FakeTensorEndpoint(), link)}
    ports = SplitPorts(local=parts.local, store=store, compute=parts.compute, remotes=lambda: remotes)
    way = DeviceWay(SplitSettings(retry_s=0.02), ports)
    await way.mount.start()
    yield House(way, parts, link, store, runtime)
    link.go.set()
    await way.mount.stop()
    await link.close()
    await parts.close()


async def test_a_removed_model_leaves_nothing_in_memory(house: House) -> None:
    await house.fetched(house.link.offer("one"))
    await house.parts.local.preload("m")
    shutil.rmtree(house.store.root / "m")
    await house.way.refresh()
    await house.until(lambda: not house.parts.local.names())
    assert house.parts.pool.used_bytes == 0
    assert all(model.closed for model in house.runtime.loaded)


async def test_a_new_bundle_frees_what_the_one_before_held(house: House) -> None:
    before = house.link.offer("one")
    await house.fetched(before)
    after = house.link.offer("two")
    await house.fetched(after)
    await house.until(lambda: set(house.parts.local.names()) == {house.whole(after), house.head(after)})
    assert not house.parts.local.loaded(house.whole(before))
    assert house.parts.local.loaded(house.whole(after))


async def test_a_tail_is_fetched_when_a_cut_is_in_use_and_goes_with_its_bundle(house: House) -> None:
    """Nothing of it is fetched before: most cuts of a bundle are never used."""
    offered = house.link.offer("one")
    await house.fetched(offered)
    tail, wanted = tail_name("m", offered.digest, "003", "int8"), Arm("cut", "003", "int8", "cloud")
    assert tail not in house.parts.local.names()
    for _ in range(3):  # as every request does, until it is here
        house.way.want_rest(house.way.runners["m"].plan, wanted)
    await house.until(lambda: house.parts.local.loaded(tail))
    assert len([path for path in house.link.asked if "tail_003" in path]) == 1
    after = house.link.offer("two")
    await house.fetched(after)
    await house.until(lambda: tail not in house.parts.local.names())
    assert not house.parts.local.loaded(tail)


async def test_a_model_removed_while_its_bundle_comes_is_not_shown_again(house: House) -> None:
    house.link.go.clear()
    house.link.offer("one")
    await house.way.refresh()
    await house.until(lambda: any("files" in path for path in house.link.asked))
    shutil.rmtree(house.store.root / "m")
    await house.way.refresh()
    house.link.go.set()
    await asyncio.sleep(0.2)
    assert not house.way.runners
    assert not house.parts.local.names()
    assert house.follows()


async def test_a_fault_of_one_bundle_is_said_and_ends_no_follower(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = house.store.root / "m.bundle" / "stuck.onnx"
    stuck.mkdir(parents=True)  # which cannot be unlinked as the file of an old bundle
    await house.fetched(house.link.offer("one"))
    assert [record for record in caplog.records if "bundle of m" in record.getMessage() and record.exc_info]
    stuck.rmdir()
    await house.fetched(house.link.offer("two"))
    assert house.follows()
