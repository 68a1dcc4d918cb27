"""A cut before the first layer sends the input itself, whatever its tensor is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.catalogue import shipped_catalogue
from split_models.backend import backend_of
from split_models.cuts import single_tensor_cuts
from split_models.graph import Graph, GraphNode, GraphTensor
from split_models.raw_input import still_input


def graph_of(*nodes: tuple[str, str, str]) -> Graph:
    """Nodes as (op, inputs separated by blanks, output); inputs x and ids."""
    made = tuple(GraphNode(op, tuple(inputs.split()), (output,)) for op, inputs, output in nodes)
    ends = [GraphTensor(name, "FP32", (1, 4)) for name in ("x", "ids", made[-1].outputs[0])]
    return Graph(tuple(ends[:2]), tuple(ends[2:]), made, {tensor.name: tensor for tensor in ends})


def test_moved_and_scaled_it_is_still_the_input() -> None:
    graph = graph_of(
        ("Cast", "x", "a"), ("STRIDED_SLICE", "a", "b"), ("Mul", "b", "c"), ("Conv", "c", "d"), ("Relu", "d", "y")
    )
    assert still_input(graph) == {"x", "ids", "a", "b", "c"}


def test_a_row_of_a_table_stands_for_its_index() -> None:
    graph = graph_of(("Gather", "ids", "a"), ("Add", "a x", "b"), ("MatMulInteger", "b", "y"))
    assert still_input(graph) == {"x", "ids", "a", "b"}


@pytest.mark.parametrize(
    "op",
    [
        "BatchNormalization", "LayerNormalization", "IdentityN", "Dropout", "Min", "MAXIMUM", "RELU6", "Abs", "SQRT",
        "LOG", "Exp", "Tanh", "LOGISTIC", "CastLike", "DynamicQuantizeLinear", "GATHER_ND", "ReverseSequence",
        "Pow", "SELECT_V2", "Where", "Sum", "Floor", "AveragePool", "ReduceMean", "SomethingNew",
    ],
)  # fmt: skip
def test_an_operator_that_is_no_layer_gives_the_input_away(op: str) -> None:
    graph = graph_of((op, "x", "a"), ("Conv", "a", "b"), (op, "b", "y"))
    assert still_input(graph) == {"x", "ids", "a"}


@pytest.mark.parametrize(
    "op",
    ["Conv", "QLinearConv", "ConvInteger", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "MatMul", "BATCH_MATMUL", "Gemm",
     "FULLY_CONNECTED", "LSTM", "GRU", "UNIDIRECTIONAL_SEQUENCE_RNN", "MultiHeadAttention", "Einsum"],
)  # fmt: skip
def test_a_layer_hides_the_input(op: str) -> None:
    assert still_input(graph_of((op, "x", "a"), ("Relu", "a", "y"))) == {"x", "ids"}


@pytest.mark.parametrize("name", ["ppocr-v4-det", "ppocr-v2-cls"])
def test_models_of_pictures_have_cuts_that_do_not_send_them(name: str, model_file: Callable[[str], Path]) -> None:
    entry = shipped_catalogue()[name]
    graph = backend_of(entry.format).prepare(model_file(name), entry.input_shapes).graph
    assert not {cut.crossing[0].name for cut in single_tensor_cuts(graph)} & still_input(graph)


def test_what_is_added_to_a_layers_output_hides_in_it() -> None:
    graph = graph_of(("Conv", "x", "a"), ("Add", "a x", "b"), ("Random", "", "c"), ("Add", "b c", "y"))
    assert still_input(graph) == {"x", "ids"}


@pytest.mark.parametrize(
    ("name", "first"),
    [("basic-pitch-tflite", True), ("face-full-range-sparse", True), ("face-short-range", False)],
)
def test_real_models(name: str, first: bool, model_file: Callable[[str], Path]) -> None:
    """The first cut of two of these sends the sound reshaped, and the picture with a black frame around it."""
    entry = shipped_catalogue()[name]
    graph = backend_of(entry.format).prepare(model_file(name), entry.input_shapes).graph
    cuts = single_tensor_cuts(graph)
    raw = still_input(graph)
    assert (cuts[0].crossing[0].name in raw) == first
    assert cuts[-1].crossing[0].name not in raw
