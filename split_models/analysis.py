"""Pure: a model's cuts with their bytes and seconds, best first under stated conditions, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from attrs import evolve, field, frozen

from split_models.codec import INT8, RAW, wire_bytes
from split_models.cuts import Cut, all_cuts
from split_models.graph import Graph, GraphTensor
from split_models.raw_input import still_input

GUESSED_FLOPS_PER_S = 10e9
"""Of one small core, where nothing was measured."""

OP_S = 3e-6
"""What an operator costs beside its arithmetic."""


@frozen
class Conditions:
    """Under which cuts are ranked: the way up, a round trip, and how many times as fast the server is."""

    up_bytes_per_s: float = 1.25e6
    rtt_s: float = 0.02
    server_speed_ratio: float = 4.0


@frozen
class Sides:
    """Seconds of a cut's head and of its tail on this machine."""

    head_s: float
    tail_s: float


@frozen
class CutFigures:
    """One cut. `predicted` never knows its own measurement; `total_s` is one request's under the conditions.

    raw_bytes: as computed. wire_bytes: with `codec`, the smallest that the crossing tensors allow; whether the answer
    bears it is measured when a bundle is made. sends_input: an input crosses, before any layer changed it.
    """

    cut: Cut
    raw_bytes: int
    wire_bytes: int
    codec: str
    predicted: Sides
    measured: Sides | None
    total_s: float
    sends_input: bool = False


