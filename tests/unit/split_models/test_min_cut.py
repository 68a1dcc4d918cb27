"""The minimum cut against brute force, in any order of the nodes, and on real layer graphs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from split_models.graph import Graph
from split_models.min_cut import Costs, cut_of, min_cut, seconds_of
from tests.unit.split_models.graphs import costs_of, graph_from, graphs, heads, msr_graph, reordered, window_of

TOLERANCE_S = 1e-7
"""Seconds are whole nanoseconds inside; a sum of a few hundred may be off by as many."""

BANDWIDTHS = (0.01, 0.1, 1.0, 10.0, 100.0)


@given(st.data(), graphs())
@settings(max_examples=300)
def test_it_equals_brute_force(data: st.DataObject, graph: Graph) -> None:
    costs = data.draw(costs_of(graph))
    found = min_cut(graph, costs)
    least = min(seconds_of(graph, costs, head) for head in heads(graph))
    assert found.seconds == pytest.approx(least, abs=TOLERANCE_S)
    assert found.head in set(heads(graph)), "the head lacks what feeds it"


@given(st.data(), graphs(most_nodes=12), st.integers(0, 99))
@settings(max_examples=150)
def test_the_order_of_the_nodes_does_not_matter(data: st.DataObject, graph: Graph, seed: int) -> None:
    costs = data.draw(costs_of(graph))
    moved, moved_costs, order = reordered(graph, costs, seed)
    first, second = min_cut(graph, costs), min_cut(moved, moved_costs)
    assert second.seconds == pytest.approx(first.seconds, abs=TOLERANCE_S)
    assert frozenset(order[i] for i in second.head) == first.head, "of equal sharings the smallest head is the one"


@given(st.data(), graphs())
@settings(max_examples=100)
def test_never_worse_than_either_endpoint(data: st.DataObject, graph: Graph) -> None:
    costs = data.draw(costs_of(graph))
    everything = frozenset(range(len(graph.nodes)))
    ends = [seconds_of(graph, costs, head) for head in (everything, frozenset())]
    assert min_cut(graph, costs).seconds <= min(ends) + TOLERANCE_S


def test_a_tensor_with_many_readers_is_paid_once() -> None:
    """x -> a -> (b, c, d) -> e: paid per edge, three readers on the server would cost 30 ms and a's head not pay."""
    graph = graph_from([[-1], [0], [0], [0], [1, 2, 3]])
    costs = Costs(
        device_s=[0.001, 0.05, 0.05, 0.05, 0.05],
        server_s=[0.001] * 5,
        tensor_s={"x": 0.1, "t0": 0.010, "t1": 0.02, "t2": 0.02, "t3": 0.02},
    )
    found = min_cut(graph, costs)
    assert found.head == {0}
    assert found.seconds == pytest.approx(0.001 + 0.010 + 0.004)
    cut = cut_of(graph, found.head, "d000")
    assert cut is not None
    assert [tensor.name for tensor in cut.crossing] == ["t0"]


def test_work_never_comes_back_to_the_device() -> None:
    """The middle node is far quicker on the server, yet what follows it is dear there: one seam, not two."""
    graph = graph_from([[-1], [0], [1]])
    costs = Costs(device_s=[0.001, 0.02, 0.001], server_s=[0.001, 0.001, 0.5], tensor_s={"x": 0.001})
    assert min_cut(graph, costs).head == {0, 1, 2}


def test_the_way_of_the_encoded_input_is_what_cloud_only_pays() -> None:
    graph = graph_from([[-1], [0]])
    slow = Costs(device_s=[0.1, 0.1], server_s=[0.001, 0.001], tensor_s={"x": 0.05, "t0": 1.0})
    assert min_cut(graph, slow).head == frozenset()
    raw = Costs(slow.device_s, slow.server_s, {"x": 1.0, "t0": 1.0})
    assert min_cut(graph, raw).head == {0, 1}


