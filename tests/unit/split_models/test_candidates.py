"""What a bundle considers: cuts in order, and those that only a minimum cut finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import given, settings

from engines.arrays import to_array
from split_models.candidates import candidates, grid
from split_models.cuts import MAX_CROSSING, all_cuts
from split_models.graph import Graph
from split_models.min_cut import cut_of, min_cut, seconds_of
from split_models.partition_onnx import Partitioner
from split_models.prepare_onnx import prepare, whole_file
from split_models.recipes import recipe
from split_models.task import RecipeTask
from tests.unit.split_models.graphs import graphs, heads
from tests.unit.split_models.onnx_graphs import difference, run

SHAPE = (1, 3, 96, 96)


@given(graphs(most_nodes=9))
@settings(max_examples=60)
def test_every_cut_in_order_is_there_and_each_set_of_tensors_once(graph: Graph) -> None:
    found = candidates(graph)
    assert {cut.id for cut in all_cuts(graph)} <= {cut.id for cut in found}
    assert len({cut.id for cut in found}) == len(found)
    names = [frozenset(tensor.name for tensor in cut.crossing) for cut in found]
    assert len(set(names)) == len(names)
    assert all(1 <= len(one) <= MAX_CROSSING for one in names)
    assert [cut.after for cut in found] == sorted(cut.after for cut in found)


@given(graphs(most_nodes=7))
@settings(max_examples=30)
def test_no_sharing_beats_the_candidates_and_the_endpoints(graph: Graph) -> None:
    """What brute force finds on the grid is an endpoint, a candidate, or crosses more than a cut may."""
    known = [frozenset(tensor.name for tensor in cut.crossing) for cut in candidates(graph)]
    everything = frozenset(range(len(graph.nodes)))
    for costs in grid(graph):
        best = min(heads(graph), key=lambda head: seconds_of(graph, costs, head))
        found = min_cut(graph, costs).head
        assert seconds_of(graph, costs, found) <= seconds_of(graph, costs, best) + 1e-9
        if found not in (frozenset(), everything):
            made = {name for i in found for name in graph.nodes[i].outputs} | {"x"}
            read = {name for i in everything - found for name in graph.nodes[i].inputs}
            crossing = frozenset(made & (read | {tensor.name for tensor in graph.outputs}))
            inner = crossing - {"x", *(tensor.name for tensor in graph.outputs)}
            assert crossing in known or len(crossing) > MAX_CROSSING or not inner


def test_a_cut_that_only_the_minimum_cut_finds_gives_the_whole_models_answer(
    model_file: Callable[[str], Path],
) -> None:
    """PP-OCRv4 detection has one: three branches, each left at its own smallest tensor, in no order of the nodes."""
    prepared = prepare(model_file("ppocr-v4-det"), {"x": SHAPE})
    extra = [cut for cut in candidates(prepared.graph) if cut.id.startswith("d")]
    assert extra
    task = RecipeTask(recipe("ppocr-det"), "x", SHAPE)
    (tensor,) = task.cases(())[0].made.inputs
    feed = {"x": np.array(to_array(tensor))}
    whole = run(whole_file(prepared), feed)
    assert all(difference(Partitioner(prepared), cut, feed, whole) <= 1e-5 for cut in extra)


@given(graphs(most_nodes=8))
@settings(max_examples=40)
def test_nothing_is_lost_where_the_walk_over_the_grid_stops_early(graph: Graph) -> None:
    """Every sharing that a full walk finds is an endpoint, or its cut is among the candidates."""
    known = {frozenset(tensor.name for tensor in cut.crossing) for cut in candidates(graph)}
    for costs in grid(graph):
        cut = cut_of(graph, min_cut(graph, costs).head, "")
        names = frozenset(tensor.name for tensor in cut.crossing) if cut is not None else frozenset()
        inner = names - {"x", *(tensor.name for tensor in graph.outputs)}
        assert names in known or len(names) > MAX_CROSSING or not inner
