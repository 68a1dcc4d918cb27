"""Pure: which tensors still are the model's input, moved, padded, scaled or of another type: before the first layer.

A cut there sends the picture, the sound or the text itself, whatever its tensor is called.
"""

from __future__ import annotations

from split_models.graph import Graph, GraphNode

_KEEPS = frozenset(
    {
        # moved, joined, taken apart; names of ONNX and TFLite, in capitals without underscores
        "IDENTITY", "RESHAPE", "TRANSPOSE", "FLATTEN", "SQUEEZE", "UNSQUEEZE", "EXPANDDIMS", "PAD", "PADV2",
        "MIRRORPAD", "SLICE", "STRIDEDSLICE", "CONCAT", "CONCATENATION", "PACK", "UNPACK", "SPLIT", "SPLITV", "TILE",
        "EXPAND", "BROADCASTTO", "SPACETODEPTH", "DEPTHTOSPACE", "SPACETOBATCHND", "BATCHTOSPACEND", "REVERSEV2",
        # other types, sizes and ranges
        "CAST", "QUANTIZE", "DEQUANTIZE", "QUANTIZELINEAR", "DEQUANTIZELINEAR", "RESIZE", "RESIZEBILINEAR",
        "RESIZENEARESTNEIGHBOR", "UPSAMPLE", "CLIP", "ADD", "SUB", "MUL", "DIV", "NEG",
        # a row of a table stands for its index
        "GATHER", "EMBEDDINGLOOKUP",
    }
)  # fmt: skip


def still_input(graph: Graph) -> frozenset[str]:
    """The inputs, and every tensor that such operators alone made of them."""
    found = {tensor.name for tensor in graph.inputs}
    for node in graph.nodes:
        if _keeps(node) and all(name in found for name in node.inputs):
            found.update(node.outputs)
    return frozenset(found)


def _keeps(node: GraphNode) -> bool:
    return bool(node.inputs) and node.op.upper().replace("_", "") in _KEEPS
