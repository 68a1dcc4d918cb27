"""Small ONNX models made on the spot: bodies, side files, foreign operators, inputs that skip ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from split_models.codec import RAW
from split_models.cuts import Cut
from split_models.partition_onnx import Partitioner

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node
OPSET = 17


def weight(name: str, kind: int, shape: Sequence[int], values: Any) -> Any:
    """A weight with raw data: only such ones are ever written to side files."""
    array = np.array(list(values), dtype=helper.tensor_dtype_to_np_dtype(kind)).reshape(shape)
    return numpy_helper.from_array(array, name)


def value(name: str, shape: Sequence[int | str] | None, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def save(
    file: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    weights: Sequence[Any] = (),
    domains: Mapping[str, int] | None = None,
    functions: Sequence[Any] = (),
) -> Path:
    """A checked file unless `domains` names a foreign one."""
    opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
    graph = helper.make_graph(list(nodes), file.stem, list(inputs), list(outputs), list(weights))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))
    onnx.save(model, str(file))
    return file


def loop_model(file: Path, own: int = 0) -> Path:
    """Relu, Exp, Sigmoid, then three turns of a Loop that reads an early tensor and a weight.

    With `own` the body holds that many weights of its own.
    """
    mine = [weight(f"v{k}", FLOAT, [4], [0.25 * k] * 4) for k in range(own)]
    added = [node("Add", [f"acc_{k}" if k else "acc", f"v{k}"], [f"acc_{k + 1}"]) for k in range(own)]
    body = helper.make_graph(
        [
            *added,
            node("Add", [f"acc_{own}" if own else "acc", "a"], ["s"]),
            node("Mul", ["s", "w"], ["acc2"]),
            node("Identity", ["cond"], ["cond2"]),
        ],
        "body",
        [value("i", [], INT64), value("cond", [], BOOL), value("acc", [1, 4])],
        [value("cond2", [], BOOL), value("acc2", [1, 4])],
        mine,
    )
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Exp", ["a"], ["b"]),
        node("Sigmoid", ["b"], ["c"]),
        node("Loop", ["turns", "true", "c"], ["l"], body=body),
        node("Neg", ["l"], ["m"]),
        node("Tanh", ["m"], ["y"]),
    ]
    weights = [weight("turns", INT64, [], [3]), weight("true", BOOL, [], [True]), weight("w", FLOAT, [4], [0.5] * 4)]
    return save(file, nodes, [value("x", [1, 4])], [value("y", [1, 4])], weights)


def if_model(file: Path) -> Path:
    """A branch that captures a tensor, another that captures a weight; nested in it one more If."""
    inner = helper.make_graph([node("Mul", ["a", "w"], ["d"])], "inner", [], [value("d", [1, 4])])
    other = helper.make_graph([node("Sub", ["a", "w"], ["e"])], "other", [], [value("e", [1, 4])])
    outer = helper.make_graph(
        [node("If", ["small"], ["f"], then_branch=inner, else_branch=other)], "outer", [], [value("f", [1, 4])]
    )
    plain = helper.make_graph([node("Identity", ["b"], ["g"])], "plain", [], [value("g", [1, 4])])
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Exp", ["a"], ["b"]),
        node("ReduceSum", ["a"], ["sum"], keepdims=0),
        node("Less", ["sum", "limit"], ["small"]),
        node("If", ["small"], ["h"], then_branch=outer, else_branch=plain),
        node("Neg", ["h"], ["m"]),
        node("Tanh", ["m"], ["y"]),
    ]
    weights = [weight("limit", FLOAT, [], [2.0]), weight("w", FLOAT, [4], [1.0, 2.0, 3.0, 4.0])]
    return save(file, nodes, [value("x", [1, 4])], [value("y", [1, 4])], weights)


def scan_model(file: Path) -> Path:
    """A running sum over the rows that also adds a captured tensor."""
    body = helper.make_graph(
        [
            node("Add", ["state", "row"], ["s"]),
            node("Add", ["s", "bias"], ["out"]),
            node("Identity", ["out"], ["next"]),
        ],
        "scan",
        [value("state", [4]), value("row", [4])],
        [value("next", [4]), value("out", [4])],
    )
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("ReduceMax", ["a"], ["bias"], axes=[0], keepdims=0),
        node("Scan", ["zero", "a"], ["last", "rows"], body=body, num_scan_inputs=1),
        node("Neg", ["rows"], ["m"]),
        node("Tanh", ["m"], ["y"]),
    ]
    return save(file, nodes, [value("x", [5, 4])], [value("y", [5, 4])], [weight("zero", FLOAT, [4], [0.0] * 4)])


def run(data: bytes, feed: Mapping[str, np.ndarray], folder: Path | None = None) -> list[np.ndarray]:
    """All outputs of a model given as bytes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    source: Any = data
    if folder is not None:
        source = str(folder / "run.onnx")
        Path(source).write_bytes(data)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, dict(feed))
    return found


def side_file_model(folder: Path, most: int = 1 << 14) -> tuple[Path, np.ndarray]:
    """Two products whose weights (256 KiB each) lie in a side file, and small ones beside them there."""
    draw = np.random.default_rng(11)
    weights = [
        helper.make_tensor("w1", FLOAT, [64, 1024], draw.normal(size=64 * 1024).astype("f4").tobytes(), raw=True),
        helper.make_tensor("w2", FLOAT, [1024, 64], draw.normal(size=64 * 1024).astype("f4").tobytes(), raw=True),
        helper.make_tensor("shape", INT64, [2], np.array([1, 64]).tobytes(), raw=True),
    ]
    nodes = [
        node("MatMul", ["x", "w1"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("MatMul", ["b", "w2"], ["c"]),
        node("Reshape", ["c", "shape"], ["d"]),
        node("Tanh", ["d"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "side", [value("x", [1, 64])], [value("y", [1, 64])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.random.default_rng(5).normal(size=(1, 64)).astype(np.float32)
    (whole,) = run(model.SerializeToString(), {"x": x})
    file = folder / "side.onnx"
    onnx.save(model, str(file), save_as_external_data=True, location="side.data", size_threshold=0)
    assert (folder / "side.data").stat().st_size > most
    return file, whole


def difference(partitioner: Partitioner, cut: Cut, feed: Mapping[str, np.ndarray], whole: list[np.ndarray]) -> float:
    """The largest absolute difference between head and tail and the whole model's answer."""
    parts = partitioner.split(cut, RAW)
    sent = run(parts.head, feed)
    answer = run(parts.tail, dict(zip((name for name, _, _ in parts.crossing), sent, strict=True)))
    assert len(answer) == len(whole)
    return max(float(np.abs(a - b).max()) for a, b in zip(answer, whole, strict=True))
