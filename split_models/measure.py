"""Measure parts of models: median seconds of heads on a device and of tails on a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

from attrs import frozen

from engines.port import TensorModel, TensorRuntime
from protocol.clock import Clock
from protocol.device import Measured
from protocol.models import BundleManifest, CutEntry
from protocol.tensors import DATATYPE_BYTES, Tensor, TensorSpec

RUNS = 5


@frozen
class Timed:
    """median_s of one run, and half the inter-quartile range."""

    median_s: float
    spread_s: float


def time_calls(call: Callable[[], object], runs: int = RUNS, clock: Clock = time.perf_counter) -> Timed:
    """Call once to warm up, then `runs` times."""
    call()
    seconds: list[float] = []
    for _ in range(max(1, runs)):
        started = clock()
        call()
        seconds.append(clock() - started)
    if len(seconds) < 2:
        return Timed(seconds[0], 0.0)
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return Timed(median(seconds), (high - low) / 2)


MeasureRun = Callable[[TensorModel, Sequence[Tensor]], Timed]


def time_model(model: TensorModel, inputs: Sequence[Tensor]) -> Timed:
    """Seconds of model.run(inputs)."""
    return time_calls(lambda: model.run(inputs))


def zeros(spec: TensorSpec) -> Tensor:
    """A tensor of zeros that fits, free dimensions taken as 1; convolution takes as long for zeros as for pictures."""
    shape = tuple(1 if size is None else size for size in spec.shape)
    elements = 1
    for size in shape:
        elements *= size
    return Tensor(spec.name, spec.datatype, shape, bytes(elements * DATATYPE_BYTES[spec.datatype]))


@frozen
class Probe:
    """One bounded measurement for the device's benchmark: `run` blocks for about `expected_s` seconds."""

    name: str
    expected_s: float
    run: Callable[[], Measured]


def head_probes(
    manifest: BundleManifest,
    file_of: Callable[[CutEntry], Path],
    runtime: TensorRuntime,
    threads: int,
    measure: MeasureRun = time_model,
) -> Sequence[Probe]:
    """One probe per offered cut and codec; the head's file is asked for when the probe runs."""

    def probe(entry: CutEntry) -> Probe:
        what = f"head:{entry.id}:{entry.codec}"
        share = entry.head_flops / manifest.flops if manifest.flops else 1.0
        return Probe(
            name=f"{manifest.model} {what}",
            expected_s=(RUNS + 1) * manifest.whole_s * share,
            run=lambda: measure_file(file_of(entry), runtime, threads, manifest.digest, what, measure),
        )

    return [probe(entry) for entry in manifest.cuts]


def measure_file(
    file: Path, runtime: TensorRuntime, threads: int, digest: str, what: str, measure: MeasureRun = time_model
) -> Measured:
    """Load a part, time it on zeros, close it. Raises EngineError when it does not load or run."""
    model = runtime.load(file, threads)
    try:
        timed = measure(model, [zeros(spec) for spec in model.inputs])
    finally:
        model.close()
    return Measured(
        digest=digest, engine=runtime.name, threads=threads, what=what, median_s=timed.median_s, spread_s=timed.spread_s
    )
