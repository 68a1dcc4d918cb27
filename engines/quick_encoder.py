"""A copy of an ONNX encoder that multiplies with its eight-bit weights as they are. The only onnx outside split_models.

In the file of such a model a weight is int8; its graph makes floats of it (Cast, Mul by a scale per column, MatMul), so
that every text reads four times the file. In the copy a product is one MatMulNBits, an operator that onnxruntime brings
(ContribOperators.md): bits 8, blocks of 128, accuracy level 4, which rounds the activations to eight bits, too, block
by block. A processor without a kernel for it is slower so than with floats: engines/encoder.py tries both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from protocol.durable import write_durable
from protocol.errors import ConfigError, EngineError
from protocol.extras import install_step

COPY_VERSION = 1
"""Goes up when copies are made in another way: old ones are then made anew."""

BLOCK = 128
_DOMAIN = "com.microsoft"


@frozen
class _Product:
    """One MatMul whose right side is int8: the node, and its weights [inner, columns] and scales [columns]."""

    node: Any
    weights: Any
    scales: Any


def write_quick_copy(source: Path, target: Path) -> int:
    """Write the copy, whole or not at all; returns how many products were replaced.

    Raises ConfigError without the onnx package or room on the disk, EngineError for a file that is no such model.
    """
    onnx = _onnx()
    try:
        model = onnx.load(str(source))
    except Exception as err:  # protobuf raises a class of its own per implementation
        raise EngineError(f"{source.name} is not an ONNX model", next_step="midstream models verify") from err
    found = _products(onnx, model.graph)
    if not found:
        raise EngineError(f"{source.name} has no int8 weights that a quick copy could use")
    for product in found:
        _replace(onnx, model.graph, product)
    if all(one.domain != _DOMAIN for one in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    _drop_unused(model.graph)
    write_durable(target, model.SerializeToString())
    return len(found)


def _onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError as err:
        raise ConfigError("a quick copy of the encoder needs onnx", next_step=install_step("cache")) from err
    return onnx


def _products(onnx: Any, graph: Any) -> list[_Product]:
    constants = {one.name: one for one in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    found = []
    for node in graph.node:
        scaled = made_by.get(node.input[1]) if node.op_type == "MatMul" else None
        if scaled is None or scaled.op_type != "Mul":
            continue
        weights, scales = _int8(constants, made_by, scaled)
        if weights is None or scales is None:
            continue
        values = onnx.numpy_helper.to_array(weights)
        factors = onnx.numpy_helper.to_array(scales)
        if values.ndim == 2 and values.shape[0] % BLOCK == 0 and factors.shape in ((1, values.shape[1]), (1,), ()):
            found.append(_Product(node, values, factors.reshape(-1)))
    return found


def _int8(constants: Mapping[str, Any], made_by: Mapping[str, Any], scaled: Any) -> tuple[Any, Any]:
    """(int8 weights, float scales) of a Mul whose one side is a Cast of a constant; None for what is not there."""
    weights = scales = None
    for name in scaled.input:
        cast = made_by.get(name)
        if cast is not None and cast.op_type == "Cast":
            held = constants.get(cast.input[0])
            weights = held if held is not None and held.data_type == held.INT8 else None
        else:
            held = constants.get(name)
            scales = held if held is not None and held.data_type == held.FLOAT else None
    return weights, scales


def _replace(onnx: Any, graph: Any, product: _Product) -> None:
    """The node becomes MatMulNBits: weights [columns, blocks, BLOCK] around 128, a scale for each block."""
    node, (inner, columns) = product.node, product.weights.shape
    blocks = inner // BLOCK
    whole = (product.weights.T.astype("int16") + 128).astype("uint8").reshape(columns, blocks, BLOCK)
    each = product.scales if len(product.scales) == columns else product.scales.repeat(columns)
    name = f"{node.output[0]}_quick"
    for part, values in (("weights", whole), ("scales", each.astype("float32").repeat(blocks))):
        graph.initializer.append(onnx.numpy_helper.from_array(values, f"{name}_{part}"))
    left = node.input[0]
    del node.input[:]
    node.input.extend([left, f"{name}_weights", f"{name}_scales"])
    node.op_type, node.domain = "MatMulNBits", _DOMAIN
    settings = {"K": inner, "N": columns, "bits": 8, "block_size": BLOCK, "accuracy_level": 4}
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in settings.items())


def _drop_unused(graph: Any) -> None:
    """Nodes and constants that nothing reads any more."""
    while True:
        read = {*_read(graph)}
        idle = [node for node in graph.node if not read.intersection(node.output)]
        for node in idle:
            graph.node.remove(node)
        if not idle:
            break
    for one in [one for one in graph.initializer if one.name not in read]:
        graph.initializer.remove(one)


def _read(graph: Any) -> Iterator[str]:
    """Names that a graph reads or gives, those that its bodies read from outside included."""
    yield from (one.name for one in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _read(body)
