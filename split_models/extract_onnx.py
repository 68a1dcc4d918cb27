"""Take a part out of an ONNX graph by the names at its borders. Bodies stay whole with what they capture.

onnx.utils.extract_model follows node.input alone: it loses the outer values and weights that the bodies of If, Loop and
Scan read, and the metadata. Weights are taken over as they are, so references to side files stay references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.errors import EngineError
from split_models.onnx_files import captured_names, onnx_module, tensor_bytes

SENT = "__sent"
"""Added to the name of an input or output of the whole model that crosses: one name cannot be both ends of a part."""


class Extractor:
    """One model's name tables, kept between extractions."""

    def __init__(self, model: Any) -> None:
        self._model = model
        graph = model.graph
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
        self._maker = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
        self._reads = [_reads(node) for node in graph.node]

    def extract(self, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
        """The nodes that `outputs` need, from `inputs` on, as a model of its own.

        Raises EngineError when a name has no known shape, or when the outputs need an input that is not named.
        """
        onnx = onnx_module()
        kept = self._needed(inputs, outputs)
        read = {name for index in kept for name in self._reads[index]} | set(outputs)
        made = {name for index in kept for name in self._model.graph.node[index].output}
        border = {*inputs, *outputs}
        model = onnx.ModelProto(ir_version=self._model.ir_version, producer_name="midstream")
        model.opset_import.extend(self._model.opset_import)
        model.metadata_props.extend(self._model.metadata_props)
        model.functions.extend(self._model.functions)
        graph = model.graph
        graph.name = self._model.graph.name or "part"
        graph.node.extend(self._model.graph.node[index] for index in kept)
        graph.initializer.extend(weight for name, weight in self._weights.items() if name in read)
        graph.input.extend(self._value(name) for name in inputs)
        graph.output.extend(self._value(name) for name in outputs)
        graph.value_info.extend(value for name, value in self._values.items() if name in made and name not in border)
        return model

    def _needed(self, inputs: Sequence[str], outputs: Sequence[str]) -> list[int]:
        given, waiting = set(inputs), list(outputs)
        needed: set[int] = set()
        while waiting:
            name = waiting.pop()
            if name in given or name in self._weights:
                continue
            index = self._maker.get(name)
            if index is None:
                raise EngineError(
                    f"the part that gives {outputs[0]!r} also needs {name!r}", next_step="serve the model whole"
                )
            if index not in needed:
                needed.add(index)
                waiting += self._reads[index]
        return sorted(needed)

    def _value(self, name: str) -> Any:
        found = self._values.get(name)
        if found is None:
            raise EngineError(f"{name!r} has no known shape, so no part can end there", next_step="serve it whole")
        return found


def rename_output(model: Any, name: str, sent: str) -> None:
    """The part also gives `name`, an input of its own or one of its tensors, under the name `sent`, and only so."""
    output = next(value for value in model.graph.output if value.name == name)
    output.name = sent
    model.graph.node.append(onnx_module().helper.make_node("Identity", [name], [sent]))


def rename_input(model: Any, name: str, sent: str) -> None:
    """The part takes `sent` where it took `name`."""
    taken = next(value for value in model.graph.input if value.name == name)
    taken.name = sent
    nodes = [onnx_module().helper.make_node("Identity", [sent], [name]), *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def weight_bytes(model: Any) -> int:
    """Bytes of all weights of a part, those in side files included."""
    return sum(tensor_bytes(tensor) for tensor in model.graph.initializer)


def _reads(node: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(name for name in node.input if name), *captured_names(node)]))
