"""Cut a prepared ONNX model into a head and a tail, each a model of its own; fp16 and int8 live inside the graphs.

With int8 the head ends in QuantizeLinear and the tail begins with DequantizeLinear, so any server that speaks the Open
Inference Protocol can run the tail, and compression needs no code there. Ranges per channel are a multiplication and
an addition before and after: the operators take a scale per channel only from operator set 13 on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from protocol.errors import EngineError
from split_models.codec import FP16, FP16_MAX, INT8, RAW, Affine, check_codec
from split_models.cuts import Cut
from split_models.extract_onnx import SENT, Extractor, rename_input, rename_output
from split_models.graph import GraphTensor
from split_models.onnx_files import onnx_module, to_bytes
from split_models.prepare_onnx import Prepared, self_contained

_WIRE = "__wire"
_ANSWER = "__answer"


@frozen
class Parts:
    """The files of one cut. `crossing` names what the head gives and the tail takes, as (name, datatype, shape)."""

    head: bytes = field(repr=False)
    tail: bytes = field(repr=False)
    crossing: tuple[tuple[str, str, tuple[int, ...]], ...]


class Partitioner:
    """Cuts one prepared model again and again; keeps the name tables between cuts.

    by_reference: parts refer to the model's side files instead of holding their weights, so that they only load beside
    those; without it each part is a file of its own, and EngineError says when one would be too large for that.
    """

    def __init__(self, prepared: Prepared, by_reference: bool = False) -> None:
        self._prepared = prepared
        self._by_reference = by_reference
        self._extractor = Extractor(prepared.proto)
        self._ends = {tensor.name for tensor in (*prepared.graph.inputs, *prepared.graph.outputs)}

    def split(
        self, cut: Cut, codec: str, affine: Mapping[str, Affine] | None = None, answer: Affine | None = None
    ) -> Parts:
        """Head and tail of `cut`. int8 needs the `affine` of each FP32 tensor that crosses, by name.

        With int8 `answer` also quantises the tail's single output. Tensors that are not FP32 cross as they are.
        """
        check_codec(codec)
        names = [tensor.name for tensor in cut.crossing]
        head = self._extract([tensor.name for tensor in self._prepared.graph.inputs], names)
        tail = self._extract(names, [tensor.name for tensor in self._prepared.graph.outputs])
        crossing = tuple(
            self._sent(head, tail, tensor, _seam(head, tail, tensor, codec, affine or {})) for tensor in cut.crossing
        )
        if codec == INT8 and answer is not None:
            _quantise_answer(tail, answer)
        return Parts(head=to_bytes(head), tail=to_bytes(tail), crossing=crossing)

    def with_outputs(self, names: list[str]) -> bytes:
        """The whole model with these tensors as its only outputs, for calibration."""
        return to_bytes(self._extract([tensor.name for tensor in self._prepared.graph.inputs], names))

    def _sent(
        self, head: Any, tail: Any, tensor: GraphTensor, seam: tuple[str, str, tuple[int, ...]]
    ) -> tuple[str, str, tuple[int, ...]]:
        """The seam of an input or output of the whole model that crosses as it is gets a name of its own."""
        name, datatype, shape = seam
        if name != tensor.name or name not in self._ends:
            return seam
        rename_output(head, name, name + SENT)
        rename_input(tail, name, name + SENT)
        return name + SENT, datatype, shape

    def _extract(self, inputs: list[str], outputs: list[str]) -> Any:
        onnx = onnx_module()
        if self._by_reference:
            return self._extractor.extract(inputs, outputs)
        try:
            model = self_contained(self._extractor.extract(inputs, outputs), self._prepared.folder)
            onnx.checker.check_model(model)
        except (ValueError, onnx.checker.ValidationError) as err:
            raise EngineError(
                f"the model cannot be cut at {outputs[0]!r}: {str(err)[:200]}", next_step="serve the model whole"
            ) from err
        return model


def _seam(
    head: Any, tail: Any, tensor: GraphTensor, codec: str, affine: Mapping[str, Affine]
) -> tuple[str, str, tuple[int, ...]]:
    """Put one tensor's wire form at the end of the head and at the beginning of the tail."""
    name = tensor.name + _WIRE
    if codec == RAW or tensor.datatype != "FP32":
        return tensor.name, tensor.datatype, tensor.shape
    if codec == FP16:
        _append_halving(head, tensor.name, name, tensor.shape)
        _prepend_widening(tail, tensor.name, name, tensor.shape)
        return name, "FP16", tensor.shape
    if tensor.name not in affine:
        raise AssertionError(f"int8 needs the range of {tensor.name!r}")
    _append_quantize(head, tensor.name, name, tensor.shape, affine[tensor.name])
    _prepend_dequantize(tail, tensor.name, name, tensor.shape, affine[tensor.name])
    return name, "UINT8", tensor.shape


