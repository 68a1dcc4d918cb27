"""A head and its tail give the whole model's answer: every cut raw, the offered ones in all their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.verify import Checked, verify_cuts, verify_offered
from engines.catalogue import shipped_catalogue
from split_models.bundle import BundleLimits, build_bundle
from split_models.bundle_files import read_bundle, verify_files
from split_models.images import drawn_text, encode
from tests.tensor_house import CLS, DET, bundle_root

MAX_RELATIVE_ERROR = 1e-5
MIN_CUTS = 40
MIN_IOU = 0.99

pytestmark = pytest.mark.timeout(240)  # loads about 200 sessions


LEAST_CUTS = {DET: 40, CLS: 40, "ppocr-v4-rec": 150, "minilm-int8": 10, "basic-pitch": 10}
"""Of one tensor and of several together. The last three have no recipe: their inputs are sampled from a seed."""

QUICK = (CLS, "basic-pitch")
EVERY = {"minilm-int8": 6}
"""Of its 244 cuts each would load two sessions of 23 MB: a sixth of them is enough for every day."""


def _equal_to_the_whole(name: str, model_file: Callable[[str], Path]) -> Sequence[Checked]:
    checked = verify_cuts(model_file(name), shipped_catalogue()[name], every=EVERY.get(name, 1))
    worst = max(one.max_relative_error for one in checked)
    single = sum(one.cut.isdigit() for one in checked)
    print(f"{name}: {len(checked)} cuts, {single} of one tensor, largest relative difference {worst:.2e}")
    assert len(checked) >= LEAST_CUTS[name]
    assert worst <= MAX_RELATIVE_ERROR
    assert all(one.error_ratio <= 1 - MIN_IOU for one in checked)
    return checked


@pytest.mark.parametrize("name", QUICK)
def test_every_cut_equals_the_whole_model(name: str, model_file: Callable[[str], Path]) -> None:
    _equal_to_the_whole(name, model_file)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LEAST_CUTS if name not in QUICK])
def test_every_cut_of_the_larger_models_equals_the_whole(name: str, model_file: Callable[[str], Path]) -> None:
    """Hundreds of sessions each. MiniLM's cuts cross with its mask: no single tensor would do."""
    checked = _equal_to_the_whole(name, model_file)
    if name == "minilm-int8":
        assert sum(one.cut.startswith("m") for one in checked) >= 10


@pytest.mark.parametrize("name", [DET, CLS])
def test_offered_cuts_keep_boxes_and_labels(
    name: str, model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = bundle_root([DET, CLS], model_file, tmp_path_factory.mktemp("bundles")) / name
    manifest = read_bundle(folder)
    checked = verify_offered(folder)
    print(f"{name}: " + ", ".join(f"{c.cut}:{c.codec} error {c.error_ratio:.4f}" for c in checked))
    assert manifest.single_cuts >= MIN_CUTS
    assert any(one.codec == "int8" for one in checked)
    assert all(one.error_ratio <= 1 - MIN_IOU for one in checked)
    assert all(one.max_relative_error <= MAX_RELATIVE_ERROR for one in checked if one.codec == "raw")
    assert not verify_files(folder, manifest)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppocr-v4-rec", "minilm-int8", "basic-pitch"])
def test_offered_cuts_of_models_without_a_recipe_keep_their_stated_error(
    name: str, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """MiniLM has cuts that send the token ids and cuts that do not: a policy may allow the second kind alone."""
    manifest = build_bundle(model_file(name), shipped_catalogue()[name], tmp_path)
    checked = verify_offered(tmp_path / name)
    stated = {(cut.id, cut.codec): cut.error_ratio for cut in manifest.cuts}
    print(f"{name}: " + ", ".join(f"{c.cut}:{c.codec} error {c.error_ratio:.4f}" for c in checked))
    assert len(checked) >= 4
    assert all(one.error_ratio <= stated[one.cut, one.codec] + 1e-4 for one in checked)
    assert all(one.max_relative_error <= MAX_RELATIVE_ERROR for one in checked if one.codec == "raw")
    assert any(not cut.sends_input for cut in manifest.cuts)


def test_int8_is_not_offered_where_it_moves_boxes(
    model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first layers of det lose too much to 8 bits: the walk must have passed over them."""
    folder = bundle_root([DET, CLS], model_file, tmp_path_factory.mktemp("bundles")) / DET
    offered = {(cut.id, cut.codec) for cut in read_bundle(folder).cuts}
    assert ("000", "raw") in offered
    assert ("001", "int8") not in offered
    assert all(cut.error_ratio <= 0.01 for cut in read_bundle(folder).cuts)


def test_int8_keeps_the_label_of_unseen_lines(
    model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = bundle_root([DET, CLS], model_file, tmp_path_factory.mktemp("bundles")) / CLS
    line = drawn_text(["not a calibration line"], 320, 64, 22, dark_on_light=True)
    unseen = [encode(line), encode(line[::-1, ::-1].copy())]
    assert all(one.error_ratio < 1 for one in verify_offered(folder, unseen))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppocr-v4-rec", "minilm-int8", "basic-pitch", "face-short-range"])
def test_offered_cuts_of_models_without_a_recipe_keep_their_outputs(
    name: str, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """Through the files of the bundle, head and tail: within the bound that the manifest states."""
    limits = BundleLimits(max_cuts=3, seconds=40.0, threads=2)
    manifest = build_bundle(model_file(name), shipped_catalogue()[name], tmp_path, limits=limits)
    checked = verify_offered(tmp_path / name)
    assert {one.codec for one in checked} >= {"raw", "fp16"}
    for one, cut in zip(checked, manifest.cuts, strict=True):
        assert one.error_ratio <= max(cut.error_ratio * 1.5, 1e-4), (one.cut, one.codec)
        assert one.error_ratio <= 0.01
    assert all(one.max_relative_error <= MAX_RELATIVE_ERROR for one in checked if one.codec == "raw")
