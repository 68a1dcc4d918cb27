"""Pure: the best way to share a graph between device and server, as a minimum cut. For the bench and the bundle only.

The network is that of DADS (Hu et al., INFOCOM 2019): the source side is the device. source -> node costs the node's
seconds on the server, node -> sink those on the device; a tensor is a vertex of its own, so that it is paid once
however many nodes read it; unlimited edges from a node to what feeds it forbid coming back. Seconds are whole
nanoseconds inside, so that equal cuts are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from attrs import frozen

from split_models.cuts import Cut, crossing_of_head, crossing_of_names
from split_models.graph import Graph

_NANO = 1e9


@frozen
class Costs:
    """Seconds per node on either side and of each tensor's way up; a tensor that is not named is free.

    tensor_s of a graph input is that of the form in which it may travel, encoded or raw.
    """

    device_s: Sequence[float]
    server_s: Sequence[float]
    tensor_s: Mapping[str, float]


@frozen
class Shared:
    """A sharing of the graph: indexes of the device's nodes, and seconds without round trips and the answer's way."""

    head: frozenset[int]
    seconds: float


def min_cut(graph: Graph, costs: Costs) -> Shared:
    """The sharing with the fewest seconds; of several the one with the smallest head.

    O(V^2 E) at worst (Dinic), in practice a few passes over the edges.
    """
    flow = _Flow(graph, costs)
    flow.fill()
    head = frozenset(index for index in range(len(graph.nodes)) if flow.on_device(index))
    return Shared(head, seconds_of(graph, costs, head))


def seconds_of(graph: Graph, costs: Costs, head: frozenset[int]) -> float:
    """What a sharing costs: each node on its side, each tensor that another side reads once."""
    made = {name for index in head for name in graph.nodes[index].outputs} | {tensor.name for tensor in graph.inputs}
    read = {name for index, node in enumerate(graph.nodes) if index not in head for name in node.inputs}
    nodes_s = sum(costs.device_s[i] if i in head else costs.server_s[i] for i in range(len(graph.nodes)))
    return nodes_s + sum(costs.tensor_s.get(name, 0.0) for name in sorted(made & read))


def cut_of(graph: Graph, head: frozenset[int], name: str) -> Cut | None:
    """The sharing as a cut called `name`; None for an endpoint, or when a crossing tensor has no known size."""
    if not head or len(head) == len(graph.nodes):
        return None
    crossing = crossing_of_names(graph, crossing_of_head(graph, head))
    if not crossing:
        return None
    flops = sum(graph.nodes[index].flops for index in head)
    return Cut(id=name, after=max(head), crossing=crossing, head_flops=flops)


class _Flow:
    """Dinic's algorithm on the network of one graph; edge 2k and its reverse 2k + 1 lie beside each other."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        count = len(graph.nodes)
        self._source, self._sink = count, count + 1
        self._edges: list[list[int]] = [[] for _ in range(count + 2)]
        self._to: list[int] = []
        self._room: list[int] = []
        seconds = [*costs.device_s, *costs.server_s, *costs.tensor_s.values()]
        self._unlimited = sum(_whole(one) for one in seconds) + 1
        for index in range(count):
            self._edge(self._source, index, _whole(costs.server_s[index]))
            self._edge(index, self._sink, _whole(costs.device_s[index]))
        self._tensors(graph, costs)
        self._level: list[int] = []

    def _tensors(self, graph: Graph, costs: Costs) -> None:
        readers: dict[str, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(index)
        makers = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
        makers |= {tensor.name: self._source for tensor in graph.inputs}
        for name, nodes in readers.items():
            maker = makers[name]
            self._edges.append([])
            vertex = len(self._edges) - 1
            self._edge(maker, vertex, _whole(costs.tensor_s.get(name, 0.0)))
            for index in nodes:
                self._edge(vertex, index, self._unlimited)
                if maker != self._source:
                    self._edge(index, maker, self._unlimited)

    def _edge(self, start: int, end: int, room: int) -> None:
        self._edges[start].append(len(self._to))
        self._edges[end].append(len(self._to) + 1)
        self._to += [end, start]
        self._room += [room, 0]

    def fill(self) -> None:
        while self._levels():
            self._next = [0] * len(self._edges)
            while self._push():
                pass

    def on_device(self, index: int) -> bool:
        """After fill: whether the source still reaches the node."""
        return self._level[index] >= 0

    def _levels(self) -> bool:
        """Distances from the source over edges with room; whether the sink is among them."""
        level, to, room = [-1] * len(self._edges), self._to, self._room
        level[self._source] = 0
        waiting = deque([self._source])
        while waiting:
            here = waiting.popleft()
            for edge in self._edges[here]:
                there = to[edge]
                if room[edge] > 0 and level[there] < 0:
                    level[there] = level[here] + 1
                    waiting.append(there)
        self._level = level
        return level[self._sink] >= 0

    def _push(self) -> bool:
        """One more path from source to sink that goes down level by level, filled; False when there is none."""
        to, room, level, position = self._to, self._room, self._level, self._next
        path: list[int] = []
        here = self._source
        while here != self._sink:
            edges = self._edges[here]
            while position[here] < len(edges):
                edge = edges[position[here]]
                if room[edge] > 0 and level[to[edge]] == level[here] + 1:
                    break
                position[here] += 1
            else:
                if not path:
                    return False
                level[here] = -1
                here = to[path.pop() ^ 1]
                position[here] += 1
                continue
            path.append(edge)
            here = to[edge]
        least = min(room[edge] for edge in path)
        for edge in path:
            room[edge] -= least
            room[edge ^ 1] += least
        return True


def _whole(seconds: float) -> int:
    return round(seconds * _NANO)
