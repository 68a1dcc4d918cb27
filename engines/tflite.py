"""TensorRuntime over LiteRT (ai-edge-litert) or its predecessor tflite-runtime; the only module that runs them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from attrs import frozen

from engines.arrays import datatype_of, to_array, to_tensor
from engines.digest import file_sha256
from engines.model_inputs import match_inputs, unique_names
from engines.registry import import_native
from protocol.errors import BadRequest, EngineError
from protocol.extras import install_step
from protocol.tensors import DATATYPE_BYTES, Tensor, TensorSpec


@frozen
class _Package:
    """One distribution that can run TFLite files, and the module with its Interpreter."""

    distribution: str
    module: str


LITERT = _Package("ai-edge-litert", "ai_edge_litert.interpreter")
TFLITE_RUNTIME = _Package("tflite-runtime", "tflite_runtime.interpreter")


class TfliteRuntime:
    """Loads TFLite files: whole models, heads and tails. LiteRT is preferred where both packages are installed."""

    name = "tflite"

    @property
    def version(self) -> str:
        """Installed version, without importing it. Raises EngineError when neither package is there."""
        return importlib.metadata.version(_installed().distribution)

    def load(self, file: Path, threads: int) -> TfliteModel:
        """Load with `threads` threads (0: the library's choice).

        Raises EngineError when the file is absent or not a model that this build can run.
        """
        package = _installed()
        if not file.is_file():
            raise EngineError(f"{file.name} is not there", next_step="midstream models list shows what is")
        _check_numpy(package)
        module = import_native(package.module, extra="tflite")
        try:
            interpreter = module.Interpreter(model_path=str(file), num_threads=threads or None)
            interpreter.allocate_tensors()
            return TfliteModel(interpreter, file)
        except (ValueError, RuntimeError, SystemError, TypeError) as err:
            raise EngineError(
                f"{file.name} is not a model that {package.distribution} can load: {_first_line(err)}",
                next_step="midstream models verify checks the file; custom operators need their own runtime",
            ) from err


def tensor_shapes(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the main subgraph by name, after a run on zeros with inputs of these shapes.

    Without delegates, which would hide the tensors inside. Raises EngineError. A hostile file may crash the process:
    engines.tflite_shapes calls it in a child.
    """
    package = _installed()
    _check_numpy(package)
    module = import_native(package.module, extra="tflite")
    try:
        plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = module.Interpreter(model_path=str(file), experimental_op_resolver_type=plain)
        inputs = {d["name"]: d for d in interpreter.get_input_details()}
        for name, shape in shapes.items():
            interpreter.resize_tensor_input(inputs[name]["index"], shape)
        interpreter.allocate_tensors()
        for name, shape in shapes.items():
            interpreter.set_tensor(inputs[name]["index"], _zeros(name, inputs[name]["dtype"], shape))
        interpreter.invoke()
        details = interpreter.get_tensor_details()
    except (ValueError, RuntimeError, SystemError, TypeError, KeyError) as err:
        raise EngineError(f"{file.name} does not run with these shapes: {_first_line(err)}") from err
    return {d["name"]: tuple(int(size) for size in d["shape"]) for d in details if d["name"]}


class TfliteModel:
    """A loaded TFLite graph. One interpreter serves one thread at a time."""

    thread_safe = False

    def __init__(self, interpreter: Any, file: Path) -> None:
        self._interpreter: Any = interpreter
        self._file = file
        self._digest: str | None = None
        ins, self._out = tuple(interpreter.get_input_details()), tuple(interpreter.get_output_details())
        names = unique_names([(d["index"], d["name"]) for d in (*ins, *self._out)])
        self._in = {names[d["index"]]: d for d in ins}
        self._inputs = tuple(_spec(d, names[d["index"]]) for d in ins)
        self._outputs = tuple(_spec(d, names[d["index"]]) for d in self._out)
        self._shapes = {name: tuple(int(n) for n in d["shape"]) for name, d in self._in.items()}

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
        if self._interpreter is None:
            raise EngineError(f"{self._file.name} was closed")
        tensors = match_inputs(inputs, self._inputs)
        self._resize(tensors)
        try:
            for tensor in tensors:
                self._interpreter.set_tensor(self._in[tensor.name]["index"], to_array(tensor))
            self._interpreter.invoke()
            # get_tensor copies, so the answer does not change with the next run.
            arrays = [self._interpreter.get_tensor(d["index"]) for d in self._out]
        except (ValueError, RuntimeError, SystemError) as err:
            raise EngineError(f"{self._file.name} failed to run: {_first_line(err)}") from err
        return tuple(to_tensor(spec.name, array) for spec, array in zip(self._outputs, arrays, strict=True))

    def close(self) -> None:
        """Free the interpreter; idempotent."""
        self._interpreter = None

    def _resize(self, tensors: Sequence[Tensor]) -> None:
        """Give free dimensions the sizes of this request; a shape the graph cannot take leaves the old one usable."""
        if all(self._shapes[t.name] == t.shape for t in tensors):
            return
        if any(0 in t.shape for t in tensors):
            raise BadRequest("a dimension is 0", field="inputs")
        try:
            self._allocate({t.name: t.shape for t in tensors})
        except (ValueError, RuntimeError) as err:
            self._allocate(self._shapes)
            raise BadRequest(
                f"{self._file.name} does not take these shapes: {_first_line(err)}", field="inputs"
            ) from err
        self._shapes = {t.name: t.shape for t in tensors}

    def _allocate(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            self._interpreter.resize_tensor_input(self._in[name]["index"], shape)
        self._interpreter.allocate_tensors()


def _zeros(name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    datatype = datatype_of(dtype, name)
    return to_array(Tensor(name, datatype, shape, bytes(prod(shape) * DATATYPE_BYTES[datatype])))


def _spec(detail: dict[str, Any], name: str) -> TensorSpec:
    signature = detail.get("shape_signature")
    sizes = signature if signature is not None and len(signature) == len(detail["shape"]) else detail["shape"]
    shape = tuple(int(n) if n >= 0 else None for n in sizes)
    return TensorSpec(name, datatype_of(detail["dtype"], name), shape)


def _installed() -> _Package:
    for package in (LITERT, TFLITE_RUNTIME):
        try:
            importlib.metadata.version(package.distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return package
    raise EngineError("no TFLite runtime is installed", next_step=install_step("tflite"))


def _check_numpy(package: _Package) -> None:
    problem = numpy_conflict(package.distribution, importlib.metadata.version("numpy"))
    if problem is not None:
        raise EngineError(problem, next_step="install ai-edge-litert, or numpy<2 into this environment")


def numpy_conflict(distribution: str, numpy_version: str) -> str | None:
    """Why this pair cannot work, or None: tflite-runtime was built for numpy 1 and fails to load models with 2."""
    if distribution == TFLITE_RUNTIME.distribution and int(numpy_version.split(".")[0]) >= 2:
        return f"tflite-runtime does not work with numpy {numpy_version}"
    return None


def _first_line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return lines[0][:300] if lines else type(err).__name__
