"""Run the whole model and the parts of a few cuts on this machine, so that the others are predicted between them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from attrs import evolve, frozen

from engines.port import TensorRuntime
from protocol.durable import disk_error
from protocol.errors import MidstreamError
from protocol.tensors import Tensor
from split_models.analysis import Analysis, Sides, analyse
from split_models.codec import RAW
from split_models.cuts import Cut
from split_models.graph import Graph
from split_models.measure import MeasureRun

ANCHORS = 6
"""Cuts whose head and tail are measured."""

Steps = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


def no_steps(done: int, total: int) -> None:
    """Shows nothing."""


class PartFiles(Protocol):
    """Head and tail of one cut as files."""

    @property
    def head(self) -> bytes: ...

    @property
    def tail(self) -> bytes: ...


class Splitter(Protocol):
    """What both graph backends offer."""

    def split(self, cut: Cut, codec: str) -> PartFiles:
        """Head and tail of a cut. Raises EngineError."""


@frozen
class Bench:
    """Times files of models on the same inputs; `suffix` is that of the format.

    beside: side files that the models refer to; the scratch folder is then made next to them, with hard links to them.
    """

    runtime: TensorRuntime
    measure: MeasureRun
    inputs: Sequence[Tensor]
    threads: int
    suffix: str
    beside: Sequence[Path] = ()

    def timed(self, data: bytes, inputs: Sequence[Tensor]) -> tuple[float, Sequence[Tensor]]:
        """Median seconds of a model on these inputs, and what it gives. Raises EngineError or ConfigError (disk)."""
        where = self.beside[0].parent if self.beside else None
        try:
            with tempfile.TemporaryDirectory(prefix=".midstream-analyse-", dir=where) as folder:
                file = Path(folder) / f"part{self.suffix}"
                file.write_bytes(data)
                for side in self.beside:  # onnxruntime follows no symbolic link out of a model's folder
                    (Path(folder) / side.name).hardlink_to(side)
                return self._timed(file, inputs)
        except OSError as err:
            raise disk_error(err, where or Path(tempfile.gettempdir())) from err

    def _timed(self, file: Path, inputs: Sequence[Tensor]) -> tuple[float, Sequence[Tensor]]:
        model = self.runtime.load(file, self.threads)
        try:
            return self.measure(model, inputs).median_s, model.run(inputs)
        finally:
            model.close()


def with_measurements(
    first: Analysis,
    graph: Graph,
    whole: bytes,
    splitter: Splitter,
    bench: Bench,
    go_on: Callable[[], bool],
    progress: Steps = no_steps,
) -> Analysis:
    """The analysis once more, with the whole model's seconds and those of up to ANCHORS cuts while `go_on()`.

    A model that does not run here keeps its predictions, with a note that says why.
    """
    chosen = anchors_of(first)
    seen: dict[str, Sides] = {}
    progress(0, len(chosen) + 1)
    try:
        whole_s, _ = bench.timed(whole, bench.inputs)
        for done, cut in enumerate(chosen, 1):
            progress(done, len(chosen) + 1)
            if not go_on():
                break
            parts = splitter.split(cut, RAW)
            head_s, sent = bench.timed(parts.head, bench.inputs)
            tail_s, _ = bench.timed(parts.tail, sent)
            seen[cut.id] = Sides(head_s, tail_s)
    except MidstreamError as err:  # also inputs that the model refuses when it sees their values
        return evolve(first, notes=(*first.notes, f"it could not be measured: {err.message}"))
    progress(len(chosen) + 1, len(chosen) + 1)
    cuts = sorted((figures.cut for figures in first.cuts), key=lambda cut: cut.after)
    again = analyse(
        first.model, first.format, graph, first.conditions,
        whole_s=whole_s, measured=seen, cuts=cuts, notes=first.notes,
    )  # fmt: skip
    return evolve(again, why_none=first.why_none)


def anchors_of(analysis: Analysis) -> Sequence[Cut]:
    """Which cuts to measure: the best three, and others spread over the work between input and output."""
    best = [figures.cut for figures in analysis.cuts[:3]]
    spread = sorted((figures.cut for figures in analysis.cuts), key=lambda cut: cut.after)
    for place in range(1, 2 * ANCHORS):
        if len(best) >= min(ANCHORS, len(spread)):
            break
        cut = spread[len(spread) * place // (2 * ANCHORS)]
        if cut not in best:
            best.append(cut)
    return best