@frozen
class Analysis:
    """What `models add` tells. `cuts` is best first; `why_none` says in words why it is empty.

    notes: one sentence each on what was assumed. whole_s: the whole model here, measured if `measured`. cloud_s: the
    raw input sent up and the whole model there, under the same conditions.
    """

    model: str
    format: str
    conditions: Conditions
    inputs: tuple[GraphTensor, ...] = ()
    outputs: tuple[GraphTensor, ...] = ()
    operators: int = 0
    flops: float = 0.0
    whole_s: float = 0.0
    cloud_s: float = 0.0
    measured: bool = False
    cuts: tuple[CutFigures, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    why_none: str = ""

    @property
    def single_cuts(self) -> int:
        """How many of the cuts have one tensor."""
        return sum(len(figures.cut.crossing) == 1 for figures in self.cuts)


def analyse(
    model: str,
    format: str,
    graph: Graph,
    conditions: Conditions,
    *,
    whole_s: float | None = None,
    measured: Mapping[str, Sides] | None = None,
    cuts: Sequence[Cut] | None = None,
    notes: Sequence[str] = (),
) -> Analysis:
    """The analysis of a prepared graph.

    whole_s: the whole model's seconds as measured here, else guessed from its operations. measured: by cut id.
    """
    found = all_cuts(graph) if cuts is None else cuts
    work = work_of(graph)
    whole = whole_s if whole_s is not None else work[-1]
    seen = measured or {}
    anchors = _anchors(found, work, whole, seen)
    raw = still_input(graph)
    rows = [_figures(cut, conditions, work[cut.after + 1] / work[-1], anchors, seen.get(cut.id), raw) for cut in found]
    input_bytes = sum(tensor.size_bytes for tensor in graph.inputs)
    return Analysis(
        model=model,
        format=format,
        conditions=conditions,
        inputs=graph.inputs,
        outputs=graph.outputs,
        operators=len(graph.nodes),
        flops=graph.flops,
        whole_s=whole,
        cloud_s=_sent_s(input_bytes, conditions) + whole / conditions.server_speed_ratio,
        measured=whole_s is not None,
        cuts=tuple(sorted(rows, key=lambda row: (row.total_s, row.cut.after))),
        notes=tuple(notes),
        why_none="" if rows else why_no_cut(graph),
    )


def refused(model: str, format: str, conditions: Conditions, why: str, notes: Sequence[str] = ()) -> Analysis:
    """The analysis of a file that cannot be prepared for cutting."""
    return Analysis(model=model, format=format, conditions=conditions, notes=tuple(notes), why_none=why)


def why_no_cut(graph: Graph) -> str:
    """In words, for a graph without cuts."""
    if len(graph.nodes) < 2:
        return "it is a single operator, there is nothing to divide"
    inner = {name for node in graph.nodes for name in node.outputs} - {tensor.name for tensor in graph.outputs}
    unknown = [name for name in inner if name not in graph.tensors]
    if inner and len(unknown) == len(inner):
        return "no tensor between its operators has a known fixed size; give the shapes of all inputs"
    bodies = [node.op for node in graph.nodes if node.op in ("If", "Loop", "Scan")]
    if bodies and len(graph.nodes) - len(bodies) < 2:
        return f"nearly all of it is inside the body of one {bodies[0]}, and bodies stay whole"
    return (
        "at every place either more than four tensors cross, or the rest still needs the original input"
        " and nothing that was computed, or a tensor that crosses has no known size"
    )


def work_of(graph: Graph) -> Sequence[float]:
    """Guessed seconds of the first k nodes, k from 0 to all of them; rising, the last is the whole model's."""
    return [0.0, *accumulate(seconds_of_nodes(graph))]


def seconds_of_nodes(graph: Graph) -> Sequence[float]:
    """Guessed seconds of each node on a small core."""
    return [node.flops / GUESSED_FLOPS_PER_S + OP_S for node in graph.nodes]


@frozen
class _Anchor:
    share: float
    sides: Sides
    cut: str = ""


def _anchors(
    cuts: Sequence[Cut], work: Sequence[float], whole_s: float, measured: Mapping[str, Sides]
) -> Sequence[_Anchor]:
    """Where head and tail seconds are known: both ends, and the cuts that were measured, by share of the work."""
    inner = [_Anchor(work[cut.after + 1] / work[-1], measured[cut.id], cut.id) for cut in cuts if cut.id in measured]
    ends = [_Anchor(0.0, Sides(0.0, whole_s)), _Anchor(1.0, Sides(whole_s, 0.0))]
    return sorted([*inner, *ends], key=lambda anchor: anchor.share)


def _predicted(cut: Cut, share: float, anchors: Sequence[_Anchor]) -> Sides:
    """Between the nearest anchors of other cuts, in proportion to the work."""
    others = [anchor for anchor in anchors if anchor.cut != cut.id]
    for low, high in pairwise(others):
        if low.share <= share <= high.share:
            width = high.share - low.share
            at = (share - low.share) / width if width > 0 else 0.5
            return Sides(
                low.sides.head_s + at * (high.sides.head_s - low.sides.head_s),
                low.sides.tail_s + at * (high.sides.tail_s - low.sides.tail_s),
            )
    return others[-1].sides


def _figures(
    cut: Cut,
    conditions: Conditions,
    share: float,
    anchors: Sequence[_Anchor],
    measured: Sides | None,
    raw: frozenset[str],
) -> CutFigures:
    crossing = tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in cut.crossing)
    codec = INT8 if any(tensor.datatype == "FP32" for tensor in cut.crossing) else RAW
    predicted = _predicted(cut, share, anchors)
    used = measured or predicted
    size_bytes = wire_bytes(codec, crossing)
    total_s = used.head_s + _sent_s(size_bytes, conditions) + used.tail_s / conditions.server_speed_ratio
    return CutFigures(
        cut=cut,
        raw_bytes=cut.size_bytes,
        wire_bytes=size_bytes,
        codec=codec,
        predicted=predicted,
        measured=measured,
        total_s=total_s,
        sends_input=any(tensor.name in raw for tensor in cut.crossing),
    )


def _sent_s(size_bytes: int, conditions: Conditions) -> float:
    return size_bytes / conditions.up_bytes_per_s + conditions.rtt_s


def without(analysis: Analysis, ids: Mapping[str, str]) -> Analysis:
    """The analysis without these cuts; `ids` says why for each, which becomes a note."""
    if not ids:
        return analysis
    kept = tuple(figures for figures in analysis.cuts if figures.cut.id not in ids)
    note = f"{len(analysis.cuts) - len(kept)} cuts were left out: {next(iter(ids.values()))}"
    why = analysis.why_none or ("" if kept else next(iter(ids.values())))
    return evolve(analysis, cuts=kept, notes=(*analysis.notes, note), why_none=why)
