"""Cut a prepared ONNX model into a head and a tail, each a model of its own; int8 lives inside the graphs.

With int8 the head ends in QuantizeLinear and the tail begins with DequantizeLinear, so any server that speaks the Open
Inference Protocol can run the tail, and compression needs no code there. Ranges per channel are a multiplication and
an addition before and after: the operators take a scale per channel only from operator set 13 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from protocol.errors import EngineError
from split_models.codec import INT8, Affine, check_codec
from split_models.cuts import Cut
from split_models.onnx_files import onnx_module, to_bytes
from split_models.prepare_onnx import Prepared

_WIRE = "__wire"
_ANSWER = "__answer"


@frozen
class Parts:
    """The files of one cut. `crossing` names what the head gives and the tail takes, as (name, datatype, shape)."""

    head: bytes = field(repr=False)
    tail: bytes = field(repr=False)
    crossing: tuple[tuple[str, str, tuple[int, ...]], ...]


class Partitioner:
    """Cuts one prepared model again and again; keeps the name tables between cuts."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._extractor = onnx_module().utils.Extractor(prepared.proto)

    def split(self, cut: Cut, codec: str, wire: Affine | None = None, answer: Affine | None = None) -> Parts:
        """Head and tail of `cut`. int8 needs `wire`; `answer` also quantises the tail's single output."""
        check_codec(codec)
        names = [tensor.name for tensor in cut.crossing]
        head = self._extract([tensor.name for tensor in self._prepared.graph.inputs], names)
        tail = self._extract(names, [tensor.name for tensor in self._prepared.graph.outputs])
        crossing = tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in cut.crossing)
        if codec == INT8:
            if wire is None:
                raise AssertionError("int8 needs the range of the crossing tensor")
            crossing = (_quantise_seam(head, tail, cut, wire),)
            if answer is not None:
                _quantise_answer(tail, answer)
        return Parts(head=to_bytes(head), tail=to_bytes(tail), crossing=crossing)

    def with_outputs(self, names: list[str]) -> bytes:
        """The whole model with these tensors as its only outputs, for calibration."""
        return to_bytes(self._extract([tensor.name for tensor in self._prepared.graph.inputs], names))

    def _extract(self, inputs: list[str], outputs: list[str]) -> Any:
        onnx = onnx_module()
        try:
            model = self._extractor.extract_model(inputs, outputs)
            onnx.checker.check_model(model)
        except (ValueError, onnx.checker.ValidationError) as err:
            raise EngineError(
                f"the model cannot be cut at {outputs[0]!r}: {str(err)[:200]}", next_step="serve the model whole"
            ) from err
        return model


def _quantise_seam(head: Any, tail: Any, cut: Cut, wire: Affine) -> tuple[str, str, tuple[int, ...]]:
    (tensor,) = cut.crossing
    if tensor.datatype != "FP32":
        raise EngineError(f"{tensor.name!r} is {tensor.datatype}; int8 is for FP32", next_step="use the raw codec")
    name = tensor.name + _WIRE
    _append_quantize(head, tensor.name, name, tensor.shape, wire)
    _prepend_dequantize(tail, tensor.name, name, tensor.shape, wire)
    return (name, "UINT8", tensor.shape)


def _append_quantize(model: Any, source: str, target: str, shape: tuple[int, ...], affine: Affine) -> None:
    onnx = onnx_module()
    node = onnx.helper.make_node
    scale, zero = _unit(model, target, affine)
    if len(affine.scales) > 1:
        inverse = _per_channel(model, f"{target}_inverse", [1.0 / s for s in affine.scales], len(shape))
        zeros = _per_channel(model, f"{target}_zeros", affine.zeros, len(shape))
        scaled, shifted = f"{target}_scaled", f"{target}_shifted"
        model.graph.node.extend([node("Mul", [source, inverse], [scaled]), node("Add", [scaled, zeros], [shifted])])
        source, kept_source = shifted, source
    else:
        kept_source = source
    model.graph.node.append(node("QuantizeLinear", [source, scale, zero], [target]))
    kept = [value for value in model.graph.output if value.name != kept_source]
    del model.graph.output[:]
    model.graph.output.extend([*kept, onnx.helper.make_tensor_value_info(target, onnx.TensorProto.UINT8, shape)])


def _prepend_dequantize(model: Any, target: str, source: str, shape: tuple[int, ...], affine: Affine) -> None:
    onnx = onnx_module()
    node = onnx.helper.make_node
    scale, zero = _unit(model, source, affine)
    if len(affine.scales) > 1:
        scales = _per_channel(model, f"{source}_scales", affine.scales, len(shape))
        zeros = _per_channel(model, f"{source}_zeros", affine.zeros, len(shape))
        codes, shifted = f"{source}_codes", f"{source}_shifted"
        first = [
            node("DequantizeLinear", [source, scale, zero], [codes]),
            node("Sub", [codes, zeros], [shifted]),
            node("Mul", [shifted, scales], [target]),
        ]
    else:
        first = [node("DequantizeLinear", [source, scale, zero], [target])]
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*first, *rest])
    kept = [value for value in model.graph.input if value.name != target]
    del model.graph.input[:]
    model.graph.input.extend([*kept, onnx.helper.make_tensor_value_info(source, onnx.TensorProto.UINT8, shape)])


def _quantise_answer(tail: Any, answer: Affine) -> None:
    """The output keeps its name and shape and becomes UINT8, so that OIP clients ask for the same name."""
    if len(tail.graph.output) != 1:
        raise AssertionError("only a single output is quantised")
    output = tail.graph.output[0]
    name, shape = output.name, tuple(int(d.dim_value) for d in output.type.tensor_type.shape.dim)
    inner = name + _ANSWER
    for node in tail.graph.node:
        node.output[:] = [inner if made == name else made for made in node.output]
        node.input[:] = [inner if read == name else read for read in node.input]
    output.name = inner
    _append_quantize(tail, inner, name, shape, answer)


def _unit(model: Any, name: str, affine: Affine) -> tuple[str, str]:
    """Scale and zero point of the operator itself: the only pair, or 1 and 0 where the channels have theirs."""
    onnx = onnx_module()
    single = len(affine.scales) == 1
    scale, zero = f"{name}_scale", f"{name}_zero"
    model.graph.initializer.extend(
        [
            onnx.helper.make_tensor(scale, onnx.TensorProto.FLOAT, (), [affine.scales[0] if single else 1.0]),
            onnx.helper.make_tensor(zero, onnx.TensorProto.UINT8, (), [affine.zeros[0] if single else 0]),
        ]
    )
    return scale, zero


def _per_channel(model: Any, name: str, values: Sequence[float], rank: int) -> str:
    onnx = onnx_module()
    shape = (1, len(values)) + (1,) * (rank - 2)
    model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, shape, values))
    return name
