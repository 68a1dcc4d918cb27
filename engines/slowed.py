"""A declared slow-down of a tensor runtime, by real waiting, so that every measured cost includes it.

One machine that plays both a small device and a server uses this, and says the factor wherever it reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engines.port import StoppableModel, TensorModel, TensorRuntime
from engines.stop import Stop
from protocol.clock import Clock
from protocol.tensors import Tensor, TensorSpec


class SlowedRuntime:
    """Loads models whose runs take `factor` (at least 1) times as long as they would."""

    def __init__(
        self,
        runtime: TensorRuntime,
        factor: float,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if factor < 1:
            raise ValueError("a slow-down factor is at least 1")
        self._runtime = runtime
        self._clock = clock
        self._sleep = sleep
        self.factor = factor

    @property
    def name(self) -> str:
        return self._runtime.name

    @property
    def version(self) -> str:
        return self._runtime.version

    @property
    def stoppable(self) -> bool:
        return bool(getattr(self._runtime, "stoppable", False))

    def load(self, file: Path, threads: int) -> TensorModel:
        """As the runtime's own; loading is not slowed."""
        model = self._runtime.load(file, threads)
        kind = _SlowedStoppable if isinstance(model, StoppableModel) else _SlowedModel
        return kind(model, self.factor, self._clock, self._sleep)


class _SlowedModel:
    def __init__(self, model: TensorModel, factor: float, clock: Clock, sleep: Callable[[float], None]) -> None:
        self._model = model
        self._factor = factor
        self._clock = clock
        self._sleep = sleep

    @property
    def thread_safe(self) -> bool:
        return bool(getattr(self._model, "thread_safe", False))

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        return self._model.inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        return self._model.outputs

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        began_s = self._clock()
        outputs = self._model.run(inputs)
        self._sleep((self._clock() - began_s) * (self._factor - 1))
        return outputs

    def close(self) -> None:
        self._model.close()


class _SlowedStoppable(_SlowedModel):
    """The waiting ends with the run."""

    def run_until(self, inputs: Sequence[Tensor], stop: Stop) -> Sequence[Tensor]:
        assert isinstance(self._model, StoppableModel)
        began_s = self._clock()
        outputs = self._model.run_until(inputs, stop)
        stop.wait((self._clock() - began_s) * (self._factor - 1))
        return outputs
