"""A model's graph without its runtime: nodes in topological order and the size of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from attrs import field, frozen

from protocol.errors import EngineError
from protocol.tensors import DATATYPE_BYTES


@frozen
class GraphTensor:
    """A tensor that is computed or fed: name, OIP datatype and fixed shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * DATATYPE_BYTES[self.datatype]


@frozen
class GraphNode:
    """One operator. `inputs` names computed tensors and graph inputs, never weights or what is made of weights alone.

    An operator with bodies (If, Loop, Scan) is one node; what its bodies capture counts among its inputs. A
    multiply-add is two flops. weight_bytes: of all weights that it reads.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: float = 0.0
    weight_bytes: int = 0


@frozen
class Graph:
    """A directed acyclic graph in topological order. `tensors` may lack names whose shape nobody could infer."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    nodes: tuple[GraphNode, ...]
    tensors: Mapping[str, GraphTensor] = field(repr=False)

    @property
    def flops(self) -> float:
        return sum(node.flops for node in self.nodes)


def check_order(graph: Graph) -> None:
    """Raise EngineError unless every node comes after the nodes that feed it."""
    known = {tensor.name for tensor in graph.inputs}
    for node in graph.nodes:
        missing = [name for name in node.inputs if name not in known]
        if missing:
            raise EngineError(
                f"{node.op} reads {missing[0]!r} before it is made",
                next_step="export the model again; its order is broken",
            )
        known.update(node.outputs)


def last_uses(graph: Graph) -> dict[str, int]:
    """For each tensor the index of the last node that reads it; graph outputs are read after the last node."""
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    last.update({tensor.name: len(graph.nodes) for tensor in graph.outputs})
    return last


def live_sets(graph: Graph) -> Sequence[frozenset[str]]:
    """After each node k, the tensors made at or before k (inputs included) that are needed after k."""
    last = last_uses(graph)
    live = {tensor.name for tensor in graph.inputs if tensor.name in last}
    sets: list[frozenset[str]] = []
    for index, node in enumerate(graph.nodes):
        live.update(name for name in node.outputs if name in last)
        live = {name for name in live if last[name] > index}
        sets.append(frozenset(live))
    return sets


def needed_after(graph: Graph, head: frozenset[int]) -> frozenset[str]:
    """Names that nodes outside `head` read, and the graph's outputs."""
    read = {name for index, node in enumerate(graph.nodes) if index not in head for name in node.inputs}
    return frozenset(read | {tensor.name for tensor in graph.outputs})
