"""Probes of tensor models, and the declared slow-down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.fakes_tensor import MAGIC, FakeTensorRuntime
from engines.measure import Effort, half_iqr, tensor_probes, timed
from engines.onnx import OnnxRuntime
from engines.slowed import SlowedRuntime
from engines.tflite import TfliteRuntime
from profiles.benchmark import Probe
from protocol.clock import FakeClock
from protocol.errors import BadRequest, EngineError
from protocol.tensors import Tensor

QUICK = Effort(runs=3, budget_s=1.0)


@pytest.mark.parametrize(("name", "runtime"), [("ppocr-v2-cls", OnnxRuntime()), ("face-short-range", TfliteRuntime())])
def test_real_models_are_measured_per_thread_count(
    model_file: Callable[[str], Path], name: str, runtime: OnnxRuntime | TfliteRuntime
) -> None:
    shapes = {"x": (1, 3, 48, 192)}
    probes: tuple[Probe, ...] = tensor_probes(
        runtime, model_file(name), "d" * 64, model=name, input_shapes=shapes, threads=(1, 2), effort=QUICK
    )
    assert len({probe.name for probe in probes}) == 3
    found = [probe.run() for probe in probes]
    assert [(m.what, m.threads) for m in found] == [("load", 1), ("whole", 1), ("whole", 2)]
    assert all(m.median_s > 0 and m.spread_s >= 0 and m.engine == runtime.name for m in found)


def test_a_broken_model_is_an_engine_error_and_a_wrong_shape_a_bad_request(tmp_path: Path) -> None:
    file = tmp_path / "m.fake"
    file.write_bytes(b"nonsense")
    load, whole = tensor_probes(FakeTensorRuntime(), file, "d", model="m", effort=QUICK)
    for probe in (load, whole):
        with pytest.raises(EngineError):
            probe.run()
    file.write_bytes(MAGIC)
    _, whole = tensor_probes(FakeTensorRuntime(), file, "d", model="m", input_shapes={"x": (1, 5)}, effort=QUICK)
    with pytest.raises(BadRequest):
        whole.run()


def test_the_effort_bounds_runs_and_seconds() -> None:
    clock = FakeClock()
    assert len(timed(lambda: clock.advance(0.001), clock, Effort(runs=7, budget_s=100))) == 7
    assert len(timed(lambda: clock.advance(1.0), clock, Effort(runs=100, budget_s=5.0))) == 3
    assert timed(lambda: clock.advance(60.0), clock, Effort(runs=100, budget_s=5.0)) == [60.0]


def test_half_iqr() -> None:
    assert half_iqr([3.0]) == 0.0
    assert half_iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0


@pytest.mark.parametrize("factor", [1.0, 3.0, 10.0])
def test_a_slowed_run_takes_factor_times_the_real_one(tmp_path: Path, factor: float) -> None:
    clock = FakeClock()

    class Ticking(FakeTensorRuntime):
        def load(self, file: Path, threads: int) -> TickingModel:  # type: ignore[override]
            return TickingModel()

    class TickingModel:
        inputs = ()
        outputs = ()

        def run(self, inputs: object) -> tuple[Tensor, ...]:
            clock.advance(0.5)
            return ()

        def close(self) -> None:
            return None

    runtime = SlowedRuntime(Ticking(), factor, clock=clock, sleep=clock.advance)
    assert (runtime.name, runtime.version, runtime.factor) == ("fake", "1", factor)
    runtime.load(tmp_path, 1).run(())
    assert clock() == pytest.approx(0.5 * factor)


def test_a_speed_up_cannot_be_declared() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SlowedRuntime(FakeTensorRuntime(), 0.5)