@given(st.data(), graphs())
@settings(max_examples=100)
def test_a_faster_way_up_never_costs_more(data: st.DataObject, graph: Graph) -> None:
    costs = data.draw(costs_of(graph))
    faster = Costs(costs.device_s, costs.server_s, {name: s / 2 for name, s in costs.tensor_s.items()})
    assert min_cut(graph, faster).seconds <= min_cut(graph, costs).seconds + TOLERANCE_S


def test_an_endpoint_is_no_cut() -> None:
    graph = graph_from([[-1], [0]])
    assert cut_of(graph, frozenset(), "d000") is None
    assert cut_of(graph, frozenset({0, 1}), "d000") is None


def _layer_graphs() -> list[Path]:
    folder = os.environ.get("MIDSTREAM_LAYERCOSTS")
    return sorted(Path(folder, "msr").glob("*_inference.json")) if folder else []


@pytest.mark.parametrize("file", _layer_graphs() or [None], ids=lambda f: f.stem if f else "generated")
@pytest.mark.parametrize("bandwidth_ratio", BANDWIDTHS)
def test_real_layer_graphs(file: Path | None, bandwidth_ratio: float) -> None:
    """MSR's ResNet-50 and Inception-v3 (folder in MIDSTREAM_LAYERCOSTS), else a generated graph of their kind."""
    if file is None:
        graph, device_s, server_s, moves = _inception_like()
    else:
        graph, document = msr_graph(file)
        device_s, server_s, moves = document["device_s"], document["server_s"], document["moves"]
    tensor_s = {"x": max(moves.values()), **moves}
    costs = Costs(device_s, server_s, {name: s / bandwidth_ratio for name, s in tensor_s.items()})
    found = min_cut(graph, costs)
    prefixes = [frozenset(range(k)) for k in range(len(graph.nodes) + 1)]
    assert found.seconds <= min(seconds_of(graph, costs, head) for head in prefixes) + TOLERANCE_S
    for seed in range(3):
        moved, moved_costs, order = reordered(graph, costs, seed)
        again = min_cut(moved, moved_costs)
        assert again.seconds == pytest.approx(found.seconds, abs=TOLERANCE_S)
        assert frozenset(order[i] for i in again.head) == found.head


@pytest.mark.parametrize("file", _layer_graphs() or [None], ids=lambda f: f.stem if f else "generated")
def test_parts_of_real_layer_graphs_equal_brute_force(file: Path | None) -> None:
    """Windows of nine layers, cut out with what they read from before as the input."""
    if file is None:
        graph, device_s, server_s, moves = _inception_like()
    else:
        graph, document = msr_graph(file)
        device_s, server_s, moves = document["device_s"], document["server_s"], document["moves"]
    inside = 0
    for start in range(0, len(graph.nodes) - 9, 7):
        window = window_of(graph, start, 9)
        costs = Costs(device_s[start : start + 9], server_s[start : start + 9], {"x": max(moves.values()), **moves})
        for ratio in (3.0, 30.0, 300.0):
            scaled = Costs(costs.device_s, costs.server_s, {name: s / ratio for name, s in costs.tensor_s.items()})
            found = min_cut(window, scaled)
            least = min(seconds_of(window, scaled, head) for head in heads(window))
            assert found.seconds == pytest.approx(least, abs=TOLERANCE_S)
            inside += 0 < len(found.head) < 9
    assert inside > 0, "every sharing was an endpoint: the check shows nothing"


def _inception_like() -> tuple[Graph, list[float], list[float], dict[str, float]]:
    """40 blocks of four branches that are joined, as Inception has them: 242 nodes."""
    rows: list[list[int]] = [[-1], [0]]
    for _ in range(40):
        start = len(rows) - 1
        rows += [[start], [start], [start], [start + 2], [start + 3], [start + 1, start + 4, start + 5]]
    count = len(rows)
    device_s = [0.001 + (7 * i % 11) / 1e3 for i in range(count)]
    moves = {f"t{i}": (1 + (5 * i % 13)) / 1e3 for i in range(count)}
    return graph_from(rows), device_s, [s / 10 for s in device_s], moves
