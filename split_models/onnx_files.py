"""The only place that names the onnx package: files to protos, shapes, flops, and the neutral graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, EngineError
from protocol.extras import install_step
from split_models.graph import Graph, GraphNode, GraphTensor, check_order

MAX_MODEL_BYTES = 2_000_000_000
"""Protobuf's own limit; larger models keep their weights in side files."""

SHAPE_BYTES = 64 << 10
"""Up to this a weight may be a shape, an axis or a scale, whose values matter for shapes and folding."""

_DATATYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "FP16",
    11: "FP64", 12: "UINT32", 13: "UINT64",
}  # fmt: skip


_CONSTANTS = ("Constant", "ConstantOfShape")
_BY_CHANCE = (
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip
_KEEPS_VALUES = frozenset({"Cast", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})


def onnx_module() -> Any:
    """The onnx package. Raises ConfigError with the extra to install when it is absent."""
    try:
        import onnx
        import onnx.shape_inference
        import onnx.utils
    except ImportError as err:
        raise ConfigError(
            "the onnx package is not installed; it is needed to cut models",
            next_step=f"{install_step('coordinator')} on the machine that cuts; devices only fetch heads",
        ) from err
    return onnx


def load_model(file: Path) -> Any:
    """A ModelProto; weights in side files are not read. Raises EngineError (absent, too large, not an ONNX model)."""
    onnx = onnx_module()
    try:
        if file.stat().st_size > MAX_MODEL_BYTES:
            raise EngineError(f"{file.name} is over {MAX_MODEL_BYTES} bytes", next_step="serve it whole, without cuts")
        model = onnx.load(str(file), load_external_data=False)
    except EngineError:
        raise
    except OSError as err:
        raise EngineError(f"cannot read {file.name}: {err.strerror}", next_step="pull the model again") from err
    except Exception as err:  # protobuf raises a class of its own per implementation
        raise EngineError(
            f"{file.name} is not an ONNX model", next_step="verify the model with `models verify`"
        ) from err
    if not model.graph.node or not model.graph.output:
        raise EngineError(f"{file.name} holds no graph", next_step="verify the model with `models verify`")
    return model


def with_shapes(model: Any) -> Any:
    """The same model with every tensor's shape written into it. Raises EngineError when shapes contradict each other.

    Shapes come from a copy without the large weights: their values say nothing about shapes, and inference serialises
    all that it is given, up to protobuf's 2 GB, where it gives back an empty graph without a word.
    """
    onnx = onnx_module()
    graph = model.graph
    large = [tensor for tensor in graph.initializer if tensor_bytes(tensor) > SHAPE_BYTES]
    light = onnx.ModelProto(ir_version=model.ir_version)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    for name in ("node", "input", "output", "value_info"):
        getattr(light.graph, name).extend(getattr(graph, name))
    light.graph.initializer.extend(one for one in graph.initializer if tensor_bytes(one) <= SHAPE_BYTES)
    given = {value.name for value in graph.input}
    make = onnx.helper.make_tensor_value_info
    light.graph.input.extend(make(one.name, one.data_type, one.dims) for one in large if one.name not in given)
    try:
        shaped = onnx.shape_inference.infer_shapes(light, strict_mode=True, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as err:
        raise EngineError(
            f"shapes of the model cannot be inferred: {str(err)[:200]}", next_step="check input_shapes in the catalogue"
        ) from err
    if len(shaped.graph.node) != len(graph.node):
        raise EngineError("shape inference gave back another graph", next_step="keep the weights in side files")
    for name in ("output", "value_info"):
        del getattr(graph, name)[:]
        getattr(graph, name).extend(getattr(shaped.graph, name))
    return model


def to_bytes(model: Any) -> bytes:
    """The same model always gives the same bytes."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def captured_names(node: Any) -> Sequence[str]:
    """Outer values and weights that the bodies of a node (If, Loop, Scan) read, in order of their first use."""
    found: dict[str, None] = {}
    for attribute in node.attribute:
        for body in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            found.update(dict.fromkeys(_free_names(body)))
    return list(found)


def _free_names(body: Any) -> Sequence[str]:
    inner = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    free: dict[str, None] = {}
    for node in body.node:
        read = [*(name for name in node.input if name), *captured_names(node)]
        free.update((name, None) for name in read if name not in inner)
        inner.update(node.output)
    free.update((value.name, None) for value in body.output if value.name not in inner)
    return list(free)


def graph_of(model: Any) -> Graph:
    """The neutral graph of a model whose shapes are inferred: what is computed from inputs and reaches an output.

    Raises EngineError when an input or output has no fixed shape, or nodes come before what feeds them.
    """
    proto = model.graph
    weights = {tensor.name: tuple(tensor.dims) for tensor in proto.initializer}
    tensors = _tensors([*proto.input, *proto.value_info, *proto.output])
    nodes = _computed_nodes(proto, tensors, weights)
    graph = Graph(
        inputs=tuple(_need(tensors, value.name) for value in proto.input if value.name not in weights),
        outputs=tuple(_need(tensors, value.name) for value in proto.output),
        nodes=tuple(_alive(nodes, {value.name for value in proto.output})),
        tensors=tensors,
    )
    check_order(graph)
    return graph


def _computed_nodes(
    proto: Any, tensors: Mapping[str, GraphTensor], weights: Mapping[str, tuple[int, ...]]
) -> list[GraphNode]:
    """Nodes that depend on an input or on chance; the rest (Constant, ConstantOfShape, a weight's reshaping) is weight.

    Such chains may be long and start late in the order; counted as computed they would cross every cut before.
    """
    fixed_bytes = {tensor.name: tensor_bytes(tensor) for tensor in proto.initializer}
    nodes: list[GraphNode] = []
    for node in proto.node:
        read = list(dict.fromkeys([*(name for name in node.input if name), *captured_names(node)]))
        size_bytes = sum(fixed_bytes.get(name, 0) for name in read)
        if all(name in fixed_bytes for name in read) and (read or node.op_type in _CONSTANTS) and not _by_chance(node):
            made = {name: tensors[name].size_bytes for name in node.output if name in tensors}
            fixed_bytes.update({name: made.get(name, size_bytes) for name in node.output})
            continue
        inputs = tuple(name for name in read if name not in fixed_bytes)
        outputs = tuple(name for name in node.output if name)
        nodes.append(GraphNode(node.op_type, inputs, outputs, _flops(node, tensors, weights), size_bytes))
    return nodes


def _alive(nodes: Sequence[GraphNode], outputs: Set[str]) -> Sequence[GraphNode]:
    """Without nodes that nothing needs: they would keep their inputs alive across cuts."""
    needed, alive = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            alive.append(node)
            needed.update(node.inputs)
    return alive[::-1]


def _by_chance(node: Any) -> bool:
    """Whether two runs of the node, one in each part, may give different values."""
    bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return node.op_type in _BY_CHANCE or any(_by_chance(inner) for body in bodies for inner in body.node)


def tensor_bytes(tensor: Any) -> int:
    """Bytes that a TensorProto's data take, wherever they lie."""
    for entry in tensor.external_data:
        if entry.key == "length":
            return int(entry.value)
    return len(tensor.raw_data) or int(tensor.ByteSize())


def outputs_of_unknown_shape(model: Any) -> Sequence[str]:
    """Tensors that a node of the main graph makes and whose type or shape is not known, in order."""
    tensors = _tensors([*model.graph.value_info, *model.graph.output])
    return [name for node in model.graph.node for name in node.output if name and name not in tensors]


def datatype_of(element: int) -> str | None:
    """The Open Inference Protocol's word for an ONNX element type; None for strings and what the protocol lacks."""
    return _DATATYPES.get(element)


def index_bounds(model: Any) -> dict[str, int]:
    """Rows of the weight table that an integer input indexes, by input: token ids, positions, kinds.

    An input is followed through what keeps its values: Cast, Reshape, Squeeze, Unsqueeze, Identity, Flatten.
    """
    proto = model.graph
    tables = {tensor.name: tuple(tensor.dims) for tensor in proto.initializer}
    origin = {value.name: value.name for value in proto.input if value.name not in tables}
    bounds: dict[str, int] = {}
    for node in proto.node:
        if node.op_type in _KEEPS_VALUES and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        if node.op_type != "Gather" or node.input[1] not in origin or not tables.get(node.input[0]):
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        name, rows = origin[node.input[1]], tables[node.input[0]][axis]
        bounds[name] = min(rows, bounds.get(name, rows))
    return bounds


def _need(tensors: Mapping[str, GraphTensor], name: str) -> GraphTensor:
    if name not in tensors:
        raise EngineError(
            f"{name!r} has no fixed shape or is no tensor of numbers", next_step="give the shapes of all inputs"
        )
    return tensors[name]


def _tensors(values: Sequence[Any]) -> dict[str, GraphTensor]:
    found: dict[str, GraphTensor] = {}
    for value in values:
        kind = value.type.tensor_type
        shape = tuple(int(d.dim_value) for d in kind.shape.dim)
        fixed = kind.HasField("shape") and all(d.HasField("dim_value") and d.dim_value > 0 for d in kind.shape.dim)
        if fixed and kind.elem_type in _DATATYPES:
            found[value.name] = GraphTensor(value.name, _DATATYPES[kind.elem_type], shape)
    return found


def _flops(node: Any, tensors: Mapping[str, GraphTensor], weights: Mapping[str, tuple[int, ...]]) -> float:
    """Two per multiply-add for convolutions and products, one per output element elsewhere."""
    out = next((tensors[name].elements for name in node.output if name in tensors), 0)
    shapes = [weights.get(name) or (tensors[name].shape if name in tensors else ()) for name in node.input]
    if node.op_type == "Conv" and len(shapes) > 1:
        return 2.0 * out * prod(shapes[1][1:])
    if node.op_type == "ConvTranspose" and len(shapes) > 1:
        return 2.0 * prod(shapes[0]) * prod(shapes[1][1:])
    if node.op_type in ("MatMul", "Gemm") and shapes and shapes[0]:
        return 2.0 * out * shapes[0][-1]
    return float(out)
