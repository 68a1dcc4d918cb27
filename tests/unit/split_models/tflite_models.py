"""Small TFLite files made by hand with the library's own schema: operators, weights, branches, quantised layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

KINDS = {"float32": "FLOAT32", "float16": "FLOAT16", "int8": "INT8", "uint8": "UINT8", "int32": "INT32", "bool": "BOOL"}


class Drawn:
    """A model in the making; the first subgraph is the main one."""

    def __init__(self) -> None:
        self.model = schema.ModelT()
        self.model.version = 3
        self.model.buffers = [schema.BufferT()]
        self.model.operatorCodes, self.model.subgraphs = [], []
        self.graph()

    def graph(self) -> Any:
        """Begin a subgraph; what follows is added to it."""
        made = schema.SubGraphT()
        made.tensors, made.operators, made.inputs, made.outputs = [], [], [], []
        self.model.subgraphs.append(made)
        return made

    @property
    def last(self) -> Any:
        return self.model.subgraphs[-1]

    def tensor(
        self, name: str | None, shape: Sequence[int], kind: str = "float32", scale: Sequence[float] | None = None,
        zero: int = 0, signature: Sequence[int] | None = None,
    ) -> int:  # fmt: skip
        made = schema.TensorT()
        made.name, made.shape, made.type = name, list(shape), getattr(schema.TensorType, KINDS[kind])
        made.shapeSignature = None if signature is None else list(signature)
        if scale is not None:
            made.quantization = schema.QuantizationParametersT()
            made.quantization.scale, made.quantization.zeroPoint = list(scale), [zero] * len(scale)
        self.last.tensors.append(made)
        return len(self.last.tensors) - 1

    def weight(self, name: str, values: Any, scale: Sequence[float] | None = None) -> int:
        array = np.asarray(values)
        index = self.tensor(name, array.shape, array.dtype.name, scale)
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        self.last.tensors[index].buffer = len(self.model.buffers) - 1
        return index

    def add(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **fields: Any) -> Any:
        number = getattr(schema.BuiltinOperator, name)
        code = schema.OperatorCodeT()
        code.builtinCode, code.deprecatedBuiltinCode, code.version = number, min(number, 127), fields.pop("version", 1)
        code.customCode = fields.pop("custom", None)
        self.model.operatorCodes.append(code)
        made = schema.OperatorT()
        made.opcodeIndex = len(self.model.operatorCodes) - 1
        made.inputs, made.outputs = list(inputs), list(outputs)
        if options:
            made.builtinOptionsType = getattr(schema.BuiltinOptions, options)
            made.builtinOptions = getattr(schema, f"{options}T")()
            for field, value in fields.items():
                setattr(made.builtinOptions, field, value)
        self.last.operators.append(made)
        return made

    def ports(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.last.inputs, self.last.outputs = list(inputs), list(outputs)

    def data(self) -> bytes:
        builder = flatbuffers.Builder(4096)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def save(self, file: Path) -> Path:
        file.write_bytes(self.data())
        return file


def chain(*names: str | None, shape: Sequence[int] = (1, 4)) -> Drawn:
    """input -> NEG -> NEG -> ... -> output, one tensor per name."""
    drawn = Drawn()
    tensors = [drawn.tensor(name, shape) for name in names]
    for before, after in pairwise(tensors):
        drawn.add("NEG", [before], [after], "NegOptions")
    drawn.ports([tensors[0]], [tensors[-1]])
    return drawn


def int8_net(seed: int = 11) -> Drawn:
    """A small convolutional network that computes in int8 throughout: what post-training quantisation gives."""
    drawn, chance = Drawn(), np.random.default_rng(seed)
    at, size, channels = drawn.tensor("picture", (1, 16, 16, 3), "int8", [1 / 128]), 16, 3
    drawn.ports([at], [])
    for layer, (width, stride) in enumerate([(8, 1), (8, 2), (16, 1), (16, 2), (24, 1), (24, 2)]):
        weights = chance.integers(-90, 90, (width, 3, 3, channels)).astype(np.int8)
        scales = [0.002 * (1 + k % 3) for k in range(width)]
        filters = drawn.weight(f"w{layer}", weights, scales)
        size = -(-size // stride)
        bias = drawn.weight(f"b{layer}", chance.integers(-300, 300, width).astype(np.int32), [s / 20 for s in scales])
        made = drawn.tensor(f"layer{layer}", (1, size, size, width), "int8", [0.05], -10)
        conv = drawn.add(
            "CONV_2D", [at, filters, bias], [made], "Conv2DOptions", version=3, strideW=stride, strideH=stride,
            dilationWFactor=1, dilationHFactor=1, fusedActivationFunction=schema.ActivationFunctionType.RELU6,
        )  # fmt: skip
        conv.builtinOptions.padding = schema.Padding.SAME
        at, channels = made, width
    axes = drawn.weight("axes", np.array([1, 2], np.int32))
    mean = drawn.tensor("mean", (1, channels), "int8", [0.05], -10)
    drawn.add("MEAN", [at, axes], [mean], "ReducerOptions", version=2)
    dense = drawn.weight("dense", chance.integers(-90, 90, (5, channels)).astype(np.int8), [0.01])
    drawn.last.outputs = [drawn.tensor("scores", (1, 5), "int8", [0.1], 3)]
    drawn.add("FULLY_CONNECTED", [mean, dense, -1], list(drawn.last.outputs), "FullyConnectedOptions", version=4)
    return drawn
