"""Bundles: built from a real model, whole or absent on disk, fetched in ranges, never trusted blindly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.verify import verify_offered
from cloud_stub.bundles import BundleShelf
from engines.catalogue import shipped_catalogue
from engines.onnx import OnnxRuntime
from engines.store import ModelStore
from links.memory import MemoryLink
from links.port import Reply, Request, Response, Route
from protocol.decode import encode
from protocol.errors import ConfigError, EngineError, LinkError, MidstreamError, NotFound, ProtocolError
from protocol.models import BundleManifest
from split_models.bundle import BundleLimits, Progress, build_bundle
from split_models.bundle_client import BundleClient, kept_as
from split_models.bundle_files import (
    MANIFEST,
    BundleFolder,
    files_of,
    parse_manifest,
    read_bundle,
    sweep,
    usable_bundle,
    verify_files,
)
from split_models.cuts import Cut
from split_models.graph import GraphTensor
from split_models.measure import head_probes, time_calls
from split_models.offer import offers

CLS = "ppocr-v2-cls"


@pytest.fixture(scope="module")
def built(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the bundle of the text-direction model."""
    root = tmp_path_factory.mktemp("bundles")
    build_bundle(model_file(CLS), shipped_catalogue()[CLS], root, limits=BundleLimits(max_cuts=2, threads=1))
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(built, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_bundle_is_complete_and_honest(built: Path) -> None:
    manifest = read_bundle(built / CLS)
    assert manifest.single_cuts >= 40
    assert {cut.codec for cut in manifest.cuts} == {"raw", "fp16", "int8"}
    assert not verify_files(built / CLS, manifest)
    assert all(cut.tail_s > 0 and cut.wire_bytes > 0 and cut.down_bytes > 0 for cut in manifest.cuts)
    assert manifest.cloud_s >= manifest.whole_s > 0
    raw = {cut.id: cut.wire_bytes for cut in manifest.cuts if cut.codec == "raw"}
    assert all(raw[cut.id] == 4 * cut.wire_bytes for cut in manifest.cuts if cut.codec == "int8")
    assert all(raw[cut.id] == 2 * cut.wire_bytes for cut in manifest.cuts if cut.codec == "fp16")
    assert all(0 < cut.zstd_bytes < cut.wire_bytes and cut.zstd_s > 0 for cut in manifest.cuts if cut.codec == "int8")
    assert all(0 < cut.head_s < manifest.whole_s * 2 for cut in manifest.cuts)
    assert {path.name for path in (built / CLS).iterdir()} == {MANIFEST, *files_of(manifest)}


def test_building_again_changes_nothing(built: Path, model_file: Callable[[str], Path]) -> None:
    before = read_bundle(built / CLS)
    steps: list[Progress] = []
    again = build_bundle(model_file(CLS), shipped_catalogue()[CLS], built, progress=steps.append)
    assert again == before
    assert steps == []


def test_another_entry_makes_another_bundle(built: Path, model_file: Callable[[str], Path]) -> None:
    entry = shipped_catalogue()[CLS]
    manifest = read_bundle(built / CLS)
    assert usable_bundle(built / CLS, entry, manifest.source_sha256) == manifest
    assert usable_bundle(built / CLS, entry, "0" * 64) is None
    assert usable_bundle(built / CLS, evolve(entry, input_shapes={"x": (1, 3, 48, 96)}), manifest.source_sha256) is None
    assert usable_bundle(built / CLS, evolve(entry, recipe="ppocr-det"), manifest.source_sha256) is None


def test_progress_never_passes_its_total(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    steps: list[Progress] = []
    limits = BundleLimits(max_cuts=1, threads=1)
    build_bundle(model_file(CLS), shipped_catalogue()[CLS], tmp_path, limits=limits, progress=steps.append)
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert all(0 <= step.done <= step.total for step in steps)
    assert steps[0].what == "prepare"


def test_no_time_means_no_cuts_and_still_a_bundle(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    limits = BundleLimits(seconds=0.0, threads=1)
    manifest = build_bundle(model_file(CLS), shipped_catalogue()[CLS], tmp_path, limits=limits)
    assert manifest.cuts == ()
    assert read_bundle(tmp_path / CLS) == manifest


def test_where_nobody_joins_requests_no_form_for_them_is_made(
    model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    limits = BundleLimits(max_cuts=1, threads=1, batches=False)
    manifest = build_bundle(model_file(CLS), shipped_catalogue()[CLS], tmp_path, limits=limits)
    assert manifest.cuts
    assert [manifest.whole_batch, *(entry.batch for entry in manifest.cuts)] == [None] * (1 + len(manifest.cuts))
    assert not list((tmp_path / CLS).glob("*.batch.*"))


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_a_file_that_is_no_model_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.onnx"
    file.write_bytes(content)
    with pytest.raises(EngineError):
        build_bundle(file, shipped_catalogue()[CLS], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_input_shapes_that_the_model_cannot_run_leave_nothing(
    model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    entry = evolve(shipped_catalogue()[CLS], input_shapes={"x": (1, 4, 48, 192)})
    with pytest.raises(MidstreamError):
        build_bundle(model_file(CLS), entry, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_is_never_cut_says_so(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as raised:
        build_bundle(model_file(CLS), evolve(shipped_catalogue()[CLS], format="gguf"), tmp_path)
    assert raised.value.field == "format"


def test_a_model_without_a_recipe_is_judged_by_its_outputs(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    entry = evolve(shipped_catalogue()[CLS], recipe=None)
    manifest = build_bundle(model_file(CLS), entry, tmp_path, limits=BundleLimits(max_cuts=1, threads=1))
    assert manifest.recipe is None
    assert manifest.encoded_bytes == 4 * 3 * 48 * 192
    assert {cut.codec for cut in manifest.cuts} >= {"raw", "fp16"}
    for one in verify_offered(tmp_path / CLS):
        assert one.error_ratio <= 0.01
    assert all(cut.answer_scale == 0 for cut in manifest.cuts)


def test_a_free_size_that_nobody_fixed_is_named(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    entry = evolve(shipped_catalogue()[CLS], recipe=None, input_shapes={})
    with pytest.raises(ConfigError) as raised:
        build_bundle(model_file(CLS), entry, tmp_path)
    assert raised.value.field == "input_shapes"
    assert "'x'" in str(raised.value)


# -- on disk ---------------------------------------------------------------------------------------------------------


def test_a_crash_while_building_leaves_the_old_bundle(root: Path) -> None:
    before = read_bundle(root / CLS)
    folder = BundleFolder(root, CLS)
    folder.write("half.onnx", b"x")
    assert read_bundle(root / CLS) == before
    sweep(root, CLS)
    assert [path.name for path in root.iterdir()] == [CLS]


def test_a_crash_between_the_renames_brings_the_old_bundle_back(root: Path) -> None:
    before = read_bundle(root / CLS)
    (root / CLS).rename(root / f".{CLS}.previous")
    sweep(root, CLS)
    assert read_bundle(root / CLS) == before


def test_publishing_replaces_as_a_whole(root: Path) -> None:
    manifest = read_bundle(root / CLS)
    folder = BundleFolder(root, CLS)
    for name in files_of(manifest):
        folder.write(name, (root / CLS / name).read_bytes())
    folder.publish(evolve(manifest, whole_s=9.0))
    folder.discard()
    assert read_bundle(root / CLS).whole_s == 9.0
    assert [path.name for path in root.iterdir()] == [CLS]


def test_a_torn_file_is_noticed(root: Path) -> None:
    manifest = read_bundle(root / CLS)
    file = root / CLS / manifest.cuts[0].tail_file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ProtocolError, match="torn"):
        read_bundle(root / CLS)


def test_a_changed_byte_is_noticed(root: Path) -> None:
    manifest = read_bundle(root / CLS)
    file = root / CLS / manifest.whole_file
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(bytes(data))
    assert verify_files(root / CLS, manifest) == [manifest.whole_file]


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", ".hidden", "", "x" * 200, "a\0b"])
def test_file_names_never_leave_the_folder(built: Path, name: str) -> None:
    manifest = read_bundle(built / CLS)
    evil = evolve(manifest, whole_file=name)
    with pytest.raises(ProtocolError):
        parse_manifest(encode(evil))


WRONG = [{"schema": "midstream.bundle/9.0"}, {"digest": 7}, {"cuts": [{"id": "000"}]}, {"input_shapes": {"x": "no"}}]


@pytest.mark.parametrize("change", WRONG)
def test_wrong_manifests_name_the_field(built: Path, change: dict[str, object]) -> None:
    document = json.loads((built / CLS / MANIFEST).read_bytes()) | change
    with pytest.raises(ProtocolError) as raised:
        parse_manifest(json.dumps(document).encode())
    assert raised.value.field is not None
    assert raised.value.field.split(".")[0].split("[")[0] in change


# -- over a link -----------------------------------------------------------------------------------------------------


class Lossy:
    """A link that loses its first replies, as a weak one does."""

    def __init__(self, link: MemoryLink, losses: int) -> None:
        self._link = link
        self.losses = losses

    async def exchange(self, path: str, headers: dict[str, str], body: bytes, deadline_s: float, method: str) -> Reply:
        if "/files/" in path and self.losses > 0:
            self.losses -= 1
            raise LinkError("lost")
        return await self._link.exchange(path, headers, body, deadline_s, method)


def store_at(path: Path) -> ModelStore:
    return ModelStore(path, shipped_catalogue())


async def test_heads_arrive_through_the_store(root: Path, tmp_path: Path) -> None:
    client, link = BundleClient(store_at(tmp_path / "store")), MemoryLink("cloud", BundleShelf(root).routes())
    manifest = await client.manifest(link, CLS)
    assert manifest == read_bundle(root / CLS)
    head = await client.head(link, manifest, manifest.cuts[0])
    assert head.read_bytes() == (root / CLS / manifest.cuts[0].head_file).read_bytes()
    assert head.parent.name == kept_as(CLS)
    link.reachable = False
    assert await client.head(link, manifest, manifest.cuts[0]) == head, "a head that is here is not asked for"
    with pytest.raises(NotFound):
        await client.whole(None, manifest)
    with pytest.raises(LinkError):
        await client.whole(link, manifest)


async def test_a_weak_link_is_tried_again(root: Path, tmp_path: Path) -> None:
    client, link = BundleClient(store_at(tmp_path / "store")), MemoryLink("cloud", BundleShelf(root).routes())
    manifest = await client.manifest(link, CLS)
    whole = await client.whole(Lossy(link, 2), manifest)  # type: ignore[arg-type]
    assert whole.stat().st_size == manifest.whole_size_bytes
    with pytest.raises(LinkError):
        await client.head(Lossy(link, 9), manifest, manifest.cuts[0])  # type: ignore[arg-type]


class Counted:
    """A link that remembers the ranges and breaks after so many of them."""

    def __init__(self, link: MemoryLink, lasts: int) -> None:
        self._link = link
        self.lasts = lasts
        self.ranges: list[str] = []

    async def exchange(self, path: str, headers: dict[str, str], body: bytes, deadline_s: float, method: str) -> Reply:
        if len(self.ranges) >= self.lasts:
            raise LinkError("broke")
        self.ranges.append(headers["range"])
        return await self._link.exchange(path, headers, body, deadline_s, method)


async def test_a_broken_download_goes_on_where_it_ended(root: Path, tmp_path: Path) -> None:
    link, manifest = MemoryLink("cloud", BundleShelf(root).routes()), read_bundle(root / CLS)
    first, second = Counted(link, 2), Counted(link, 1_000)
    with pytest.raises(LinkError):
        await BundleClient(store_at(tmp_path), 100_000).whole(first, manifest)  # type: ignore[arg-type]
    whole = await BundleClient(store_at(tmp_path), 100_000).whole(second, manifest)  # type: ignore[arg-type]
    assert whole.read_bytes() == (root / CLS / manifest.whole_file).read_bytes()
    assert first.ranges == ["bytes=0-99999", "bytes=100000-199999"]
    assert second.ranges[0] == "bytes=200000-299999"
    assert not list(tmp_path.rglob("*.part"))


async def test_what_was_kept_of_another_file_is_noticed_and_dropped(root: Path, tmp_path: Path) -> None:
    link, manifest, store = MemoryLink("cloud", BundleShelf(root).routes()), read_bundle(root / CLS), store_at(tmp_path)
    stored = f"{manifest.whole_sha256[:16]}-{manifest.whole_file}"
    store.extend_file(kept_as(CLS), stored, 0, bytes(50), manifest.whole_size_bytes)
    with pytest.raises(EngineError, match="sha256"):
        await BundleClient(store).whole(link, manifest)
    assert (await BundleClient(store).whole(link, manifest)).stat().st_size == manifest.whole_size_bytes


async def test_wrong_bytes_are_never_placed(root: Path, tmp_path: Path) -> None:
    manifest = read_bundle(root / CLS)
    file = root / CLS / manifest.whole_file
    file.write_bytes(bytes(manifest.whole_size_bytes))
    store = store_at(tmp_path / "store")
    with pytest.raises(EngineError):
        await BundleClient(store).whole(MemoryLink("cloud", BundleShelf(root).routes()), manifest)
    assert not list((tmp_path / "store").rglob("*.onnx"))


async def test_no_bundle_yet_and_another_model(root: Path, tmp_path: Path) -> None:
    client, link = BundleClient(store_at(tmp_path)), MemoryLink("cloud", BundleShelf(root).routes())
    with pytest.raises(NotFound):
        await client.manifest(link, "ppocr-v4-det")
    (root / CLS).rename(root / "other")
    with pytest.raises(ProtocolError, match="asked for"):
        await client.manifest(link, "other")


@pytest.mark.parametrize(("status", "body"), [(500, b""), (200, b"{}"), (200, b"<html>"), (200, b"[" * 2_000_000)])
async def test_a_server_that_is_no_coordinator(tmp_path: Path, status: int, body: bytes) -> None:
    async def answer(request: Request) -> Response:
        return Response(status=status, body=body)

    link = MemoryLink("cloud", [Route("GET", "/midstream/v1/bundles/{model}/manifest.json", answer)])
    with pytest.raises(MidstreamError):
        await BundleClient(store_at(tmp_path)).manifest(link, CLS)


# -- offers and probes -----------------------------------------------------------------------------------------------


def cuts_of(*elements: int) -> list[Cut]:
    return [Cut(f"{k:03d}", k, (GraphTensor(f"t{k}", "FP32", (1, n)),), float(k)) for k, n in enumerate(elements)]


def offered(cuts: list[Cut], errors: dict[tuple[str, str], float], max_cuts: int = 9) -> list[tuple[str, str]]:
    found = offers(cuts, lambda cut, codec: errors.get((cut.id, codec), 0.0), max_cuts, lambda: True)
    return [(one.cut.id, one.codec) for one in found]


def test_cuts_that_send_an_input_as_it_came_push_no_other_aside() -> None:
    """A policy that keeps raw input here leaves only the others: they compete among themselves."""
    cuts = cuts_of(500, 2000, 1500, 400, 1600)
    found = offers(cuts, lambda *_: 0.0, 9, lambda: True, frozenset({"t0", "t3"}))
    assert [one.cut.id for one in found if one.codec == "int8"] == ["000", "001", "002", "003"]
    assert [one for one in offered(cuts, {}) if one[1] == "int8"] == [("000", "int8"), ("003", "int8")]


def test_only_cuts_that_send_less_are_offered() -> None:
    assert offered(cuts_of(1000, 1000, 2000, 500, 600), {}) == [
        ("000", "raw"), ("000", "int8"), ("000", "fp16"), ("003", "raw"), ("003", "int8"), ("003", "fp16"),
    ]  # fmt: skip


def test_a_form_that_harms_the_answer_is_never_offered() -> None:
    """fp16 stands in where int8 is too coarse, unless a later cut of the same size is good with int8."""
    errors = {("001", "int8"): 0.3, ("002", "int8"): 0.3}
    sizes = (2000, 1000, 1000, 1000, 900)
    three = [("000", "raw"), ("000", "int8"), ("000", "fp16")]
    assert offered(cuts_of(*sizes), {**errors, ("004", "int8"): 1.0, ("004", "fp16"): 1.0}) == [
        *three, ("003", "raw"), ("003", "int8"), ("003", "fp16"),
    ]  # fmt: skip
    only_halved = {("001", "int8"): 1.0, ("002", "int8"): 1.0}
    assert offered(cuts_of(2000, 900, 900, 300), only_halved) == [
        *three, ("001", "raw"), ("001", "fp16"), ("003", "raw"), ("003", "int8"), ("003", "fp16"),
    ]  # fmt: skip
    assert offered(cuts_of(2000, 900, 900), only_halved) == [*three, ("001", "raw"), ("001", "fp16")]


@given(
    sizes=st.lists(st.integers(300, 2000), min_size=1, max_size=12),
    bad=st.sets(st.tuples(st.integers(0, 11), st.sampled_from(["int8", "fp16"]))),
    max_cuts=st.integers(1, 5),
)
def test_what_is_offered_is_good_bounded_and_sends_ever_less(
    sizes: list[int], bad: set[tuple[int, str]], max_cuts: int
) -> None:
    cuts = cuts_of(*sizes)
    found = offered(cuts, {(f"{k:03d}", codec): 1.0 for k, codec in bad}, max_cuts)
    assert not {(f"{k:03d}", codec) for k, codec in bad} & set(found)
    ids = list(dict.fromkeys(ident for ident, _ in found))
    assert ids == sorted(ids) and len(ids) <= max_cuts
    elements = {cut.id: cut.elements for cut in cuts}
    smallest = [
        min({"raw": 4, "fp16": 2, "int8": 1}[codec] * elements[i] for i_, codec in found if i_ == i) for i in ids
    ]
    assert smallest[1:] == sorted(set(smallest[1:]), reverse=True)
    assert found[0] == ("000", "raw")


def test_the_last_place_is_for_the_cut_that_sends_less() -> None:
    errors = {("000", "int8"): 1.0, ("001", "int8"): 1.0}
    assert [cut for cut, _ in offered(cuts_of(2000, 900, 300), errors, max_cuts=2)] == ["000"] * 2 + ["002"] * 3


def test_the_first_cut_is_always_there_raw() -> None:
    errors = {("000", "int8"): 1.0, ("000", "fp16"): 1.0}
    assert offered(cuts_of(1000), errors) == [("000", "raw")]


def test_what_an_int8_model_hands_over_needs_no_codec() -> None:
    cuts = [Cut(f"{k:03d}", k, (GraphTensor(f"t{k}", "UINT8", (size,)),), k) for k, size in enumerate((100, 100, 50))]
    assert offered(cuts, {}) == [("000", "raw"), ("002", "raw")]


def test_what_fits_one_packet_is_sent_as_it_is() -> None:
    assert offered(cuts_of(1000, 100), {})[3:] == [("001", "raw")]


def test_offers_are_bounded() -> None:
    assert len(offered(cuts_of(*range(1000, 300, -1)), {}, max_cuts=3)) == 9
    assert list(offers(cuts_of(9, 8), lambda *_: 0.0, 9, lambda: False)) == []


def test_head_probes_measure_real_heads(root: Path) -> None:
    manifest: BundleManifest = read_bundle(root / CLS)
    probes = head_probes(manifest, lambda cut: root / CLS / cut.head_file, OnnxRuntime(), threads=1)
    assert len(probes) == len(manifest.cuts)
    measured = probes[0].run()
    assert (measured.digest, measured.what) == (manifest.digest, f"head:{manifest.cuts[0].id}:{manifest.cuts[0].codec}")
    assert measured.median_s > 0


def test_the_median_ignores_the_warm_up() -> None:
    ticks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 5.0])
    timed = time_calls(lambda: None, runs=3, clock=lambda: next(ticks))
    assert timed.median_s == 1.0
    assert timed.spread_s == pytest.approx(0.5)
