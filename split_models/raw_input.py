"""Pure: which tensors still are the model's input, moved, padded, scaled or of another type: before the first layer.

A cut there sends the picture, the sound or the text itself, whatever its tensor is called.
"""

from __future__ import annotations

from split_models.graph import Graph, GraphNode

_MIXES = ("CONV", "MATMUL", "GEMM", "FULLYCONNECTED", "EINSUM", "LSTM", "GRU", "RNN", "SVDF", "ATTENTION")
"""Layers, by what their names contain (ONNX and TFLite, in capitals without underscores): each value they make is a
weighted sum of many. Every other operator moves, picks, scales or reduces what is there, so it is taken to keep it."""


def still_input(graph: Graph) -> frozenset[str]:
    """The inputs, and every tensor that such operators alone made of them."""
    found = {tensor.name for tensor in graph.inputs}
    for node in graph.nodes:
        if _keeps(node) and all(name in found for name in node.inputs):
            found.update(node.outputs)
    return frozenset(found)


def _keeps(node: GraphNode) -> bool:
    op = node.op.upper().replace("_", "")
    return bool(node.inputs) and not any(layer in op for layer in _MIXES)
