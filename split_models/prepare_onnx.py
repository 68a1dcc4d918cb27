"""Make a model cuttable: fix input shapes, fold constants, save at onnxruntime's BASIC level.

Cutting comes before optimising: at higher levels the graph holds operators without shape inference. Fixed shapes remove
the chains of Shape and Gather that would otherwise cross every cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import field, frozen

from protocol.errors import ConfigError, EngineError
from split_models.external_data import INLINE_BYTES, digest_of, external_tensors, put_back, read_into, set_aside
from split_models.graph import Graph
from split_models.input_shapes import InputPort
from split_models.onnx_files import (
    datatype_of,
    graph_of,
    load_model,
    onnx_module,
    outputs_of_unknown_shape,
    to_bytes,
    with_shapes,
)
from split_models.onnx_session import at_basic_level, loads, shapes_by_runtime
from split_models.opsets import check_known


@frozen
class Prepared:
    """A prepared model as a ModelProto and a neutral graph.

    With `folder`, large weights stay in side files there and `proto` only refers to them. `folded` is False when
    onnxruntime could not save the graph and it stands as the file had it.
    """

    graph: Graph = field(repr=False)
    proto: Any = field(repr=False)
    folder: Path | None = None
    folded: bool = True

    @cached_property
    def data(self) -> bytes:
        """`proto` as bytes."""
        return to_bytes(self.proto)

    @cached_property
    def digest(self) -> str:
        """sha256 of `data`, and of the side files that it refers to, which are read for it."""
        aside = list(external_tensors(self.proto))
        return digest_of(self.data, aside, self.folder or Path())


def prepare(file: Path, input_shapes: Mapping[str, tuple[int, ...]], inline_bytes: int = INLINE_BYTES) -> Prepared:
    """The prepared form of an ONNX file; weights in side files are read up to `inline_bytes`, else referred to.

    Raises EngineError (not a model, unknown operators, missing side files, shapes do not fit) or ConfigError.
    """
    model, aside, folded = _prepared_proto(file, input_shapes, inline_bytes)
    return Prepared(graph=graph_of(model), proto=model, folder=file.parent if aside else None, folded=folded)


def whole_file(prepared: Prepared) -> bytes:
    """The prepared model as one file with its weights inside. Raises EngineError when they are too many for one."""
    if prepared.folder is None:
        return prepared.data
    model = onnx_module().ModelProto()
    model.CopyFrom(prepared.proto)
    return to_bytes(self_contained(model, prepared.folder))


def inputs_of(file: Path) -> Sequence[InputPort]:
    """The inputs that a request must bring, as the file has them. Raises EngineError for what is no tensor."""
    model = load_model(file)
    check_known(model, file.name)
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_port(value) for value in model.graph.input if value.name not in weights)


def self_contained(model: Any, folder: Path | None) -> Any:
    """The part with its weights inside. Raises EngineError when they are too many for one file."""
    if folder is not None:
        read_into(model, folder)
    return model


def _prepared_proto(
    file: Path, input_shapes: Mapping[str, tuple[int, ...]], inline_bytes: int
) -> tuple[Any, Sequence[Any], bool]:
    model = load_model(file)
    check_known(model, file.name)
    _drop_overridable(model)
    _fix_inputs(model, input_shapes)
    _constants_to_weights(model)
    aside = set_aside(model, file.parent, inline_bytes)
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    model, folded = _folded(model, file.name)
    _drop_unused_domains(model)
    put_back(model, aside)
    return model, list(external_tensors(model)), folded


def _folded(model: Any, name: str) -> tuple[Any, bool]:
    """The model at BASIC level with all shapes; as it was when onnxruntime saves a graph with bodies wrongly."""
    shaped = _shaped(at_basic_level(model, name))
    if _has_bodies(model) and not loads(shaped):
        return _shaped(model), False
    return shaped, True


def _shaped(model: Any) -> Any:
    """All shapes that onnx can infer, and onnxruntime's for the outputs of its own operators."""
    shaped = with_shapes(model)
    missing = outputs_of_unknown_shape(shaped)
    ends = {value.name: value for value in shaped.graph.output}
    for found in shapes_by_runtime(shaped, missing) if missing else ():
        if found.name in ends:
            ends[found.name].CopyFrom(found)
        else:
            shaped.graph.value_info.append(found)
    return shaped


def _port(value: Any) -> InputPort:
    kind = value.type.tensor_type
    datatype = datatype_of(kind.elem_type)
    if not value.type.HasField("tensor_type") or datatype is None or not kind.HasField("shape"):
        raise EngineError(
            f"input {value.name!r} is no tensor of numbers with a known rank",
            next_step="such models are served whole; export it with tensors at its border to cut it",
        )
    sizes = (d.dim_value if d.dim_value > 0 else (d.dim_param or None) for d in kind.shape.dim)
    return InputPort(value.name, datatype, tuple(sizes))


def _drop_overridable(model: Any) -> None:
    """A weight that is also listed as an input could be overridden, so nothing would fold it; nobody overrides here."""
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, 4)  # before 4 weights had to be inputs


def _fix_inputs(model: Any, input_shapes: Mapping[str, tuple[int, ...]]) -> None:
    inputs = {value.name: value for value in model.graph.input}
    for name, shape in input_shapes.items():
        if name not in inputs:
            raise ConfigError(f"the model has no input {name!r}, it has {sorted(inputs)}", field="input_shapes")
        dims = inputs[name].type.tensor_type.shape.dim
        if len(dims) != len(shape) or any(size <= 0 for size in shape):
            raise ConfigError(f"{list(shape)} does not fit input {name!r} of rank {len(dims)}", field="input_shapes")
        for dim, size in zip(dims, shape, strict=True):
            dim.Clear()
            dim.dim_value = size


def _constants_to_weights(model: Any) -> None:
    """Real models keep weights in Constant nodes; folding and cutting both want them as initialisers."""
    onnx = onnx_module()
    kept = []
    for node in model.graph.node:
        value = next((a for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        if node.op_type == "Constant" and value is not None:
            weight = onnx.TensorProto()
            weight.CopyFrom(value.t)
            weight.name = node.output[0]
            model.graph.initializer.append(weight)
        else:
            kept.append(node)
    if len(kept) < len(model.graph.node):
        del model.graph.node[:]
        model.graph.node.extend(kept)


def _has_bodies(model: Any) -> bool:
    return any(a.HasField("g") or a.graphs for node in model.graph.node for a in node.attribute)


def _drop_unused_domains(model: Any) -> None:
    """The saved file imports every operator set onnxruntime knows; other runtimes refuse the unknown ones."""
    used = {node.domain for node in model.graph.node} | {""}
    used |= {node.domain for function in model.functions for node in function.node}
    kept = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
