"""A part of a TFLite model as a model of its own: only the tensors, weights, operators and bodies that it needs.

Constants are no edge of the cut: whoever needs one gets it, with the operators that make it, so chains such as
DENSIFY and DEQUANTIZE stand on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from protocol.errors import EngineError
from split_models.tflite_files import body_fields, indices, reachable, schema_module


@frozen
class Needed:
    """Operators (by index, in execution order) that make the outputs from the inputs."""

    operators: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def needed(graph: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Needed:
    """Walk back from `outputs` to `inputs` (tensor indices of the main subgraph).

    Raises EngineError when the outputs also need an original input that is not among `inputs`.
    """
    maker = {made: place for place, operator in enumerate(graph.operators) for made in indices(operator.outputs)}
    given, original = set(inputs), set(indices(graph.inputs))
    found: set[int] = set()
    open_ = [index for index in outputs if index not in given]
    seen = set(open_)
    while open_:
        index = open_.pop()
        if index in original:
            raise EngineError(
                f"what follows the cut also reads the model's input {_name(graph, index)!r}",
                next_step="cut elsewhere, or serve the model whole",
            )
        if index not in maker:  # a weight
            continue
        found.add(maker[index])
        reads = [
            i for i in indices(graph.operators[maker[index]].inputs) if i >= 0 and i not in given and i not in seen
        ]
        seen.update(reads)
        open_.extend(reads)
    return Needed(tuple(sorted(found)), tuple(inputs), tuple(outputs))


def extract(model: Any, part: Needed) -> Any:
    """A new ModelT; the old one and its tables stay as they are."""
    main = model.subgraphs[0]
    chosen = [main.operators[place] for place in part.operators]
    others = reachable(model, chosen)
    place_of = {old: new for new, old in enumerate((0, *others))}
    made = schema_module().ModelT()
    made.version, made.buffers, made.operatorCodes = model.version, [_Empty()], []
    weights, codes = _Moved(model.buffers, made.buffers, {0: 0}), _Moved(model.operatorCodes, made.operatorCodes, {})
    made.subgraphs = [_narrowed(main, chosen, part)]
    made.subgraphs += [copy.copy(model.subgraphs[index]) for index in others]
    for graph in made.subgraphs:
        graph.tensors = [_with_buffer(tensor, weights.to(tensor.buffer)) for tensor in graph.tensors]
        graph.operators = [_moved_operator(operator, codes, place_of) for operator in graph.operators]
    made.metadata = [_with_buffer(entry, weights.to(entry.buffer)) for entry in model.metadata]
    return made


def _narrowed(graph: Any, operators: Sequence[Any], part: Needed) -> Any:
    """The main subgraph with these operators, and the tensors they touch counted anew in their old order."""
    touched = {*part.inputs, *part.outputs}
    for operator in operators:
        for values in (operator.inputs, operator.outputs, operator.intermediates):
            touched.update(indices(values))
    kept = sorted(index for index in touched if index >= 0)
    moved = {old: new for new, old in enumerate(kept)} | {-1: -1}
    made = copy.copy(graph)
    made.tensors = [graph.tensors[index] for index in kept]
    made.inputs, made.outputs = [moved[i] for i in part.inputs], [moved[i] for i in part.outputs]
    made.operators = []
    for operator in operators:
        other = copy.copy(operator)
        for field in ("inputs", "outputs", "intermediates"):
            values = getattr(operator, field)
            setattr(other, field, None if values is None else [moved[i] for i in indices(values)])
        made.operators.append(other)
    return made


def _moved_operator(operator: Any, codes: _Moved, place_of: Mapping[int, int]) -> Any:
    made = copy.copy(operator)
    made.opcodeIndex = codes.to(operator.opcodeIndex)
    made.debugMetadataIndex = -1
    made.builtinOptions, made.builtinOptions2 = copy.copy(made.builtinOptions), copy.copy(made.builtinOptions2)
    for options, field in body_fields(made):
        value = getattr(options, field)
        if isinstance(value, int):
            setattr(options, field, place_of.get(value, value))
        elif value is not None:
            setattr(options, field, [place_of.get(index, index) for index in indices(value)])
    return made


class _Moved:
    """Entries of one table that went over to another, each once, in the order of first use."""

    def __init__(self, source: Sequence[Any], target: list[Any], places: dict[int, int]) -> None:
        self._source = source
        self._target = target
        self._places = places

    def to(self, index: int) -> int:
        if index not in self._places:
            self._places[index] = len(self._target)
            self._target.append(self._source[index])
        return self._places[index]


class _Empty:
    """Buffer 0, which by convention holds nothing."""

    data = None
    offset = 0
    size = 0


def _with_buffer(holder: Any, place: int) -> Any:
    made = copy.copy(holder)
    made.buffer = place
    return made


def _name(graph: Any, index: int) -> str:
    return (graph.tensors[index].name or b"").decode("utf-8", "replace")[:128] or str(index)
