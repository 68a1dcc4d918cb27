"""Where a graph can be cut: after which nodes, and which tensors cross."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from attrs import frozen

from split_models.graph import Graph, GraphTensor, live_sets, needed_after

MAX_CROSSING = 4
"""Tensors of one cut: with more of them no graph that was seen sends fewer bytes."""


@frozen
class Cut:
    """The head is nodes[: after + 1], the tail the rest; of a `d` cut the head is what its crossing tensors need.

    `id` is k for the k-th single-tensor cut ("007"), m and k for the k-th of several tensors ("m012"), d and k for
    the k-th that only a minimum cut finds, in no order of the nodes ("d001"); stable for one prepared graph.
    """

    id: str
    after: int
    crossing: tuple[GraphTensor, ...]
    head_flops: float

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.crossing)

    @property
    def size_bytes(self) -> int:
        """Bytes as computed, before any codec."""
        return sum(tensor.size_bytes for tensor in self.crossing)


def single_tensor_cuts(graph: Graph) -> Sequence[Cut]:
    """All cuts at which exactly one computed tensor crosses, in topological order.

    Strict: the graph's own inputs never cross, and a graph output made by the head is no cut.
    """
    original = {tensor.name for tensor in graph.inputs}
    outputs = {tensor.name for tensor in graph.outputs}
    cuts: list[Cut] = []
    seen: set[str] = set()
    for index, (live, flops) in enumerate(_boundaries(graph)):
        if len(live) != 1 or live & original or live & outputs or live <= seen:
            continue
        (name,) = live
        tensor = graph.tensors.get(name)
        if tensor is None:  # no shape, hence no size and no wire form
            continue
        seen.add(name)
        cuts.append(Cut(id=f"{len(cuts):03d}", after=index, crossing=(tensor,), head_flops=flops))
    return cuts


def multi_tensor_cuts(graph: Graph, singles: Sequence[Cut]) -> Sequence[Cut]:
    """Cuts at which two to MAX_CROSSING tensors cross that send less than every single-tensor cut before them.

    An input that the tail needs is sent again and an output that the head made travels along; both count as crossing,
    in bytes too. At least one computed tensor that is no output crosses, otherwise nothing was split.
    """
    ends = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
    before = {cut.after: cut.size_bytes for cut in singles}
    least: float = inf
    cuts: list[Cut] = []
    seen: set[frozenset[str]] = set()
    for index, (live, flops) in enumerate(_boundaries(graph)):
        least = min(least, before.get(index, inf))
        if not 2 <= len(live) <= MAX_CROSSING or live <= ends or live in seen:
            continue
        crossing = crossing_of_names(graph, live)
        if crossing is None or sum(tensor.size_bytes for tensor in crossing) >= least:
            continue
        seen.add(live)
        cuts.append(Cut(id=f"m{len(cuts):03d}", after=index, crossing=crossing, head_flops=flops))
    return cuts


def all_cuts(graph: Graph) -> Sequence[Cut]:
    """Single-tensor cuts and those of several tensors that send less, in topological order."""
    singles = single_tensor_cuts(graph)
    return sorted([*singles, *multi_tensor_cuts(graph, singles)], key=lambda cut: cut.after)


def crossing_of_names(graph: Graph, names: Iterable[str]) -> tuple[GraphTensor, ...] | None:
    """The tensors in order of their names; None when one has no known size."""
    found = [graph.tensors.get(name) for name in sorted(names)]
    known = tuple(tensor for tensor in found if tensor is not None)
    return known if len(known) == len(found) else None


def crossing_of_head(graph: Graph, head: frozenset[int]) -> frozenset[str]:
    """What crosses when these nodes are the head: made or fed there, and needed outside or answered."""
    there = {name for index in head for name in graph.nodes[index].outputs} | {t.name for t in graph.inputs}
    return frozenset(there & needed_after(graph, head))


def _boundaries(graph: Graph) -> Iterable[tuple[frozenset[str], float]]:
    """After each node but the last: what is live, and the flops of the head."""
    flops = accumulate(node.flops for node in graph.nodes)
    return list(zip(live_sets(graph), flops, strict=True))[:-1]
