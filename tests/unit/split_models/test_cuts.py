"""Graphs, live sets and single-tensor cuts, on graphs small enough to check by hand."""

from __future__ import annotations

import pytest

from protocol.errors import EngineError
from split_models.cuts import single_tensor_cuts
from split_models.graph import Graph, GraphNode, GraphTensor, check_order, live_sets


def tensor(name: str, *shape: int, datatype: str = "FP32") -> GraphTensor:
    return GraphTensor(name, datatype, shape or (1, 4))


def graph(*nodes: GraphNode, inputs: tuple[str, ...] = ("x",), outputs: tuple[str, ...] = ("y",)) -> Graph:
    names = {name for node in nodes for name in (*node.inputs, *node.outputs)}
    return Graph(
        inputs=tuple(tensor(name) for name in inputs),
        outputs=tuple(tensor(name) for name in outputs),
        nodes=nodes,
        tensors={name: tensor(name) for name in names},
    )


CHAIN = graph(
    GraphNode("Conv", ("x",), ("a",), 10.0),
    GraphNode("Relu", ("a",), ("b",), 2.0),
    GraphNode("Conv", ("b",), ("y",), 8.0),
)
SKIP = graph(
    GraphNode("Conv", ("x",), ("a",)),
    GraphNode("Conv", ("a",), ("b",)),
    GraphNode("Add", ("a", "b"), ("c",)),
    GraphNode("Relu", ("c",), ("y",)),
)
LONG_SKIP = graph(
    GraphNode("Conv", ("x",), ("a",)), GraphNode("Conv", ("a",), ("b",)), GraphNode("Add", ("b", "x"), ("y",))
)


def test_a_chain_can_be_cut_after_every_node_but_the_last() -> None:
    cuts = single_tensor_cuts(CHAIN)
    assert [(cut.id, cut.crossing[0].name) for cut in cuts] == [("000", "a"), ("001", "b")]
    assert [cut.head_flops for cut in cuts] == [10.0, 12.0]


def test_a_shared_tensor_counts_once_and_both_branches_block_a_cut() -> None:
    assert live_sets(SKIP)[1] == {"a", "b"}
    assert [cut.crossing[0].name for cut in single_tensor_cuts(SKIP)] == ["a", "c"]


def test_the_original_input_never_crosses() -> None:
    assert single_tensor_cuts(LONG_SKIP) == []


def test_an_output_made_by_the_head_is_no_cut() -> None:
    two = graph(GraphNode("Conv", ("x",), ("y",)), GraphNode("Relu", ("y",), ("z",)), outputs=("y", "z"))
    assert single_tensor_cuts(two) == []


def test_a_tensor_that_stays_alive_alone_is_one_cut() -> None:
    """A dead branch between two nodes does not make the same cut twice."""
    dead = graph(
        GraphNode("Conv", ("x",), ("a",)),
        GraphNode("Shape", ("a",), ("unused",)),
        GraphNode("Relu", ("a",), ("y",)),
    )
    assert [cut.crossing[0].name for cut in single_tensor_cuts(dead)] == ["a"]


def test_a_tensor_without_a_shape_is_no_cut() -> None:
    nameless = Graph(CHAIN.inputs, CHAIN.outputs, CHAIN.nodes, {"b": tensor("b"), "y": tensor("y")})
    assert [cut.crossing[0].name for cut in single_tensor_cuts(nameless)] == ["b"]


def test_order_is_checked() -> None:
    with pytest.raises(EngineError, match="before it is made"):
        check_order(graph(GraphNode("Relu", ("a",), ("y",)), GraphNode("Conv", ("x",), ("a",))))


def test_sizes_follow_shape_and_datatype() -> None:
    assert tensor("t", 1, 16, 4, 4).size_bytes == 1024
    assert tensor("t", 1, 16, 4, 4, datatype="UINT8").size_bytes == 256
