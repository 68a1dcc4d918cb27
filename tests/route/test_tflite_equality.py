"""Every cut of every TFLite model of the catalogue gives the whole answer: raw bit for bit, other forms within 1 %."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.verify import verify_cuts, verify_offered
from engines.arrays import to_tensor
from engines.catalogue import shipped_catalogue
from engines.tflite import TfliteRuntime
from protocol.tensors import Tensor
from split_models.bundle import BundleLimits, build_bundle
from split_models.offer import GOOD_ERROR_RATIO
from split_models.prepare_tflite import prepare

LEAST_CUTS = {
    "face-short-range": 20, "face-long-range": 20, "face-full-range": 15, "face-full-range-sparse": 14,
    "face-landmarks": 20, "iris-landmarks": 20, "basic-pitch-tflite": 20,
}  # fmt: skip
"""Single-tensor cuts: 20 each; the two full-range models have long skip connections and no more than 15 and 14."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", LEAST_CUTS)
def test_every_cut_equals_the_whole_model(name: str, model_file: Callable[[str], Path]) -> None:
    """Cuts of one tensor, of several, and those that only a minimum cut finds."""
    checked = verify_cuts(model_file(name), shipped_catalogue()[name])
    single = [one for one in checked if one.cut.isdigit()]
    print(f"{name}: {len(single)} cuts of one tensor and {len(checked) - len(single)} others, all bit for bit")
    assert len(single) >= LEAST_CUTS[name]
    assert [one for one in checked if one.max_relative_error > 0] == []


@pytest.mark.parametrize("name", [name for name, least in LEAST_CUTS.items() if least < 20])
def test_boundaries_of_several_tensors_equal_the_whole_model(name: str, model_file: Callable[[str], Path]) -> None:
    """Where a model has fewer than 20 cuts of one tensor: a third of all places where up to four cross."""
    checked = verify_cuts(model_file(name), shipped_catalogue()[name], every=3, all_boundaries=True)
    print(f"{name}: {len(checked)} boundaries, all bit for bit")
    assert len(checked) >= 20
    assert [one for one in checked if one.max_relative_error > 0] == []


@pytest.mark.parametrize("name", LEAST_CUTS)
def test_the_prepared_file_answers_as_the_original(
    name: str, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    prepared = prepare(model_file(name), shipped_catalogue()[name].input_shapes)
    (tmp_path / "prepared.tflite").write_bytes(prepared.data)
    chance = np.random.default_rng(5)
    inputs = [to_tensor(t.name, chance.uniform(-1, 1, t.shape).astype(np.float32)) for t in prepared.graph.inputs]
    assert _answer(model_file(name), inputs) == _answer(tmp_path / "prepared.tflite", inputs)


def _answer(file: Path, inputs: list[Tensor]) -> dict[str, bytes]:
    model = TfliteRuntime().load(file, 1)
    try:
        return {tensor.name: bytes(tensor.data) for tensor in model.run(inputs)}
    finally:
        model.close()


@pytest.mark.parametrize("name", LEAST_CUTS)
def test_offered_forms_keep_the_answer(name: str, model_file: Callable[[str], Path], tmp_path: Path) -> None:
    limits = BundleLimits(max_cuts=5, seconds=60.0, threads=1)
    manifest = build_bundle(model_file(name), shipped_catalogue()[name], tmp_path, limits=limits)
    checked = verify_offered(tmp_path / name)
    print(f"{name}: " + ", ".join(f"{one.cut}:{one.codec} {one.error_ratio:.4f}" for one in checked))
    assert len(checked) == len(manifest.cuts) >= 6
    assert {"raw", "fp16"} <= {one.codec for one in checked}
    assert all(one.max_relative_error == 0 for one in checked if one.codec == "raw")
    assert all(one.error_ratio <= GOOD_ERROR_RATIO for one in checked)
