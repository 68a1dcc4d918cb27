"""Every cut of every TFLite model of the catalogue gives the whole model's answer, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engines.arrays import to_tensor
from engines.catalogue import shipped_catalogue
from engines.tflite import TfliteRuntime
from protocol.tensors import Tensor
from split_models.codec import RAW
from split_models.cuts import single_tensor_cuts
from split_models.partition_tflite import Partitioner
from split_models.prepare_tflite import prepare

LEAST_CUTS = {
    "face-short-range": 20, "face-long-range": 20, "face-full-range": 15, "face-full-range-sparse": 14,
    "face-landmarks": 20, "iris-landmarks": 20, "basic-pitch-tflite": 20,
}  # fmt: skip
"""20 each; the two full-range models have long skip connections and no more than 15 and 14 single-tensor cuts."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("name", LEAST_CUTS)
def test_every_cut_equals_the_whole_model(name: str, model_file: Callable[[str], Path], tmp_path: Path) -> None:
    file = model_file(name)
    prepared = prepare(file, shipped_catalogue()[name].input_shapes)
    chance = np.random.default_rng(5)
    inputs = [to_tensor(t.name, chance.uniform(-1, 1, t.shape).astype(np.float32)) for t in prepared.graph.inputs]
    wanted = _answer(file, inputs)
    assert _run(prepared.data, inputs, tmp_path) == wanted
    partitioner, cuts = Partitioner(prepared), single_tensor_cuts(prepared.graph)
    for cut in cuts:
        parts = partitioner.split(cut, RAW)
        crossing = _tensors(parts.head, inputs, tmp_path)
        assert _run(parts.tail, crossing, tmp_path) == wanted, f"cut {cut.id}"
    print(f"{name}: {len(cuts)} cuts of {len(prepared.graph.nodes)} operators, all bit for bit")
    assert len(cuts) >= LEAST_CUTS[name]


def _answer(file: Path, inputs: Sequence[Tensor]) -> dict[str, bytes]:
    model = TfliteRuntime().load(file, 1)
    try:
        return {tensor.name: bytes(tensor.data) for tensor in model.run(inputs)}
    finally:
        model.close()


def _run(data: bytes, inputs: Sequence[Tensor], folder: Path) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.data) for tensor in _tensors(data, inputs, folder)}


def _tensors(data: bytes, inputs: Sequence[Tensor], folder: Path) -> Sequence[Tensor]:
    file = folder / "part.tflite"
    file.write_bytes(data)
    model = TfliteRuntime().load(file, 1)
    try:
        return model.run(inputs)
    finally:
        model.close()