def _append_halving(head: Any, source: str, target: str, shape: tuple[int, ...]) -> None:
    """Clip, so that a large value stays finite, and Cast."""
    onnx = onnx_module()
    node, clipped = onnx.helper.make_node, f"{target}_clipped"
    version = next((opset.version for opset in head.opset_import if opset.domain == ""), 1)
    if version < 11:
        clip = node("Clip", [source], [clipped], min=-FP16_MAX, max=FP16_MAX)
    else:
        ends = [f"{target}_min", f"{target}_max"]
        for end, value in zip(ends, (-FP16_MAX, FP16_MAX), strict=True):
            head.graph.initializer.append(onnx.helper.make_tensor(end, onnx.TensorProto.FLOAT, (), [value]))
        clip = node("Clip", [source, *ends], [clipped])
    head.graph.node.extend([clip, node("Cast", [clipped], [target], to=onnx.TensorProto.FLOAT16)])
    _replace(head.graph.output, source, target, onnx.TensorProto.FLOAT16, shape)


def _prepend_widening(tail: Any, target: str, source: str, shape: tuple[int, ...]) -> None:
    onnx = onnx_module()
    tail.graph.node.insert(0, onnx.helper.make_node("Cast", [source], [target], to=onnx.TensorProto.FLOAT))
    _replace(tail.graph.input, target, source, onnx.TensorProto.FLOAT16, shape)


def _replace(values: Any, old: str, new: str, kind: int, shape: tuple[int, ...]) -> None:
    """Put a port in another's place; the others keep theirs."""
    onnx = onnx_module()
    for value in values:
        if value.name == old:
            value.CopyFrom(onnx.helper.make_tensor_value_info(new, kind, shape))
            return
    raise AssertionError(f"there is no port {old!r}")


def _append_quantize(model: Any, source: str, target: str, shape: tuple[int, ...], affine: Affine) -> None:
    onnx = onnx_module()
    node = onnx.helper.make_node
    scale, zero = _unit(model, target, affine)
    if len(affine.scales) > 1:
        inverse = _per_channel(model, f"{target}_inverse", [1.0 / s for s in affine.scales], shape, affine)
        zeros = _per_channel(model, f"{target}_zeros", affine.zeros, shape, affine)
        scaled, shifted = f"{target}_scaled", f"{target}_shifted"
        model.graph.node.extend([node("Mul", [source, inverse], [scaled]), node("Add", [scaled, zeros], [shifted])])
        kept, source = source, shifted
    else:
        kept = source
    model.graph.node.append(node("QuantizeLinear", [source, scale, zero], [target]))
    _replace(model.graph.output, kept, target, onnx.TensorProto.UINT8, shape)


def _prepend_dequantize(model: Any, target: str, source: str, shape: tuple[int, ...], affine: Affine) -> None:
    onnx = onnx_module()
    node = onnx.helper.make_node
    scale, zero = _unit(model, source, affine)
    if len(affine.scales) > 1:
        scales = _per_channel(model, f"{source}_scales", affine.scales, shape, affine)
        zeros = _per_channel(model, f"{source}_zeros", affine.zeros, shape, affine)
        codes, shifted = f"{source}_codes", f"{source}_shifted"
        first = [
            node("DequantizeLinear", [source, scale, zero], [codes]),
            node("Sub", [codes, zeros], [shifted]),
            node("Mul", [shifted, scales], [target]),
        ]
    else:
        first = [node("DequantizeLinear", [source, scale, zero], [target])]
    for index, operator in enumerate(first):
        model.graph.node.insert(index, operator)
    _replace(model.graph.input, target, source, onnx.TensorProto.UINT8, shape)


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


def _per_channel(model: Any, name: str, values: Sequence[float], shape: tuple[int, ...], affine: Affine) -> str:
    onnx = onnx_module()
    along = affine.along(len(shape))
    model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, along, values))
    return name
