"""Probes of tensor models: load, whole run, head run, over thread counts -> protocol.device.Measured.

A schedule (profiles.benchmark) decides which run and when; each probe here is bounded in runs and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median, quantiles

from attrs import frozen

from engines.port import TensorModel, TensorRuntime
from protocol.clock import Clock
from protocol.device import Measured
from protocol.errors import BadRequest
from protocol.tensors import DATATYPE_BYTES, Tensor, TensorSpec

WARM_UP_RUNS = 2
"""The first run of a session allocates and packs weights."""


EXPECTED_LOAD_S = 1.0


@frozen
class Effort:
    """How long one probe may take: at most `runs` runs after warming up, and no new run after `budget_s` seconds."""

    runs: int = 15
    budget_s: float = 3.0


DEFAULT_EFFORT = Effort()


@frozen
class TensorProbe:
    """One measurement to be made. `run` blocks for about `expected_s` seconds and raises MidstreamErrors only."""

    name: str
    expected_s: float
    run: Callable[[], Measured]


def tensor_probes(
    runtime: TensorRuntime,
    file: Path,
    digest: str,
    *,
    model: str,
    what: str = "whole",
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    threads: Sequence[int] = (1,),
    effort: Effort = DEFAULT_EFFORT,
    clock: Clock = time.perf_counter,
) -> tuple[TensorProbe, ...]:
    """Probes of one file: loading (with the first thread count), then a run for each thread count.

    what: `whole` or `head:<cut>:<codec>`. input_shapes: sizes for free dimensions, by input name; 1 where absent.
    """

    def load_probe() -> Measured:
        def load() -> None:
            runtime.load(file, threads[0]).close()

        return _measured(load, clock, Effort(min(3, effort.runs), effort.budget_s), digest, runtime, threads[0], "load")

    def run_probe(count: int) -> Callable[[], Measured]:
        def run() -> Measured:
            loaded = runtime.load(file, count)
            try:
                inputs = sample_inputs(loaded, input_shapes or {})
                return _measured(lambda: loaded.run(inputs), clock, effort, digest, runtime, count, what)
            finally:
                loaded.close()

        return run

    label = f"{model} {what} on {runtime.name}"
    runs = [TensorProbe(f"{label}, {count} threads", effort.budget_s, run_probe(count)) for count in threads]
    return (TensorProbe(f"{model} load on {runtime.name}", EXPECTED_LOAD_S, load_probe), *runs)


def sample_inputs(model: TensorModel, shapes: Mapping[str, Sequence[int]]) -> tuple[Tensor, ...]:
    """Inputs of zeros in the given shapes; run time of the shipped models does not depend on values.

    Raises BadRequest for a shape that the model does not take.
    """
    return tuple(_zeros(spec, shapes.get(spec.name)) for spec in model.inputs)


def _zeros(spec: TensorSpec, wanted: Sequence[int] | None) -> Tensor:
    shape = tuple(wanted) if wanted is not None else tuple(1 if d is None else d for d in spec.shape)
    size = DATATYPE_BYTES.get(spec.datatype)
    if size is None:
        raise BadRequest(f"input {spec.name!r} of type {spec.datatype} cannot be made up", field=spec.name)
    return Tensor(spec.name, spec.datatype, shape, bytes(size * prod(shape)))


def _measured(
    work: Callable[[], object],
    clock: Clock,
    effort: Effort,
    digest: str,
    runtime: TensorRuntime,
    threads: int,
    what: str,
) -> Measured:
    seconds = timed(work, clock, effort)
    return Measured(
        digest=digest,
        engine=runtime.name,
        threads=threads,
        what=what,
        median_s=median(seconds),
        spread_s=half_iqr(seconds),
    )


def timed(work: Callable[[], object], clock: Clock, effort: Effort) -> list[float]:
    """Seconds of each run after warming up; at least one, however slow."""
    began_s = clock()
    for _ in range(WARM_UP_RUNS):
        work()
        if clock() - began_s > effort.budget_s / 2:
            break
    seconds: list[float] = []
    while len(seconds) < effort.runs and (not seconds or clock() - began_s < effort.budget_s):
        start_s = clock()
        work()
        seconds.append(clock() - start_s)
    return seconds


def half_iqr(values: Sequence[float]) -> float:
    """Half the inter-quartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2
