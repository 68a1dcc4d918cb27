"""Heads and tails run on tflite-runtime too, the package of old boards, in an environment of its own with numpy 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.arrays import to_array, to_tensor
from engines.tflite import TfliteRuntime
from split_models.codec import FP16, INT8, RAW, affine_for
from split_models.cuts import Cut, single_tensor_cuts
from split_models.partition_tflite import Partitioner
from split_models.prepare_tflite import Prepared, prepare
from tests.conftest import ROOT, make_environment

PACKAGES = ("tflite-runtime==2.14.0", "numpy<2", "attrs", "cattrs")
BOUNDS = {RAW: 0.0, FP16: 0.002, INT8: 0.1}
"""Greatest difference over the whole model's greatest value, whole and parts on the same runtime."""

RUN = """
import json, sys
from pathlib import Path
import numpy as np
from engines.arrays import to_array, to_tensor
from engines.tflite import TfliteRuntime
runtime, folder = TfliteRuntime(), Path(sys.argv[1])
x = to_tensor("input", np.load(folder / "x.npy"))
run = lambda file, tensors: runtime.load(folder / file, 1).run(tensors)
wanted = [to_array(t) for t in run("whole.tflite", [x])]
far = {}
for head in sorted(folder.glob("*_head.tflite")):
    got = [to_array(t) for t in run(head.name.replace("head", "tail"), run(head.name, [x]))]
    far[head.name] = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, wanted, strict=True))
print(json.dumps({"version": runtime.version, "far": far}))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the old package; skips where its wheels do not exist or cannot be fetched."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("tflite-runtime ended with Python 3.11")
    folder = tmp_path_factory.mktemp("old-runtime")
    make_environment(folder)
    python = folder / "bin" / "python"
    fetched = subprocess.run(
        [python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True, text=True, timeout=240, check=False
    )
    if fetched.returncode != 0:
        pytest.skip(f"{PACKAGES[0]} cannot be fetched: {fetched.stderr[-200:]}")
    return python


def test_every_codec_of_a_face_model(old_python: Path, model_file: Callable[[str], Path], tmp_path: Path) -> None:
    prepared = prepare(model_file("face-short-range"), {})
    x = np.random.default_rng(5).uniform(-1, 1, prepared.graph.inputs[0].shape).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "whole.tflite").write_bytes(prepared.data)
    cuts = single_tensor_cuts(prepared.graph)[::6]
    _write_parts(prepared, cuts, x, tmp_path)
    done = subprocess.run(
        [old_python, "-c", RUN, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print({name: f"{far:.5f}" for name, far in told["far"].items()})
    assert told["version"] == "2.14.0"
    assert len(told["far"]) == 3 * len(cuts)
    assert all(far <= BOUNDS[name.split("_")[0]] for name, far in told["far"].items())


def _write_parts(prepared: Prepared, cuts: list[Cut], x: np.ndarray, folder: Path) -> None:
    partitioner = Partitioner(prepared)
    (folder / "seen.tflite").write_bytes(partitioner.with_outputs([cut.crossing[0].name for cut in cuts]))
    model = TfliteRuntime().load(folder / "seen.tflite", 1)
    seen = {tensor.name: to_array(tensor) for tensor in model.run([to_tensor("input", x)])}
    model.close()
    for cut in cuts:
        name = cut.crossing[0].name
        rows = seen[name].reshape(-1, seen[name].shape[-1])
        affine = {name: affine_for(rows.min(axis=0).tolist(), rows.max(axis=0).tolist(), axis=-1)}
        for codec in BOUNDS:
            parts = partitioner.split(cut, codec, affine)
            (folder / f"{codec}_{cut.id}_head.tflite").write_bytes(parts.head)
            (folder / f"{codec}_{cut.id}_tail.tflite").write_bytes(parts.tail)
