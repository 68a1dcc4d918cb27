"""A head and its tail give the whole model's answer: every single-tensor cut raw, the offered ones with int8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.catalogue import shipped_catalogue
from split_models.bundle_files import read_bundle, verify_files
from split_models.images import drawn_text, encode
from split_models.verify import verify_cuts, verify_offered
from tests.tensor_house import CLS, DET, bundle_root

MAX_RELATIVE_ERROR = 1e-5
MIN_CUTS = 40
MIN_IOU = 0.99

pytestmark = pytest.mark.timeout(240)  # loads about 200 sessions


@pytest.mark.parametrize("name", [DET, CLS])
def test_every_cut_equals_the_whole_model(name: str, model_file: Callable[[str], Path]) -> None:
    checked = verify_cuts(model_file(name), shipped_catalogue()[name])
    worst = max(one.max_relative_error for one in checked)
    print(f"{name}: {len(checked)} cuts, largest relative difference {worst:.2e}")
    assert len(checked) >= MIN_CUTS
    assert worst <= MAX_RELATIVE_ERROR
    assert all(one.error_ratio <= 1 - MIN_IOU for one in checked)


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
