"""A free first dimension is kept only where a batch gives each row as a run of its own does, and sooner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.arrays import to_tensor
from engines.batching import joined, parted
from engines.fakes_tensor import FakeTensorModel, FakeTensorRuntime
from engines.onnx import OnnxRuntime
from protocol.errors import EngineError
from protocol.tensors import Tensor
from split_models.batch_onnx import MAX_ERROR_RATIO, error_of, free_rows, try_batch
from split_models.cuts import single_tensor_cuts
from split_models.partition_onnx import Partitioner
from split_models.prepare_onnx import prepare


def requests(name: str, shape: tuple[int, ...], count: int = 3) -> list[list[Tensor]]:
    rng = np.random.default_rng(7)
    return [[to_tensor(name, rng.standard_normal(shape).astype(np.float32))] for _ in range(count)]


def small(op: str, **attributes: object) -> bytes:
    """A model x[1, 4] -> op -> y[1, 4]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attributes)], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def reshaped(first: int) -> bytes:
    """x[1, 4] -> [first, 4 / first] -> relu -> [1, 4]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    shapes = [
        helper.make_tensor("there", TensorProto.INT64, [2], [first, 4 // first]),
        helper.make_tensor("back", TensorProto.INT64, [2], [1, 4]),
    ]
    nodes = [
        helper.make_node("Reshape", ["x", "there"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Reshape", ["b", "back"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], shapes)
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


@pytest.mark.parametrize(
    ("name", "port", "shape"), [("ppocr-v4-det", "x", (1, 3, 96, 96)), ("ppocr-v2-cls", "x", (1, 3, 48, 192))]
)
def test_real_models_and_tails_give_the_same_rows(
    model_file: Callable[[str], Path], tmp_path: Path, name: str, port: str, shape: tuple[int, ...]
) -> None:
    prepared = prepare(model_file(name), {port: shape})
    runtime = OnnxRuntime()
    whole = try_batch(prepared.data, requests(port, shape), runtime, least_gain_ratio=0.0)
    assert whole is not None
    assert whole.error_ratio <= MAX_ERROR_RATIO
    cut = single_tensor_cuts(prepared.graph)[-3]
    parts = Partitioner(prepared).split(cut, "raw")
    (crossing,) = parts.crossing
    tail = try_batch(parts.tail, requests(crossing[0], tuple(crossing[2])), runtime, least_gain_ratio=0.0)
    assert tail is not None
    assert tail.error_ratio <= MAX_ERROR_RATIO
    # What was kept answers any number of rows, as the model does.
    (tmp_path / "one.onnx").write_bytes(prepared.data)
    (tmp_path / "many.onnx").write_bytes(whole.data)
    one, many = runtime.load(tmp_path / "one.onnx", 1), runtime.load(tmp_path / "many.onnx", 1)
    asked = requests(port, shape, 7)
    rows = parted(many.run([joined([inputs[0] for inputs in asked])])[0], [1] * 7)
    assert all(error_of(row, one.run(inputs)[0]) <= 1e-5 for row, inputs in zip(rows, asked, strict=True))
    one.close()
    many.close()


def test_models_that_mix_rows_are_refused() -> None:
    axes = {"axis": 0}  # softmax over the first dimension: 1 alone, a share in a batch
    assert try_batch(small("Softmax", **axes), requests("x", (1, 4)), OnnxRuntime(), least_gain_ratio=0.0) is None
    assert try_batch(small("Softmax", axis=1), requests("x", (1, 4)), OnnxRuntime(), least_gain_ratio=0.0) is not None


def test_reshapes_to_one_row_are_freed_and_others_judged_by_their_answers() -> None:
    assert try_batch(reshaped(1), requests("x", (1, 4)), OnnxRuntime(), least_gain_ratio=0.0) is not None
    assert try_batch(reshaped(2), requests("x", (1, 4)), OnnxRuntime(), least_gain_ratio=0.0) is None


def test_a_border_that_is_not_one_row_has_no_batch_form() -> None:
    model = onnx.load_model_from_string(small("Relu"))
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    assert free_rows(model.SerializeToString()) is None


class LoadsOnce(FakeTensorRuntime):
    """Loads one model, whatever the file, and no further one."""

    def load(self, file: Path, threads: int) -> FakeTensorModel:
        if self.loaded:
            raise EngineError("no memory left")
        self.loaded.append(FakeTensorModel())
        return self.loaded[0]


def test_a_batch_form_that_does_not_load_leaves_nothing_loaded() -> None:
    runtime = LoadsOnce()
    assert try_batch(small("Relu"), requests("x", (1, 4)), runtime) is None
    assert [model.closed for model in runtime.loaded] == [True]


def test_a_batch_that_is_no_sooner_is_not_kept() -> None:
    ticks = itertools.count()
    assert try_batch(small("Relu"), requests("x", (1, 4)), OnnxRuntime(), clock=lambda: next(ticks)) is None
    late = itertools.accumulate(itertools.cycle([1.0, 3.0, 1.0]))
    found = try_batch(small("Relu"), requests("x", (1, 4)), OnnxRuntime(), clock=lambda: next(late))
    assert found is not None
    assert found.gain_ratio == pytest.approx(3.0)
