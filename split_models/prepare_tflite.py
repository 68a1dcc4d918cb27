"""Make a TFLite model cuttable: names that are unique, shapes that are fixed, and nothing that no part needs.

Where all shapes are stored in the file this is pure Python. Where a dimension is free, or another size is asked for,
the runtime works the shapes out in a child process, so that a crash of it ends the child only.
"""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from engines.model_inputs import unique_names
from engines.tflite_shapes import shapes_by_runtime
from protocol.errors import ConfigError, EngineError
from split_models.graph import Graph
from split_models.input_shapes import InputPort
from split_models.tflite_extract import extract, needed
from split_models.tflite_files import (
    datatype_name,
    indices,
    operator_name,
    read_model,
    shape_of,
    signature_of,
    to_bytes,
)
from split_models.tflite_graph import DATATYPES, analyse, graph_of

MAX_FOLDS = 64
"""Rounds of replacing SHAPE by its value; each may give the next its shape."""


MAX_NAME = 512
"""Characters of a tensor's name; the longest that was seen has 97."""


@frozen
class Prepared:
    """A prepared model: `data` is the file's bytes, `digest` their sha256, `model` the same as a ModelT.

    Tensors are found by index in TFLite and their names may repeat or be empty; here each has a name of its own, the
    file's where that was possible. `names` maps them to the names in the original file.
    """

    data: bytes = field(repr=False)
    digest: str
    graph: Graph = field(repr=False)
    model: Any = field(repr=False)
    names: Mapping[str, str] = field(repr=False, factory=dict)


def prepare(file: Path, input_shapes: Mapping[str, tuple[int, ...]]) -> Prepared:
    """The prepared form of a TFLite file.

    Raises EngineError (not a model, damaged, keeps a state, shapes do not fit) or ConfigError (no such input, no schema
    module on this machine).
    """
    model = read_model(file)
    names = _name_tensors(model)
    wanted = _wanted_shapes(model, input_shapes)
    if wanted is not None:
        _fix_shapes(model, wanted)
    _fold_shapes(model)
    whole = _without_the_unused(model)
    kept = [tensor.name.decode() for tensor in whole.subgraphs[0].tensors]
    graph = graph_of(whole, kept, analyse(whole))
    data = to_bytes(whole)
    return Prepared(
        data=data,
        digest=hashlib.sha256(data).hexdigest(),
        graph=graph,
        model=whole,
        names={name: names[name] for name in kept},
    )


def inputs_of(file: Path) -> Sequence[InputPort]:
    """The inputs of a TFLite file. Raises EngineError when it is none, or takes what is no tensor of numbers."""
    model = read_model(file)
    _name_tensors(model)
    main = model.subgraphs[0]
    found = []
    for tensor in (main.tensors[index] for index in indices(main.inputs)):
        name, kind = tensor.name.decode(), datatype_name(tensor.type)
        if kind not in DATATYPES:
            raise EngineError(f"input {name!r} is {kind}, which no request can carry", next_step="serve another model")
        found.append(InputPort(name, DATATYPES[kind], tuple(s if s >= 0 else None for s in signature_of(tensor))))
    return tuple(found)


def _name_tensors(model: Any) -> dict[str, str]:
    """Give every tensor of the main subgraph a name of its own; returns the file's name of each."""
    main = model.subgraphs[0]
    old = [(tensor.name or b"").decode("utf-8", "replace")[:MAX_NAME] for tensor in main.tensors]
    ports_first = dict.fromkeys([*indices(main.inputs), *indices(main.outputs), *range(len(old))])
    new = unique_names([(index, old[index]) for index in ports_first])
    for index, tensor in enumerate(main.tensors):
        tensor.name = new[index].encode()
    return {new[index]: name for index, name in enumerate(old)}


def _wanted_shapes(model: Any, input_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of all inputs, or None when they are what the file holds and nothing is free."""
    main = model.subgraphs[0]
    stored = {main.tensors[index].name.decode(): main.tensors[index] for index in indices(main.inputs)}
    for name, shape in input_shapes.items():
        if name not in stored:
            raise ConfigError(f"the model has no input {name!r}, it has {sorted(stored)}", field="input_shapes")
        signature = signature_of(stored[name])
        if len(signature) != len(shape) or any(size <= 0 for size in shape):
            raise ConfigError(
                f"{list(shape)} does not fit input {name!r} of rank {len(signature)}", field="input_shapes"
            )
    wanted = {name: tuple(input_shapes.get(name, shape_of(tensor))) for name, tensor in stored.items()}
    same = all(shape_of(tensor) == wanted[name] for name, tensor in stored.items())
    free = any(size < 0 for tensor in stored.values() for size in signature_of(tensor))
    return wanted if free or not same else None


def _fix_shapes(model: Any, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Every tensor of the main subgraph in the shape that the runtime gives it for these inputs."""
    main = model.subgraphs[0]
    with tempfile.TemporaryDirectory(prefix="midstream-prepare-") as folder:
        file = Path(folder) / "named.tflite"
        file.write_bytes(to_bytes(_without_the_unused(model)))
        found = shapes_by_runtime(file, wanted)
    for tensor in main.tensors:
        shape = found.get(tensor.name.decode())
        if shape is not None:
            tensor.shape, tensor.shapeSignature, tensor.hasRank = list(shape), None, True


def _without_the_unused(model: Any) -> Any:
    """The model with what its outputs need, and no more."""
    main = model.subgraphs[0]
    return extract(model, needed(main, indices(main.inputs), indices(main.outputs)))


def _fold_shapes(model: Any) -> None:
    """Put the value in the place of every SHAPE whose input has a fixed shape.

    Else the chain from SHAPE to the operator that it sizes would cross every cut between them.
    """
    main = model.subgraphs[0]
    for _ in range(MAX_FOLDS):
        unsized = analyse(model).unsized
        kept = []
        for operator in main.operators:
            (source, *_), target = indices(operator.inputs) or (-1,), indices(operator.outputs)
            if operator_name(model, operator) != "SHAPE" or source < 0 or source in unsized:
                kept.append(operator)
            else:
                _put_value(model, main.tensors[target[0]], shape_of(main.tensors[source]))
        if len(kept) == len(main.operators):
            return
        main.operators = kept


def _put_value(model: Any, tensor: Any, shape: tuple[int, ...]) -> None:
    size_bytes = 8 if datatype_name(tensor.type) == "INT64" else 4
    buffer = copy.copy(model.buffers[0])
    buffer.data = b"".join(size.to_bytes(size_bytes, "little") for size in shape)
    model.buffers.append(buffer)
    tensor.buffer, tensor.shape, tensor.shapeSignature = len(model.buffers) - 1, [len(shape)], None
