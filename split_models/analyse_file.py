"""From a model file of anybody's to its analysis: shapes, preparation, cuts, and measurements at a few of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from engines.port import TensorRuntime
from protocol.clock import Clock
from protocol.errors import EngineError
from protocol.tensors import Tensor, TensorSpec
from split_models.analysis import Analysis, Conditions, analyse, refused, without
from split_models.backend import Backend, backend_of
from split_models.cuts import Cut
from split_models.external_data import INLINE_BYTES, side_files
from split_models.input_shapes import read_sample, resolve
from split_models.measure import MeasureRun, time_model
from split_models.measured_cuts import Bench, Steps, no_steps, with_measurements
from split_models.onnx_files import MAX_MODEL_BYTES
from split_models.partition_onnx import Partitioner as OnnxPartitioner
from split_models.prepare_onnx import prepare
from split_models.task import SampledTask


@frozen
class Asked:
    """What the user said about the inputs, and whether and how long to measure.

    inline_bytes: more weights than this in side files stay there; see prepare_onnx.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(factory=dict)
    sample: Path | None = None
    conditions: Conditions = field(factory=Conditions)
    measure: bool = True
    seconds: float = 20.0
    threads: int = 0
    inline_bytes: int = INLINE_BYTES


def analyse_file(
    file: Path,
    kind: str = "onnx",
    asked: Asked | None = None,
    *,
    name: str | None = None,
    runtime: TensorRuntime | None = None,
    measure: MeasureRun = time_model,
    clock: Clock = time.monotonic,
    progress: Steps = no_steps,
) -> Analysis:
    """Load, fix shapes, fold, enumerate, rank; with `asked.measure` also run the whole model and a few cuts.

    kind: "onnx" or "tflite". A file that cannot be cut gives an analysis that says why. Raises ConfigError for shapes
    or samples that do not fit, and for other kinds.
    """
    asked = asked or Asked()
    name = name or file.stem
    backend = backend_of(kind)
    runtime = runtime or backend.runtime()
    notes: tuple[str, ...] = ()
    try:
        ports = backend.inputs(file)
        sample = read_sample(asked.sample, ports) if asked.sample is not None else ()
        resolved = resolve(ports, asked.shapes, sample)
        notes = resolved.notes
        prepared = _prepare(file, backend, resolved.shapes, asked.inline_bytes)
    except EngineError as err:
        guessed = "; shapes were guessed, so give those that the model takes" if notes else ""
        return refused(name, kind, asked.conditions, f"{err}{guessed}", notes)
    first = analyse(name, kind, prepared.graph, asked.conditions, notes=[*notes, *_said(prepared)])
    first = without(first, _too_large(prepared, [figures.cut for figures in first.cuts]))
    if not asked.measure:
        return first
    inputs = sample if len(sample) == len(ports) else _sampled(prepared, backend)
    beside = _beside(prepared)
    bench = Bench(runtime, measure, inputs, asked.threads, f".{kind}", beside)
    whole = prepared.data if beside else backend.whole(prepared)
    splitter = OnnxPartitioner(prepared, by_reference=True) if beside else backend.partitioner(prepared)
    ends_s = clock() + asked.seconds
    return with_measurements(first, prepared.graph, whole, splitter, bench, lambda: clock() < ends_s, progress)


def _beside(prepared: Any) -> Sequence[Path]:
    """Side files that a prepared model refers to."""
    folder = getattr(prepared, "folder", None)
    return [folder / name for name in side_files(prepared.proto)] if folder is not None else []


def _prepare(file: Path, backend: Backend, shapes: Mapping[str, tuple[int, ...]], inline_bytes: int) -> Any:
    if backend.format == "onnx":
        return prepare(file, shapes, inline_bytes)
    return backend.prepare(file, shapes)


def _sampled(prepared: Any, backend: Backend) -> Sequence[Tensor]:
    specs = [TensorSpec(tensor.name, tensor.datatype, tensor.shape) for tensor in prepared.graph.inputs]
    return SampledTask(specs, backend.index_bounds(prepared)).cases(())[0].made.inputs


def _said(prepared: Any) -> Sequence[str]:
    if not getattr(prepared, "folded", True):
        return ("onnxruntime could not save the graph with its bodies, so nothing was folded",)
    if getattr(prepared, "folder", None) is not None:
        return ("the large weights stayed in their side file; nothing that needs their values was folded",)
    return ()


def _too_large(prepared: Any, cuts: Sequence[Cut]) -> Mapping[str, str]:
    """Cuts of which a side holds more weights than one file may; only models with side files can be that large."""
    if getattr(prepared, "folder", None) is None:
        return {}
    sizes = [node.weight_bytes for node in prepared.graph.nodes]
    found = {}
    for cut in cuts:
        larger = max(sum(sizes[: cut.after + 1]), sum(sizes[cut.after + 1 :]))
        if larger > MAX_MODEL_BYTES:
            found[cut.id] = f"one side would hold {larger / 1e9:.1f} GB of weights, over the 2 GB of one file"
    return found
