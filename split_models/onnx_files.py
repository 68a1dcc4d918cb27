"""The only place that names the onnx package: files to protos, shapes, flops, and the neutral graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, EngineError
from split_models.graph import Graph, GraphNode, GraphTensor, check_order

MAX_MODEL_BYTES = 2_000_000_000
"""Protobuf's own limit; larger models keep their weights in side files, which nothing here reads."""

_DATATYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "FP16",
    11: "FP64", 12: "UINT32", 13: "UINT64",
}  # fmt: skip


def onnx_module() -> Any:
    """The onnx package. Raises ConfigError with the extra to install when it is absent."""
    try:
        import onnx
        import onnx.shape_inference
        import onnx.utils
    except ImportError as err:
        raise ConfigError(
            "the onnx package is not installed; it is needed to cut models",
            next_step="install midstream[coordinator] on the machine that cuts; devices only fetch heads",
        ) from err
    return onnx


def load_model(file: Path) -> Any:
    """A ModelProto. Raises EngineError when the file is absent, too large or not an ONNX model."""
    onnx = onnx_module()
    try:
        if file.stat().st_size > MAX_MODEL_BYTES:
            raise EngineError(f"{file.name} is over {MAX_MODEL_BYTES} bytes", next_step="serve it whole, without cuts")
        model = onnx.load(str(file))
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
    """The model with every tensor's shape inferred. Raises EngineError when they contradict each other."""
    onnx = onnx_module()
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as err:
        raise EngineError(
            f"shapes of the model cannot be inferred: {str(err)[:200]}", next_step="check input_shapes in the catalogue"
        ) from err


def to_bytes(model: Any) -> bytes:
    """The same model always gives the same bytes."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def graph_of(model: Any) -> Graph:
    """The neutral graph of a model whose shapes are inferred. Raises EngineError on control flow or broken order."""
    proto = model.graph
    weights = {tensor.name: tuple(tensor.dims) for tensor in proto.initializer}
    tensors = _tensors([*proto.input, *proto.value_info, *proto.output])
    nodes: list[GraphNode] = []
    for node in proto.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise EngineError(f"{node.op_type} has a body; such graphs are not cut", next_step="serve the model whole")
        inputs = tuple(name for name in node.input if name and name not in weights)
        outputs = tuple(name for name in node.output if name)
        nodes.append(GraphNode(node.op_type, inputs, outputs, _flops(node, tensors, weights)))
    graph = Graph(
        inputs=tuple(_need(tensors, value.name) for value in proto.input if value.name not in weights),
        outputs=tuple(_need(tensors, value.name) for value in proto.output),
        nodes=tuple(nodes),
        tensors=tensors,
    )
    check_order(graph)
    return graph


def _need(tensors: Mapping[str, GraphTensor], name: str) -> GraphTensor:
    if name not in tensors:
        raise EngineError(f"{name!r} has no fixed shape", next_step="give input_shapes in the catalogue entry")
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
