"""Operators put at the ends of a TFLite part: casts, affine codes and copies, on a ModelT that is nobody else's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from split_models.codec import FP16_MAX, Affine
from split_models.tflite_files import builtin_number, indices, schema_module, shape_of

_CAST_WITH_FP16 = 5
"""Operator version from which CAST knows half floats: an older runtime refuses the file when it loads it."""

_QUANTIZE_TO_UINT8 = 1


class Ends:
    """The main subgraph of one part, to which operators are added at its outputs and its inputs."""

    def __init__(self, model: Any) -> None:
        self._schema = schema_module()
        self._model = model
        self._graph = model.subgraphs[0]
        self._graph.inputs, self._graph.outputs = list(indices(self._graph.inputs)), list(indices(self._graph.outputs))

    def output(self, name: str) -> int:
        """Place among the outputs."""
        return self._place(self._graph.outputs, name)

    def input(self, name: str) -> int:
        """Place among the inputs."""
        return self._place(self._graph.inputs, name)

    def rename_output(self, place: int, name: str) -> None:
        """The same tensor by another name; a copy of it where it is also an input, whose name stays."""
        index = self._graph.outputs[place]
        if index in self._graph.inputs:
            self._graph.outputs[place] = self._copied(index, name, at_end=True)
        else:
            self._graph.tensors[index] = self._named(index, name)

    def rename_input(self, place: int, name: str) -> None:
        """The same tensor by another name; where it is also an output, that one keeps its name and becomes a copy."""
        index = self._graph.inputs[place]
        kept = self._graph.tensors[index].name.decode()
        self._graph.tensors[index] = self._named(index, name)
        for out, target in enumerate(self._graph.outputs):
            if target == index:
                self._graph.outputs[out] = self._copied(index, kept, at_end=True)

    def halve_output(self, place: int, name: str) -> None:
        """FP32 as FP16; what is out of range is cut off so that it stays finite."""
        index = self._graph.outputs[place]
        shape = shape_of(self._graph.tensors[index])
        for operator, options, bound in (
            ("MINIMUM", "MaximumMinimumOptions", FP16_MAX),
            ("MAXIMUM", "MaximumMinimumOptions", -FP16_MAX),
        ):
            made = self._tensor(f"{name}_{operator.lower()}", "FLOAT32", shape)
            self._add(operator, [index, self._constant(f"{name}_{operator.lower()}_bound", [bound], ())], made, options)
            index = made
        made = self._tensor(name, "FLOAT16", shape)
        self._add(
            "CAST", [index], made, "CastOptions", version=_CAST_WITH_FP16, inDataType="FLOAT32", outDataType="FLOAT16"
        )
        self._graph.outputs[place] = made

    def widen_input(self, place: int, name: str) -> None:
        """The input becomes FP16 under `name`."""
        index = self._graph.inputs[place]
        given = self._tensor(name, "FLOAT16", shape_of(self._graph.tensors[index]))
        self._add(
            "CAST",
            [given],
            index,
            "CastOptions",
            at_end=False,
            version=_CAST_WITH_FP16,
            inDataType="FLOAT16",
            outDataType="FLOAT32",
        )
        self._graph.inputs[place] = given

    def quantise_output(self, place: int, name: str, affine: Affine) -> None:
        """FP32 as UINT8 codes under `name`."""
        index = self._graph.outputs[place]
        shape = shape_of(self._graph.tensors[index])
        if len(affine.scales) > 1:
            along = affine.along(len(shape))
            scaled, shifted = (
                self._tensor(f"{name}_scaled", "FLOAT32", shape),
                self._tensor(f"{name}_shifted", "FLOAT32", shape),
            )
            self._add(
                "MUL",
                [index, self._constant(f"{name}_inverse", [1.0 / s for s in affine.scales], along)],
                scaled,
                "MulOptions",
            )
            self._add("ADD", [scaled, self._constant(f"{name}_zeros", affine.zeros, along)], shifted, "AddOptions")
            index = shifted
        made = self._tensor(name, "UINT8", shape, _unit(affine))
        self._add("QUANTIZE", [index], made, "QuantizeOptions", version=_QUANTIZE_TO_UINT8)
        self._graph.outputs[place] = made

    def dequantise_input(self, place: int, name: str, affine: Affine) -> None:
        """The input becomes UINT8 codes under `name`."""
        index = self._graph.inputs[place]
        shape = shape_of(self._graph.tensors[index])
        given = self._tensor(name, "UINT8", shape, _unit(affine))
        first = index
        if len(affine.scales) > 1:
            along = affine.along(len(shape))
            codes, shifted = (
                self._tensor(f"{name}_codes", "FLOAT32", shape),
                self._tensor(f"{name}_centred", "FLOAT32", shape),
            )
            # Each goes to the front, so the last comes first.
            self._add(
                "MUL",
                [shifted, self._constant(f"{name}_scales", affine.scales, along)],
                index,
                "MulOptions",
                at_end=False,
            )
            self._add(
                "SUB",
                [codes, self._constant(f"{name}_zeros", affine.zeros, along)],
                shifted,
                "SubOptions",
                at_end=False,
            )
            first = codes
        self._add("DEQUANTIZE", [given], first, "DequantizeOptions", at_end=False)
        self._graph.inputs[place] = given

    # -- parts of the above ------------------------------------------------------------------------------------------

    def _place(self, ports: Sequence[int], name: str) -> int:
        return next(place for place, index in enumerate(ports) if self._graph.tensors[index].name.decode() == name)

    def _named(self, index: int, name: str) -> Any:
        import copy

        made = copy.copy(self._graph.tensors[index])
        made.name = name.encode()
        return made

    def _copied(self, index: int, name: str, *, at_end: bool) -> int:
        """A RESHAPE to the same shape: the one operator that copies every element type."""
        tensor = self._named(index, name)
        tensor.buffer = 0
        self._graph.tensors.append(tensor)
        made = len(self._graph.tensors) - 1
        shape = shape_of(tensor)
        sizes = self._constant(f"{name}_sizes", shape, (len(shape),), "INT32")
        self._add("RESHAPE", [index, sizes], made, "ReshapeOptions", at_end=at_end, newShape=list(shape))
        return made

    def _tensor(self, name: str, kind: str, shape: Sequence[int], quantisation: tuple[float, int] | None = None) -> int:
        tensor = self._schema.TensorT()
        tensor.name, tensor.shape, tensor.hasRank = name.encode(), list(shape), True
        tensor.type = getattr(self._schema.TensorType, kind)
        if quantisation is not None:
            tensor.quantization = self._schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [quantisation[0]], [quantisation[1]]
        self._graph.tensors.append(tensor)
        return len(self._graph.tensors) - 1

    def _constant(self, name: str, values: Sequence[float], shape: Sequence[int], kind: str = "FLOAT32") -> int:
        index = self._tensor(name, kind, shape)
        buffer = self._schema.BufferT()
        buffer.data = struct.pack(f"<{len(values)}{'f' if kind == 'FLOAT32' else 'i'}", *values)
        self._model.buffers.append(buffer)
        self._graph.tensors[index].buffer = len(self._model.buffers) - 1
        return index

    def _add(
        self,
        name: str,
        inputs: Sequence[int],
        output: int,
        options: str,
        *,
        at_end: bool = True,
        version: int = 1,
        **fields: Any,
    ) -> None:
        operator = self._schema.OperatorT()
        operator.opcodeIndex, operator.inputs, operator.outputs = self._code(name, version), list(inputs), [output]
        operator.builtinOptionsType = getattr(self._schema.BuiltinOptions, options)
        operator.builtinOptions = getattr(self._schema, f"{options}T")()
        for field, value in fields.items():
            kind = getattr(self._schema.TensorType, value) if isinstance(value, str) else value
            setattr(operator.builtinOptions, field, kind)
        self._graph.operators.insert(len(self._graph.operators) if at_end else 0, operator)

    def _code(self, name: str, version: int) -> int:
        number = getattr(self._schema.BuiltinOperator, name)
        for place, code in enumerate(self._model.operatorCodes):
            if (builtin_number(code), code.version, code.customCode) == (number, version, None):
                return place
        code = self._schema.OperatorCodeT()
        code.builtinCode, code.deprecatedBuiltinCode, code.version = number, min(number, 127), version
        self._model.operatorCodes.append(code)
        return len(self._model.operatorCodes) - 1


def _unit(affine: Affine) -> tuple[float, int]:
    """Scale and zero point of the operator itself: the only pair, or 1 and 0 where the channels have theirs."""
    return (affine.scales[0], affine.zeros[0]) if len(affine.scales) == 1 else (1.0, 0)
