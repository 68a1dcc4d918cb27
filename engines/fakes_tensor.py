"""In-tree fakes of the tensor ports: y = 2 x in float32, with delays and failures on demand; no numpy."""

from __future__ import annotations

import array
import asyncio
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engines.model_inputs import match_inputs
from engines.port import TensorAnswer
from engines.stop import Stop
from protocol.errors import EngineError, MidstreamError, NotFound
from protocol.tensors import Tensor, TensorSpec

MAGIC = b"fake model\n"
INPUT = TensorSpec("x", "FP32", (None, 4))
OUTPUT = TensorSpec("y", "FP32", (None, 4))


def double(data: bytes | memoryview) -> bytes:
    """Little-endian float32 values, each times two."""
    values = array.array("f", bytes(data))
    if sys.byteorder == "big":
        values.byteswap()
    doubled = array.array("f", (2 * v for v in values))
    if sys.byteorder == "big":
        doubled.byteswap()
    return doubled.tobytes()


class FakeTensorModel:
    """y = 2 x. `delay_s` is slept in each run; errors of `failures` are raised by the next runs, one each.

    rows: the first dimension; None leaves it free.
    """

    thread_safe = True

    def __init__(
        self, *, delay_s: float = 0.0, failures: Sequence[BaseException] = (), rows: int | None = None
    ) -> None:
        self._rows = rows
        self._delay_s = delay_s
        self._failures = list(failures)
        self._closed = False
        self.runs = 0

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        return (TensorSpec(INPUT.name, INPUT.datatype, (self._rows, 4)),)

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        return (OUTPUT,)

    @property
    def closed(self) -> bool:
        return self._closed

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._closed:
            raise EngineError("the fake model was closed")
        (x,) = match_inputs(inputs, self.inputs)
        self.runs += 1
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._failures:
            raise self._failures.pop(0)
        return (Tensor("y", "FP32", x.shape, double(x.data)),)

    def close(self) -> None:
        self._closed = True


class FakeStoppableModel(FakeTensorModel):
    """Its sleep ends with the run."""

    def run_until(self, inputs: Sequence[Tensor], stop: Stop) -> Sequence[Tensor]:
        stop.wait(self._delay_s)
        delay_s, self._delay_s = self._delay_s, 0.0
        try:
            return self.run(inputs)
        finally:
            self._delay_s = delay_s


class FakeTensorRuntime:
    """Loads files that begin with MAGIC; remembers its models in `loaded`. stoppable: their runs can be stopped."""

    name = "fake"
    version = "1"

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        load_delay_s: float = 0.0,
        failures: Sequence[BaseException] = (),
        rows: int | None = None,
        stoppable: bool = False,
    ) -> None:
        self.stoppable = stoppable
        self._rows = rows
        self._delay_s = delay_s
        self._load_delay_s = load_delay_s
        self.failures = tuple(failures)
        self.loaded: list[FakeTensorModel] = []

    def load(self, file: Path, threads: int) -> FakeTensorModel:
        if self._load_delay_s:
            time.sleep(self._load_delay_s)
        try:
            is_model = file.read_bytes().startswith(MAGIC)
        except OSError as err:
            raise EngineError(f"{file.name} is not there") from err
        if not is_model:
            raise EngineError(f"{file.name} is not a fake model")
        kind = FakeStoppableModel if self.stoppable else FakeTensorModel
        model = kind(delay_s=self._delay_s, failures=self.failures, rows=self._rows)
        self.loaded.append(model)
        return model


class FakeTensorEndpoint:
    """Answers for `models` with y = 2 x; `wait` and `delay_s` are what it reports and takes."""

    def __init__(
        self,
        models: Sequence[str] = ("double",),
        *,
        delay_s: float = 0.0,
        wait: float = 0.0,
        failures: Sequence[MidstreamError] = (),
    ) -> None:
        self._models = {name: FakeTensorModel() for name in models}
        self._delay_s = delay_s
        self._wait_s = wait
        self._failures = list(failures)
        self.asked: list[str] = []

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        self.asked.append(model)
        found = self._models.get(model)
        if found is None:
            raise NotFound(f"there is no model {model!r} here", field="model")
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.sleep(self._delay_s)
        except TimeoutError as err:
            raise EngineError(f"{model} did not answer within {deadline_s} s") from err
        if self._failures:
            raise self._failures.pop(0)
        digest = hashlib.sha256(model.encode()).hexdigest()
        return TensorAnswer(found.run(inputs), digest, wait_s=self._wait_s, compute_s=self._delay_s)

    def wait_s(self) -> float:
        return self._wait_s
