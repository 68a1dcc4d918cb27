"""TensorRuntime over onnxruntime, the only module that names it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.arrays import to_array, to_tensor
from engines.digest import file_sha256
from engines.model_inputs import match_inputs
from engines.registry import import_native
from engines.stop import Stop
from protocol.errors import BadRequest, EngineError
from protocol.extras import install_step
from protocol.tensors import Tensor, TensorSpec

_DATATYPES: Mapping[str, str] = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}  # fmt: skip


class OnnxRuntime:
    """Loads ONNX files with the CPU provider."""

    name = "onnx"
    stoppable = True

    @property
    def version(self) -> str:
        """Installed version of onnxruntime, without importing it. Raises EngineError when it is absent."""
        try:
            return importlib.metadata.version("onnxruntime")
        except importlib.metadata.PackageNotFoundError as err:
            raise EngineError("onnxruntime is not installed", next_step=install_step("onnx")) from err

    def load(self, file: Path, threads: int) -> OnnxModel:
        """Load with `threads` intra-op threads (0: the library's choice).

        Raises EngineError when the file is absent or not a model that this build can run.
        """
        ort = import_native("onnxruntime", extra="onnx")
        if not file.is_file():
            raise EngineError(f"{file.name} is not there", next_step="midstream models list shows what is")
        try:
            session = ort.InferenceSession(str(file), session_options(threads), providers=["CPUExecutionProvider"])
        except Exception as err:  # the binding's errors share no root of their own
            raise EngineError(
                f"{file.name} is not a model that onnxruntime {ort.__version__} can load: {_first_line(err)}",
                next_step="midstream models verify checks the file; a newer onnxruntime may know its operators",
            ) from err
        return OnnxModel(session, file)


class OnnxModel:
    """A loaded ONNX graph. onnxruntime lets several threads run one session at once."""

    thread_safe = True

    def __init__(self, session: Any, file: Path) -> None:
        self._session: Any = session
        self._file = file
        self._digest: str | None = None
        self._inputs = tuple(_spec(value) for value in session.get_inputs())
        self._outputs = tuple(_spec(value) for value in session.get_outputs())

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        return self._inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        return self._outputs

    @property
    def digest(self) -> str:
        """sha256 of the file, computed at the first use."""
        if self._digest is None:
            self._digest = file_sha256(self._file)
        return self._digest

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """All outputs in order. Raises BadRequest for inputs that do not fit, EngineError when the graph fails."""
        return self._run(inputs, None)

    def run_until(self, inputs: Sequence[Tensor], stop: Stop) -> Sequence[Tensor]:
        """As `run`; ends with Stopped at the next operator once `stop` asks for it."""
        options = import_native("onnxruntime", extra="onnx").RunOptions()

        def terminate() -> None:
            options.terminate = True

        with stop.during(terminate):
            try:
                return self._run(inputs, options)
            except EngineError:
                stop.check()
                raise

    def _run(self, inputs: Sequence[Tensor], options: Any) -> Sequence[Tensor]:
        session = self._session
        if session is None:
            raise EngineError(f"{self._file.name} was closed")
        feed = {tensor.name: to_array(tensor) for tensor in match_inputs(inputs, self._inputs)}
        try:
            arrays = session.run(None, feed, options)
        except Exception as err:  # the binding's errors share no root of their own
            free = any(None in spec.shape for spec in self._inputs)
            raise _run_error(err, self._file.name, free) from err
        return tuple(to_tensor(spec.name, array) for spec, array in zip(self._outputs, arrays, strict=True))

    def close(self) -> None:
        """Free the session; idempotent."""
        self._session = None


def session_options(threads: int) -> Any:
    """Options of every session of ours.

    Threads do not spin while idle (a spinning pool took six times the CPU for a tenth of the latency), and the arena
    is off because it keeps the largest working set of every shape it has seen (microsoft/onnxruntime#11627).
    """
    ort = import_native("onnxruntime", extra="onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def _spec(value: Any) -> TensorSpec:
    datatype = _DATATYPES.get(value.type)
    if datatype is None:
        raise EngineError(
            f"tensor {value.name!r} is {value.type}, which no request can carry",
            next_step="export the model with numeric or string tensors at its border",
        )
    # A free dimension is a name, None or, in old exporters, -1.
    shape = tuple(size if isinstance(size, int) and size >= 0 else None for size in value.shape)
    return TensorSpec(value.name, datatype, shape)


def _run_error(err: Exception, what: str, free: bool) -> EngineError | BadRequest:
    """Sizes of free dimensions that clash inside the graph are the request's fault, the rest is the engine's."""
    clash = free and any(word in str(err).lower() for word in ("broadcast", "dimension", "shape"))
    if clash or type(err).__name__ == "InvalidArgument":
        return BadRequest(f"{what} does not take these inputs: {_first_line(err)}", field="inputs")
    return EngineError(f"{what} failed to run: {_first_line(err)}", next_step="check the input's shape and values")


def _first_line(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return lines[0][:300] if lines else type(err).__name__
