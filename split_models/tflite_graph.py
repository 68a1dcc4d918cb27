"""The neutral graph of a checked TFLite model: which tensors are computed, how large they are, what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from attrs import frozen

from protocol.errors import EngineError
from split_models.graph import Graph, GraphNode, GraphTensor, check_order
from split_models.tflite_files import (
    datatype_name,
    indices,
    operator_name,
    reachable,
    shape_of,
    signature_of,
    size_bytes,
)

DATATYPES: Mapping[str, str] = {
    "FLOAT32": "FP32", "FLOAT16": "FP16", "FLOAT64": "FP64", "BOOL": "BOOL", "INT8": "INT8", "INT16": "INT16",
    "INT32": "INT32", "INT64": "INT64", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64",
}  # fmt: skip
"""OIP name of the element types that a request can carry; tensors of others are never cut."""

_STATE = ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "CALL_ONCE", "HASHTABLE")
_CHANCE = ("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL", "STABLEHLO_RNG_BIT_GENERATOR")

_SIZED_BY: Mapping[str, tuple[int, ...]] = {
    "RESHAPE": (1,), "RESIZE_BILINEAR": (1,), "RESIZE_NEAREST_NEIGHBOR": (1,), "PAD": (1,), "PADV2": (1,),
    "MIRROR_PAD": (1,), "SLICE": (1, 2), "STRIDED_SLICE": (1, 2, 3), "TILE": (1,), "BROADCAST_TO": (1,), "FILL": (0,),
    "RANGE": (0, 1, 2), "TOPK_V2": (1,), "TRANSPOSE_CONV": (0,), "TRANSPOSE": (1,), "EXPAND_DIMS": (1,),
    "MEAN": (1,), "SUM": (1,), "REDUCE_MAX": (1,), "REDUCE_MIN": (1,), "REDUCE_PROD": (1,), "REDUCE_ANY": (1,),
    "REDUCE_ALL": (1,), "ARG_MAX": (1,), "ARG_MIN": (1,), "ONE_HOT": (1,), "SPACE_TO_BATCH_ND": (1, 2),
    "BATCH_TO_SPACE_ND": (1, 2), "SPLIT": (0,), "SPLIT_V": (1, 2), "SCATTER_ND": (2,), "CONV_3D_TRANSPOSE": (0,),
    "BROADCAST_ARGS": (0, 1), "DYNAMIC_UPDATE_SLICE": (), "RANDOM_UNIFORM": (0,), "RANDOM_STANDARD_NORMAL": (0,),
    "SPARSE_TO_DENSE": (1,), "UNSORTED_SEGMENT_SUM": (2,), "UNSORTED_SEGMENT_MAX": (2,),
    "UNSORTED_SEGMENT_MIN": (2,), "UNSORTED_SEGMENT_PROD": (2,), "CUMSUM": (), "MATRIX_SET_DIAG": (),
}  # fmt: skip
"""Inputs whose values give the shape of an operator's output: it is known beforehand only where they are constant."""

_SIZED_BY_DATA = ("WHERE", "UNIQUE", "NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5", "SEGMENT_SUM", "BUCKETIZE")


_KEEPS_VALUES = ("CAST", "RESHAPE", "SQUEEZE", "EXPAND_DIMS")
_LOOKS_UP = ("GATHER", "EMBEDDING_LOOKUP")


@frozen
class Analysis:
    """Of the main subgraph: tensors that hold the same values in every run, those without a shape known beforehand,
    and the operators (by index) that do no more than make constants."""

    constant: frozenset[int]
    unsized: frozenset[int]
    constant_makers: frozenset[int]


def analyse(model: Any) -> Analysis:
    """Walk the operators once, in execution order. Raises EngineError for graphs that keep state or are incomplete."""
    graph = model.subgraphs[0]
    _refuse_state(model)
    made = {index for operator in graph.operators for index in indices(operator.outputs)}
    inputs = set(indices(graph.inputs))
    constant = {index for index in range(len(graph.tensors)) if index not in made and index not in inputs}
    unsized = {index for index, tensor in enumerate(graph.tensors) if _free(tensor) and index not in inputs}
    makers: set[int] = set()
    for place, operator in enumerate(graph.operators):
        name = operator_name(model, operator)
        reads = [index for index in indices(operator.inputs) if index >= 0]
        _need_data(model, graph, [index for index in reads if index in constant and index not in made], name)
        if _makes_constants(name) and all(index in constant for index in reads):
            constant.update(indices(operator.outputs))
            makers.add(place)
        elif _sizes_by_values(name, operator, constant) or any(index in unsized for index in reads):
            unsized.update(indices(operator.outputs))
    return Analysis(frozenset(constant), frozenset(unsized), frozenset(makers))


