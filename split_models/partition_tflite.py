"""Cut a prepared TFLite model into a head and a tail, each a file of its own; fp16 and int8 live inside them.

With int8 the head ends in QUANTIZE and the tail begins with DEQUANTIZE, with fp16 both have a CAST, so any server that
runs TFLite files can run the tail. Models that compute in int8 hand their tensors over as they are, scale and zero
point included: the raw codec sends a quarter of what their float twins would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import EngineError, Unsupported
from split_models.codec import FP16, INT8, RAW, Affine, check_codec
from split_models.cuts import Cut
from split_models.graph import GraphTensor
from split_models.partition_onnx import Parts
from split_models.prepare_tflite import Prepared
from split_models.tflite_extract import extract, needed
from split_models.tflite_files import indices, to_bytes
from split_models.tflite_graph import analyse
from split_models.tflite_ops import Ends

_WIRE = "__wire"
_SENT = "__sent"
_ANSWER = "__answer"


class Partitioner:
    """Cuts one prepared model again and again; keeps the name tables between cuts."""

    def __init__(self, prepared: Prepared) -> None:
        self._model = prepared.model
        self._graph = prepared.graph
        self._index = {tensor.name.decode(): place for place, tensor in enumerate(self._model.subgraphs[0].tensors)}
        self._constant_makers = analyse(self._model).constant_makers
        self._ends = {tensor.name for tensor in (*prepared.graph.inputs, *prepared.graph.outputs)}

    def split(
        self, cut: Cut, codec: str, affine: Mapping[str, Affine] | None = None, answer: Affine | None = None
    ) -> Parts:
        """Head and tail of `cut`. int8 needs the `affine` of each FP32 tensor that crosses, by name.

        With int8 `answer` also quantises the tail's single output. Tensors that are not FP32 cross as they are. Raises
        EngineError where the graph does not come apart, and Unsupported when no tensor of the cut takes the codec.
        """
        check_codec(codec)
        if codec != RAW and all(tensor.datatype != "FP32" for tensor in cut.crossing):
            raise Unsupported(f"cut {cut.id} has no FP32 tensor", next_step="use the raw codec", field="codec")
        head, tail = self._halves(self._places([tensor.name for tensor in cut.crossing]))
        ends, begins = Ends(head), Ends(tail)
        crossing = tuple(self._seam(ends, begins, tensor, codec, affine or {}) for tensor in cut.crossing)
        if codec == INT8 and answer is not None:
            self._quantise_answer(begins, answer)
        return Parts(head=to_bytes(head), tail=to_bytes(tail), crossing=crossing)

    def with_outputs(self, names: Sequence[str]) -> bytes:
        """The whole model with these tensors as its only outputs, for calibration."""
        main = self._model.subgraphs[0]
        return to_bytes(extract(self._model, needed(main, indices(main.inputs), self._places(names))))

    def _places(self, names: Sequence[str]) -> list[int]:
        missing = next((name for name in names if name not in self._index), None)
        if missing is not None:
            raise EngineError(f"the model has no tensor {missing!r}", next_step="prepare the model again")
        return [self._index[name] for name in names]

    def _halves(self, crossing: Sequence[int]) -> tuple[Any, Any]:
        main = self._model.subgraphs[0]
        head = needed(main, indices(main.inputs), crossing)
        tail = needed(main, crossing, indices(main.outputs))
        twice = (set(head.operators) & set(tail.operators)) - self._constant_makers
        if twice or not set(tail.operators) - self._constant_makers:
            what = f"{len(twice)} operators would run on both sides" if twice else "nothing would be left for the tail"
            raise EngineError(f"the model does not come apart there: {what}", next_step="cut elsewhere")
        return extract(self._model, head), extract(self._model, tail)

    def _seam(
        self, ends: Ends, begins: Ends, tensor: GraphTensor, codec: str, affine: Mapping[str, Affine]
    ) -> tuple[str, str, tuple[int, ...]]:
        """Put one tensor's wire form at the end of the head and at the beginning of the tail."""
        name, out, into = tensor.name, ends.output(tensor.name), begins.input(tensor.name)
        if name in self._ends:  # the model's own inputs and outputs keep their names on their side
            name += _SENT
            ends.rename_output(out, name)
            begins.rename_input(into, name)
        if codec == RAW or tensor.datatype != "FP32":
            return name, tensor.datatype, tensor.shape
        name += _WIRE
        if codec == FP16:
            ends.halve_output(out, name)
            begins.widen_input(into, name)
            return name, "FP16", tensor.shape
        if tensor.name not in affine:
            raise AssertionError(f"int8 needs the range of {tensor.name!r}")
        ends.quantise_output(out, name, affine[tensor.name])
        begins.dequantise_input(into, name, affine[tensor.name])
        return name, "UINT8", tensor.shape

    def _quantise_answer(self, tail: Ends, answer: Affine) -> None:
        """The output keeps its name and shape and becomes UINT8, so that OIP clients ask for the same name."""
        if len(self._graph.outputs) != 1:
            raise AssertionError("only a single output is quantised")
        name = self._graph.outputs[0].name
        tail.rename_output(0, name + _ANSWER)
        tail.quantise_output(0, name, answer)
