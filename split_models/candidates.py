"""Pure: the cuts that a bundle considers: those between two nodes in order, and those that only a minimum cut finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from attrs import evolve

from split_models.analysis import seconds_of_nodes
from split_models.codec import INT8, wire_bytes
from split_models.cuts import MAX_CROSSING, Cut, all_cuts
from split_models.graph import Graph, GraphTensor
from split_models.min_cut import Costs, cut_of, min_cut

BYTES_PER_SECOND_OF_WORK = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
"""Bytes that the link moves while the device would run the whole model, from a faint link to a wire."""

SERVER_SPEED_RATIOS = (2.0, 16.0)
INPUT_SHARES = (1.0, 0.1)
"""What of an input's bytes would travel to the server: all, or what a JPEG leaves of a picture. Fixed shares and not
an input's own size, so that the names of cuts depend on the graph alone."""

MAX_NODES = 5_000
"""Larger graphs keep to the cuts in order: each minimum cut would take seconds."""


def candidates(graph: Graph) -> Sequence[Cut]:
    """All cuts of `all_cuts`, and minimum cuts over a grid of links and servers that are none of them, as d000, d001...

    In order of their last node. Takes seconds for a thousand nodes; no request ever waits for it.
    """
    ordered = all_cuts(graph)
    if not 2 < len(graph.nodes) <= MAX_NODES:
        return ordered
    known = {frozenset(tensor.name for tensor in cut.crossing) for cut in ordered}
    found: dict[frozenset[str], Cut] = {}
    for head in _sharings(graph):
        cut = cut_of(graph, head, "")
        names = frozenset(tensor.name for tensor in cut.crossing) if cut is not None else frozenset()
        if cut is not None and names not in known and len(names) <= MAX_CROSSING and _splits(graph, names):
            found[names] = cut
    extra = sorted(found.values(), key=lambda cut: (cut.after, [tensor.name for tensor in cut.crossing]))
    named = [evolve(cut, id=f"d{place:03d}") for place, cut in enumerate(extra)]
    return sorted([*ordered, *named], key=lambda cut: (cut.after, cut.id))


def grid(graph: Graph) -> Sequence[Costs]:
    """Costs of the graph for every form of the input, server and link, with guessed seconds of its nodes."""
    priced = _Priced(graph)
    return [
        priced.costs(share, ratio, rate)
        for share in INPUT_SHARES
        for ratio in SERVER_SPEED_RATIOS
        for rate in BYTES_PER_SECOND_OF_WORK
    ]


def _sharings(graph: Graph) -> Iterator[frozenset[int]]:
    """Minimum cuts over the grid, without those that another one settles.

    What stays on the device whole does so on every slower link, and what goes to the server whole does so all the more
    with a smaller input.
    """
    priced = _Priced(graph)
    gone: set[tuple[float, float]] = set()
    for share, ratio in product(INPUT_SHARES, SERVER_SPEED_RATIOS):
        for rate in sorted(BYTES_PER_SECOND_OF_WORK, reverse=True):
            if (ratio, rate) in gone:
                continue
            head = min_cut(graph, priced.costs(share, ratio, rate)).head
            if not head:
                gone.add((ratio, rate))
            if len(head) == len(graph.nodes):
                break
            yield head


class _Priced:
    """A graph with guessed seconds of its nodes and bytes of its tensors."""

    def __init__(self, graph: Graph) -> None:
        self._inputs = {tensor.name for tensor in graph.inputs}
        self._device_s = seconds_of_nodes(graph)
        self._whole_s = sum(self._device_s) or 1.0
        self._sizes = {name: _sent_bytes(tensor) for name, tensor in graph.tensors.items()}

    def costs(self, share: float, ratio: float, rate: float) -> Costs:
        """For one form of the input, one server and one link."""
        scale = self._whole_s / rate
        moved_s = {name: size * (share if name in self._inputs else 1.0) * scale for name, size in self._sizes.items()}
        return Costs(self._device_s, [seconds / ratio for seconds in self._device_s], moved_s)


def _sent_bytes(tensor: GraphTensor) -> int:
    return wire_bytes(INT8, [(tensor.name, tensor.datatype, tensor.shape)])


def _splits(graph: Graph, names: frozenset[str]) -> bool:
    """Whether something computed that is no output crosses."""
    return bool(names - {tensor.name for tensor in (*graph.inputs, *graph.outputs)})