def graph_of(model: Any, names: Sequence[str], analysis: Analysis) -> Graph:
    """The graph, tensors under `names` (one per tensor of the main subgraph). Raises EngineError."""
    main = model.subgraphs[0]
    tensors: dict[str, GraphTensor] = {}
    for index, tensor in enumerate(main.tensors):
        datatype = DATATYPES.get(datatype_name(tensor.type))
        shape = shape_of(tensor)
        ranked = bool(shape) or bool(tensor.hasRank) or index in indices(main.inputs)
        if index not in analysis.unsized and datatype is not None and ranked and all(shape):
            tensors[names[index]] = GraphTensor(names[index], datatype, shape)
    nodes = tuple(
        GraphNode(
            op=operator_name(model, operator),
            inputs=tuple(names[i] for i in indices(operator.inputs) if i >= 0 and i not in analysis.constant),
            outputs=tuple(names[i] for i in indices(operator.outputs)),
            flops=_flops(operator_name(model, operator), main, operator),
            weight_bytes=sum(size_bytes(main.tensors[i]) for i in indices(operator.inputs) if i in analysis.constant),
        )
        for place, operator in enumerate(main.operators)
        if place not in analysis.constant_makers
    )
    graph = Graph(
        inputs=tuple(_need(tensors, names[index]) for index in indices(main.inputs)),
        outputs=tuple(_need(tensors, names[index]) for index in indices(main.outputs)),
        nodes=nodes,
        tensors=tensors,
    )
    check_order(graph)
    return graph


def index_bounds(model: Any) -> dict[str, int]:
    """Rows of the weight table that an integer input indexes, by input: token ids, positions, kinds.

    An input is followed through what keeps its values: CAST, RESHAPE, SQUEEZE, EXPAND_DIMS.
    """
    main = model.subgraphs[0]
    origin = {index: main.tensors[index].name.decode() for index in indices(main.inputs)}
    constant = analyse(model).constant
    bounds: dict[str, int] = {}
    for operator in main.operators:
        name, reads = operator_name(model, operator), indices(operator.inputs)
        if name in _KEEPS_VALUES and reads[:1] and reads[0] in origin:
            origin[indices(operator.outputs)[0]] = origin[reads[0]]
        if name in _LOOKS_UP and len(reads) > 1:
            table, ids = (reads[0], reads[1]) if name == "GATHER" else (reads[1], reads[0])
            axis = operator.builtinOptions.axis if name == "GATHER" and operator.builtinOptions is not None else 0
            shape = shape_of(main.tensors[table]) if table in constant else ()
            if ids in origin and -len(shape) <= axis < len(shape):
                bounds[origin[ids]] = min(shape[axis], bounds.get(origin[ids], shape[axis]))
    return bounds


def _need(tensors: Mapping[str, GraphTensor], name: str) -> GraphTensor:
    if name not in tensors:
        raise EngineError(
            f"{name!r} has no fixed shape, or elements that no request can carry", next_step="serve the model whole"
        )
    return tensors[name]


def _free(tensor: Any) -> bool:
    return any(size < 0 for size in signature_of(tensor))


def _makes_constants(name: str) -> bool:
    """Whether constant inputs give constant outputs. A custom operator may do anything."""
    return name not in _CHANCE and not name.startswith("CUSTOM:")


def _sizes_by_values(name: str, operator: Any, constant: set[int]) -> bool:
    if name in _SIZED_BY_DATA:
        return True
    reads = indices(operator.inputs)
    return any(place < len(reads) and reads[place] not in constant for place in _SIZED_BY.get(name, ()))


def _refuse_state(model: Any) -> None:
    """A state that stays from run to run would be on one side of the cut, and lost when the arm changes."""
    main = model.subgraphs[0]
    for graph in [main, *(model.subgraphs[index] for index in reachable(model, main.operators))]:
        names = (operator_name(model, operator) for operator in graph.operators)
        stateful = next((name for name in names if name.startswith(_STATE)), None)
        if stateful is None and any(tensor.isVariable for tensor in graph.tensors):
            stateful = "a variable tensor"
        if stateful is not None:
            raise EngineError(
                f"{stateful} keeps a state between requests; such graphs are not cut", next_step="serve the model whole"
            )


def _need_data(model: Any, graph: Any, constants: Sequence[int], name: str) -> None:
    for index in constants:
        tensor = graph.tensors[index]
        data = model.buffers[tensor.buffer].data
        if (data is None or not len(data)) and all(shape_of(tensor)):
            raise EngineError(
                f"{name} reads tensor {index}, which nothing makes and which holds no data",
                next_step="export the model again",
            )


def _flops(name: str, graph: Any, operator: Any) -> float:
    """Two per multiply-add for convolutions and products, one per output element elsewhere."""
    shapes = [shape_of(graph.tensors[index]) if index >= 0 else () for index in indices(operator.inputs)]
    out = sum(prod(shape_of(graph.tensors[index])) for index in indices(operator.outputs)[:1])
    weights = shapes[1] if len(shapes) > 1 else ()
    if name in ("CONV_2D", "FULLY_CONNECTED") and weights:  # output channels first
        return 2.0 * out * prod(weights[1:])
    if name == "DEPTHWISE_CONV_2D" and len(weights) == 4:
        return 2.0 * out * weights[1] * weights[2]
    if name == "CONV_3D" and weights:  # output channels last
        return 2.0 * out * prod(weights[:-1])
    if name == "TRANSPOSE_CONV" and len(shapes) > 2:
        return 2.0 * prod(shapes[2]) * prod(weights[:3])
    if name == "BATCH_MATMUL" and shapes and shapes[0]:
        return 2.0 * out * shapes[0][-1]
    return float(out)
