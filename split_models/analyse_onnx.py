"""From an ONNX file of anybody's to its analysis: shapes, preparation, cuts, and measurements at a few of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve, field, frozen

from engines.onnx import OnnxRuntime
from engines.port import TensorRuntime
from protocol.clock import Clock
from protocol.errors import EngineError
from split_models.analysis import Analysis, Conditions, analyse, refused, without
from split_models.cuts import Cut
from split_models.input_shapes import read_sample, resolve
from split_models.measure import MeasureRun, time_model
from split_models.measured_cuts import Bench, Steps, no_steps, with_measurements
from split_models.onnx_files import MAX_MODEL_BYTES
from split_models.partition_onnx import Partitioner
from split_models.prepare_onnx import Prepared, inputs_of, prepare, whole_file
from split_models.sampled import sampled_inputs

FORMAT = "onnx"


@frozen
class Asked:
    """What the user said about the inputs, and whether and how long to measure."""

    shapes: Mapping[str, tuple[int, ...]] = field(factory=dict)
    sample: Path | None = None
    conditions: Conditions = field(factory=Conditions)
    measure: bool = True
    seconds: float = 20.0
    threads: int = 0


def analyse_onnx(
    file: Path,
    asked: Asked | None = None,
    *,
    name: str | None = None,
    runtime: TensorRuntime | None = None,
    measure: MeasureRun = time_model,
    clock: Clock = time.monotonic,
    progress: Steps = no_steps,
) -> Analysis:
    """Load, fix shapes, fold, enumerate, rank; with `asked.measure` also run the whole model and a few cuts.

    A file that cannot be cut gives an analysis that says why. Raises ConfigError for shapes or samples that do not fit.
    """
    asked = asked or Asked()
    name = name or file.stem
    notes: tuple[str, ...] = ()
    try:
        ports = inputs_of(file)
        sample = read_sample(asked.sample, ports) if asked.sample is not None else ()
        resolved = resolve(ports, asked.shapes, sample)
        notes = resolved.notes
        prepared = prepare(file, resolved.shapes, weights_digest=False)
    except EngineError as err:
        return refused(name, FORMAT, asked.conditions, str(err), notes)
    first = analyse(name, FORMAT, prepared.graph, asked.conditions, notes=[*notes, *_said(prepared)])
    first = without(first, _too_large(prepared, [figures.cut for figures in first.cuts]))
    if not asked.measure:
        return first
    inputs = sample if len(sample) == len(ports) else sampled_inputs(prepared.graph.inputs)
    bench = Bench(runtime or OnnxRuntime(), measure, inputs, asked.threads, ".onnx")
    ends_s = clock() + asked.seconds
    try:
        whole = whole_file(prepared)
    except EngineError as err:
        return evolve(first, notes=(*first.notes, f"nothing was measured: {err.message}"))
    return with_measurements(
        first, prepared.graph, whole, Partitioner(prepared), bench, lambda: clock() < ends_s, progress
    )


def _said(prepared: Prepared) -> Sequence[str]:
    if not prepared.folded:
        return ("onnxruntime could not save the graph with its bodies, so nothing was folded",)
    if prepared.folder is not None:
        return ("the large weights stayed in their side file; nothing that needs their values was folded",)
    return ()


def _too_large(prepared: Prepared, cuts: Sequence[Cut]) -> Mapping[str, str]:
    """Cuts of which a side holds more weights than one file may; only models with side files can be that large."""
    if prepared.folder is None:
        return {}
    sizes = [node.weight_bytes for node in prepared.graph.nodes]
    found = {}
    for cut in cuts:
        larger = max(sum(sizes[: cut.after + 1]), sum(sizes[cut.after + 1 :]))
        if larger > MAX_MODEL_BYTES:
            found[cut.id] = f"one side would hold {larger / 1e9:.1f} GB of weights, over the 2 GB of one file"
    return found
