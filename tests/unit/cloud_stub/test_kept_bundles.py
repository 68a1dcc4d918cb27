"""A finished bundle is kept beside its model: used again elsewhere, never when it is damaged or of other settings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from cloud_stub.cutting import MAX_SAMPLE_BYTES, MAX_SAMPLES, usable_samples
from cloud_stub.kept_bundles import MAX_KEPT, Order, build_key, finished_bundle
from engines.catalogue import shipped_catalogue
from protocol.errors import EngineError
from split_models import images
from split_models.bundle import BundleLimits, Progress
from split_models.bundle_files import files_of, read_bundle, verify_files

CLS = "ppocr-v2-cls"
LIMITS = BundleLimits(max_cuts=2, threads=1)


@pytest.fixture(scope="module")
def kept(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Order:
    """An order that was carried out once."""
    folder = tmp_path_factory.mktemp("models") / CLS
    folder.mkdir()
    file = Path(shutil.copy(model_file(CLS), folder))
    order = Order(shipped_catalogue()[CLS], file, folder.parent / "first", limits=LIMITS)
    finished_bundle(order)
    return order


@pytest.fixture
def order(kept: Order, tmp_path: Path) -> Order:
    """The same order in another state folder, over a copy of the store that a test may damage."""
    folder = tmp_path / "models" / CLS
    shutil.copytree(kept.file.parent, folder)
    return evolve(kept, file=folder / kept.file.name, out_dir=tmp_path / "state" / "bundles")


def steps_of(order: Order) -> list[str]:
    steps: list[Progress] = []
    finished_bundle(order, steps.append)
    return [step.what for step in steps]


def kept_folder(order: Order) -> Path:
    (found,) = order.file.parent.glob(f"bundle-*/{CLS}")
    return found


def test_another_state_folder_takes_the_kept_bundle(kept: Order, order: Order) -> None:
    assert steps_of(order) == [], "nothing was built"
    manifest = read_bundle(order.out_dir / CLS)
    assert manifest == read_bundle(kept.out_dir / CLS)
    assert verify_files(order.out_dir / CLS, manifest) == []
    shutil.rmtree(order.file.parent)
    assert verify_files(order.out_dir / CLS, manifest) == [], "what is served outlives the model in the store"


def test_a_damaged_byte_makes_it_anew(order: Order) -> None:
    tail = kept_folder(order) / read_bundle(kept_folder(order)).cuts[0].tail_file
    data = bytearray(tail.read_bytes())
    data[len(data) // 2] ^= 1
    tail.unlink()
    tail.write_bytes(data)
    assert "prepare" in steps_of(order)
    for folder in (kept_folder(order), order.out_dir / CLS):
        assert verify_files(folder, read_bundle(folder)) == []


def test_a_crash_while_keeping_leaves_no_half_bundle(order: Order) -> None:
    folder = kept_folder(order)
    torn = folder.with_name(f".{CLS}-torn")
    folder.rename(torn)
    (torn / "manifest.json").unlink()
    assert "prepare" in steps_of(order)
    assert not torn.exists()
    assert read_bundle(order.out_dir / CLS).model == CLS


def test_a_served_folder_that_was_torn_is_mended_from_the_kept_one(order: Order) -> None:
    finished_bundle(order)
    served = order.out_dir / CLS
    (served / read_bundle(served).whole_file).unlink()
    assert steps_of(order) == []
    assert verify_files(served, read_bundle(served)) == []


def test_the_key_covers_what_the_bundle_depends_on(order: Order) -> None:
    changed = [
        evolve(order, limits=evolve(LIMITS, threads=2)),
        evolve(order, samples=[b"picture"]),
        evolve(order, entry=evolve(order.entry, input_shapes={"x": (1, 3, 48, 96)})),
    ]
    keys = {build_key(each, "a" * 64) for each in (order, *changed)} | {build_key(order, "b" * 64)}
    assert len(keys) == 5
    assert build_key(evolve(order, out_dir=Path("elsewhere")), "a" * 64) in keys


def test_other_samples_replace_what_is_served_and_old_bundles_go(order: Order) -> None:
    finished_bundle(order)
    for number in range(MAX_KEPT):
        (order.file.parent / f"bundle-{number}").mkdir()
    sample = images.encode(images.drawn_text(["another line"], 192, 48, 20, True))
    assert "prepare" in steps_of(evolve(order, samples=[sample, b"no picture"]))
    assert len(list(order.file.parent.glob("bundle-*"))) == MAX_KEPT
    served = order.out_dir / CLS
    assert {file.name for file in served.iterdir()} == {*files_of(read_bundle(served)), "manifest.json"}


def test_a_store_that_cannot_be_written_is_served_all_the_same(kept: Order, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / ".bundle.lock").mkdir(parents=True)
    order = evolve(kept, file=Path(shutil.copy(kept.file, folder)), out_dir=tmp_path / "bundles")
    assert "prepare" in steps_of(order)
    assert verify_files(order.out_dir / CLS, read_bundle(order.out_dir / CLS)) == []
    assert not list(folder.glob("bundle-*"))


def test_a_model_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not there"):
        finished_bundle(Order(shipped_catalogue()[CLS], tmp_path / "gone" / "m.onnx", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_samples_are_pictures_bounded_in_number_and_size(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(MAX_SAMPLES + 2)]
    for file in files:
        file.write_bytes(b"x")
    with files[0].open("ab") as stream:
        stream.truncate(MAX_SAMPLE_BYTES + 1)
    others = [tmp_path / "text.txt", tmp_path / "gone.jpg"]
    others[0].write_bytes(b"x")
    assert usable_samples([*files, *others]) == tuple(files[1 : MAX_SAMPLES + 1])
