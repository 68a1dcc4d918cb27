"""A prepared ONNX model or tail with a free first dimension, so that several requests run as one batch.

Prepared files have fixed shapes, mostly with a first dimension of 1. Freeing it is tried, never assumed: the result is
kept only if a batch of real inputs gives every row as a run of its own does, and gives it sooner.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from engines.arrays import to_array
from engines.batching import joined, parted
from engines.port import TensorModel, TensorRuntime
from protocol.clock import Clock
from protocol.errors import MidstreamError
from protocol.tensors import Tensor
from split_models.onnx_files import onnx_module, to_bytes

MAX_ERROR_RATIO = 1e-5
"""Largest difference of a row, over the largest value of that output."""

ROWS = 4
LEAST_GAIN_RATIO = 1.05
"""A batch that is no sooner than its requests one after the other only delays the first of them."""


@frozen
class BatchForm:
    """The file's bytes, how far rows of a batch were off, and one by one over batched seconds."""

    data: bytes
    error_ratio: float
    gain_ratio: float


def free_rows(data: bytes) -> bytes | None:
    """The same model with a free first dimension at its border; None when that is not 1 everywhere.

    Reshapes to a fixed shape that begins with 1 take the rows from what they reshape.
    """
    onnx = onnx_module()
    model = onnx.load_model_from_string(data)
    graph = model.graph
    weights = {weight.name for weight in graph.initializer}
    border = [value for value in (*graph.input, *graph.output) if value.name not in weights]
    for value in border:
        dims = value.type.tensor_type.shape.dim
        if not dims or dims[0].dim_value != 1:
            return None
        dims[0].Clear()
        dims[0].dim_param = "rows"
    del graph.value_info[:]
    _free_reshapes(graph, onnx)
    return to_bytes(model)


def try_batch(
    data: bytes,
    inputs: Sequence[Sequence[Tensor]],
    runtime: TensorRuntime,
    threads: int = 1,
    *,
    least_gain_ratio: float = LEAST_GAIN_RATIO,
    clock: Clock = time.perf_counter,
) -> BatchForm | None:
    """The batch form of a model, if it answers `inputs` (several requests) as the model does, and sooner; else None."""
    freed = free_rows(data)
    if freed is None or not inputs:
        return None
    asked = [inputs[number % len(inputs)] for number in range(ROWS)]
    with tempfile.TemporaryDirectory(prefix="midstream-batch-") as folder:
        one_file, many_file = Path(folder) / "one.onnx", Path(folder) / "many.onnx"
        one_file.write_bytes(data)
        many_file.write_bytes(freed)
        try:
            with (
                contextlib.closing(runtime.load(one_file, threads)) as one,
                contextlib.closing(runtime.load(many_file, threads)) as many,
            ):
                return _compared(freed, one, many, asked, least_gain_ratio, clock)
        except MidstreamError:
            return None  # it does not load, or an operator inside depends on the first dimension


def _compared(
    freed: bytes,
    one: TensorModel,
    many: TensorModel,
    asked: Sequence[Sequence[Tensor]],
    least_gain_ratio: float,
    clock: Clock,
) -> BatchForm | None:
    batch = [joined(parts) for parts in zip(*asked, strict=True)]
    alone = [one.run(inputs) for inputs in asked]
    together = [parted(output, [1] * len(asked)) for output in many.run(batch)]
    pairs = [
        (a, b) for row, outputs in enumerate(alone) for a, b in zip(outputs, (t[row] for t in together), strict=True)
    ]
    error_ratio = max((error_of(a, b) for a, b in pairs), default=0.0)
    if error_ratio > MAX_ERROR_RATIO:
        return None
    gain_ratio = _gain(lambda: [one.run(inputs) for inputs in asked], lambda: many.run(batch), clock)
    return BatchForm(freed, error_ratio, gain_ratio) if gain_ratio >= least_gain_ratio else None


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value; infinite for other shapes."""
    import numpy as np

    if found.shape != wanted.shape or found.datatype != wanted.datatype:
        return float("inf")
    a, b = to_array(found).astype(np.float64), to_array(wanted).astype(np.float64)
    if a.size == 0:
        return 0.0
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-12))


def _gain(alone: Any, together: Any, clock: Clock) -> float:
    """Median of ratios of neighbouring runs: what slows the machine slows both."""
    ratios = []
    for _ in range(5):
        began_s = clock()
        alone()
        between_s = clock()
        together()
        ratios.append((between_s - began_s) / max(1e-9, clock() - between_s))
    return sorted(ratios)[len(ratios) // 2]


def _free_reshapes(graph: Any, onnx: Any) -> None:
    targets = {node.input[1] for node in graph.node if node.op_type == "Reshape" and len(node.input) > 1}
    for weight in graph.initializer:
        if weight.name not in targets:
            continue
        shape = onnx.numpy_helper.to_array(weight).copy()
        if shape.ndim == 1 and shape.size and shape[0] == 1:
            shape[0] = 0 if -1 in shape else -1
            weight.CopyFrom(onnx.numpy_helper.from_array(shape, weight.name))
