"""Where a graph can be cut: after which nodes, and which tensors cross. Single-tensor cuts only, so far."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from split_models.graph import Graph, GraphTensor, live_sets


@frozen
class Cut:
    """The head is nodes[: after + 1], the tail the rest. `id` is k for the k-th single-tensor cut: "007"."""

    id: str
    after: int
    crossing: tuple[GraphTensor, ...]
    head_flops: float

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.crossing)


def single_tensor_cuts(graph: Graph) -> Sequence[Cut]:
    """All cuts at which exactly one computed tensor crosses, in topological order.

    Strict: the graph's own inputs never cross, and a graph output made by the head is no cut.
    """
    original = {tensor.name for tensor in graph.inputs}
    outputs = {tensor.name for tensor in graph.outputs}
    cuts: list[Cut] = []
    seen: set[str] = set()
    flops = 0.0
    for index, live in enumerate(live_sets(graph)):
        flops += graph.nodes[index].flops
        if len(live) != 1 or live & original or live & outputs or live <= seen:
            continue
        (name,) = live
        tensor = graph.tensors.get(name)
        if tensor is None:  # no shape, hence no size and no wire form
            continue
        seen.add(name)
        cuts.append(Cut(id=f"{len(cuts):03d}", after=index, crossing=(tensor,), head_flops=flops))
    return cuts
