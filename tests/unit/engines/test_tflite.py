"""The TFLite adapter with a real model, and the old package's conflict with numpy 2."""

from __future__ import annotations

import hashlib
import importlib.metadata
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.tflite import TfliteRuntime, numpy_conflict
from protocol.errors import BadRequest
from protocol.tensors import Tensor


def test_the_face_model_answers_what_its_interpreter_says(model_file: Callable[[str], Path]) -> None:
    file = model_file("face-short-range")
    model = TfliteRuntime().load(file, 1)
    assert [(s.name, s.datatype, s.shape) for s in model.inputs] == [("input", "FP32", (1, 128, 128, 3))]
    assert [(s.name, s.shape) for s in model.outputs] == [
        ("regressors", (1, 896, 16)),
        ("classificators", (1, 896, 1)),
    ]
    x = struct.pack(f"<{128 * 128 * 3}f", *((n % 255) / 127.5 - 1 for n in range(128 * 128 * 3)))
    outputs = model.run([Tensor("input", "FP32", (1, 128, 128, 3), x)])
    assert [bytes(t.data) for t in outputs] == reference(file, x)
    assert model.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    model.close()


def reference(file: Path, x: bytes) -> list[bytes]:
    """The same run with the library alone."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    interpreter: Any = Interpreter(model_path=str(file), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.frombuffer(x, "<f4").reshape(1, 128, 128, 3))
    interpreter.invoke()
    return [interpreter.get_tensor(d["index"]).tobytes() for d in interpreter.get_output_details()]


def test_free_sizes_follow_the_request_and_come_back(tmp_path: Path) -> None:
    model = TfliteRuntime().load(add_model(tmp_path / "add.tflite"), 1)
    assert model.inputs[0].shape == (None, 2)
    for rows in (1, 3, 2, 1):
        x = struct.pack(f"<{2 * rows}f", *range(2 * rows))
        (y,) = model.run([Tensor("x", "FP32", (rows, 2), x)])
        assert y.shape == (rows, 2)
        assert struct.unpack(f"<{2 * rows}f", bytes(y.data)) == tuple(2.0 * n for n in range(2 * rows))
    with pytest.raises(BadRequest):
        model.run([Tensor("x", "FP32", (0, 2), b"")])
    assert model.run([Tensor("x", "FP32", (1, 2), bytes(8))])[0].shape == (1, 2)
    model.close()


def add_model(file: Path) -> Path:
    """y = x + x with a free first dimension, made with the library's own schema."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    def tensor(name: str) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.shapeSignature = name, [1, 2], [-1, 2]
        made.type, made.buffer = schema.TensorType.FLOAT32, 0
        return made

    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = 0, [0, 0], [1]
    operator.builtinOptionsType = schema.BuiltinOptions.AddOptions
    operator.builtinOptions = schema.AddOptionsT()
    graph = schema.SubGraphT()
    graph.tensors, graph.inputs, graph.outputs = [tensor("x"), tensor("y")], [0], [1]
    graph.operators = [operator]
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD
    code.version = 1
    model = schema.ModelT()
    model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
    model.buffers = [schema.BufferT()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    file.write_bytes(bytes(builder.Output()))
    return file


@pytest.mark.parametrize(
    ("distribution", "numpy", "conflict"),
    [
        ("tflite-runtime", "2.4.6", True),
        ("tflite-runtime", "1.26.4", False),
        ("ai-edge-litert", "2.4.6", False),
    ],
)
def test_the_old_package_is_refused_with_numpy_2(distribution: str, numpy: str, conflict: bool) -> None:
    assert (numpy_conflict(distribution, numpy) is not None) == conflict


def test_litert_is_preferred() -> None:
    assert TfliteRuntime().version == importlib.metadata.version("ai-edge-litert")
