"""Random graphs for laws about cutting: small ones for brute force, and MSR's layer graphs where a folder is given."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from split_models.graph import Graph, GraphNode, GraphTensor
from split_models.min_cut import Costs


def graph_from(parents: Sequence[Sequence[int]]) -> Graph:
    """Node i reads the tensors of `parents[i]`: j for the one that node j makes, -1 for the graph's input.

    Tensors that nobody reads are the outputs.
    """
    read = {parent for row in parents for parent in row}
    nodes = tuple(GraphNode("Op", tuple(map(_name, row)), (_name(i),), 1.0) for i, row in enumerate(parents))
    names = ["x", *(_name(i) for i in range(len(parents)))]
    tensors = {name: GraphTensor(name, "FP32", (1, 4)) for name in names}
    ends = tuple(tensors[_name(i)] for i in range(len(parents)) if i not in read)
    return Graph(inputs=(tensors["x"],), outputs=ends, nodes=nodes, tensors=tensors)


def _name(index: int) -> str:
    return "x" if index < 0 else f"t{index}"


@st.composite
def graphs(draw: st.DrawFn, most_nodes: int = 8) -> Graph:
    """Any directed acyclic graph with one input; some nodes read nothing computed."""
    count = draw(st.integers(1, most_nodes))
    rows = [
        draw(st.lists(st.integers(-1, i - 1), min_size=0 if i else 1, max_size=3, unique=True)) for i in range(count)
    ]
    return graph_from(rows)


@st.composite
def costs_of(draw: st.DrawFn, graph: Graph) -> Costs:
    """Whole milliseconds, so that sums are exact enough to compare; zeros and ties are likely."""
    seconds = st.integers(0, 20).map(lambda n: n / 1e3)
    count = len(graph.nodes)
    return Costs(
        device_s=draw(st.lists(seconds, min_size=count, max_size=count)),
        server_s=draw(st.lists(seconds, min_size=count, max_size=count)),
        tensor_s={name: draw(seconds) for name in sorted(graph.tensors)},
    )


def heads(graph: Graph) -> Iterator[frozenset[int]]:
    """Every sharing: all sets of nodes that hold what feeds them."""
    makers = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
    for size in range(len(graph.nodes) + 1):
        for chosen in combinations(range(len(graph.nodes)), size):
            head = frozenset(chosen)
            if all(makers[name] in head for i in head for name in graph.nodes[i].inputs if name in makers):
                yield head


def reordered(graph: Graph, costs: Costs, seed: int) -> tuple[Graph, Costs, list[int]]:
    """The same graph in another topological order, and for each new index the old one."""
    draw = random.Random(seed)
    makers = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
    left = set(range(len(graph.nodes)))
    order: list[int] = []
    while left:
        ready = [i for i in sorted(left) if not any(makers.get(name) in left for name in graph.nodes[i].inputs)]
        order.append(draw.choice(ready))
        left.remove(order[-1])
    moved = Graph(graph.inputs, graph.outputs, tuple(graph.nodes[i] for i in order), graph.tensors)
    device_s, server_s = [costs.device_s[i] for i in order], [costs.server_s[i] for i in order]
    return moved, Costs(device_s, server_s, costs.tensor_s), order


def window_of(graph: Graph, start: int, count: int) -> Graph:
    """`count` nodes from `start` on as a graph of their own; what they read from before is the input x."""
    nodes = graph.nodes[start : start + count]
    made = {name for node in nodes for name in node.outputs}
    kept = [
        GraphNode(node.op, tuple(dict.fromkeys(n if n in made else "x" for n in node.inputs)), node.outputs, 1.0)
        for node in nodes
    ]
    read = {name for node in kept for name in node.inputs}
    ends = tuple(graph.tensors[name] for name in sorted(made - read))
    return Graph(inputs=(graph.tensors["x"],), outputs=ends, nodes=tuple(kept), tensors=graph.tensors)


def msr_graph(file: Path) -> tuple[Graph, Mapping[str, Any]]:
    """One of MSR's layer graphs (msr-fiddle/dnn-partitioning) and its document; entry nodes read the input x.

    A node makes one tensor, whose seconds to move are the `cost` of its edges (ms) and whose bytes are their `size`.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in document["nodes"]}
    sources: dict[int, list[int]] = {one: [] for one in nodes}
    for edge in document["edges"]:
        sources[edge["destId"]].append(edge["sourceId"])
    order: list[int] = []
    left = set(nodes)
    while left:
        ready = sorted(one for one in left if not left.intersection(sources[one]))
        order += ready
        left -= set(ready)
    place = {one: index for index, one in enumerate(order)}
    graph = graph_from([sorted({place[s] for s in sources[one]}) or [-1] for one in order])
    moves = {f"t{place[edge['sourceId']]}": edge["cost"] / 1e3 for edge in document["edges"]}
    device_s = [nodes[one]["cpuLatency"] / 1e3 for one in order]
    server_s = [nodes[one]["fpgaLatency"] / 1e3 for one in order]
    return graph, {"device_s": device_s, "server_s": server_s, "moves": moves, "edges": document["edges"]}
