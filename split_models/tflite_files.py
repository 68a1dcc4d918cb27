"""The only place that names LiteRT's schema and flatbuffers: TFLite files to checked models and back.

Reading is pure Python with bounds: a damaged file ends in a named error, never in a native crash. Nothing of the file
is trusted before `read_model` has looked at it; what it gives back is consistent, and writing it again leaves out
whatever else the file held.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, EngineError
from protocol.extras import install_step

MAX_MODEL_BYTES = 1 << 30
"""Flatbuffers end at 2 GiB, and cutting holds a model about three times."""

MAX_SUBGRAPHS = 256
MAX_TENSORS = 65_536
MAX_OPERATORS = 65_536
MAX_BUFFERS = 131_072
MAX_NAMES_BYTES = 16 << 20
MAX_RANK = 16
MAX_ELEMENTS = 1 << 28
"""Of one tensor: a gigabyte as FP32; a damaged shape must not take all memory when a part is loaded."""

FILE_ID = b"TFL3"
BUFFER_ALIGNMENT = 16
"""Of a weight's data, as schema.fbs demands: kernels read it in place."""

KEPT_METADATA = (b"min_runtime_version", b"reduced_precision_support")
"""What the runtime itself reads; the rest describes the interface of the uncut model."""

_BITS = {
    "FLOAT32": 32, "FLOAT16": 16, "INT32": 32, "UINT8": 8, "INT64": 64, "BOOL": 8, "INT16": 16, "COMPLEX64": 64,
    "INT8": 8, "FLOAT64": 64, "COMPLEX128": 128, "UINT64": 64, "UINT32": 32, "UINT16": 16, "INT4": 4, "BFLOAT16": 16,
    "INT2": 2, "UINT4": 4, "FLOAT8_E4M3FN": 8, "FLOAT8_E5M2": 8,
}  # fmt: skip
_BROKEN = (
    struct.error, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, MemoryError,
)  # fmt: skip


def schema_module() -> Any:
    """LiteRT's schema classes. Raises ConfigError when this machine has none."""
    try:
        import flatbuffers  # noqa: F401
        from ai_edge_litert import schema_py_generated
    except ImportError as err:
        raise ConfigError(
            "the schema of TFLite files is not installed; it is needed to cut them",
            next_step=f"cut where ai-edge-litert is ({install_step('tflite')}); devices only fetch heads",
        ) from err
    return schema_py_generated


def read_model(file: Path) -> Any:
    """A checked ModelT. Raises EngineError when the file is absent, too large, damaged or not a TFLite model."""
    try:
        if file.stat().st_size > MAX_MODEL_BYTES:
            raise EngineError(f"{file.name} is over {MAX_MODEL_BYTES} bytes", next_step="serve it whole, without cuts")
        data = file.read_bytes()
    except OSError as err:
        raise EngineError(f"cannot read {file.name}: {err.strerror}", next_step="pull the model again") from err
    return parse_model(data, file.name)


def parse_model(data: bytes, name: str) -> Any:
    """A checked ModelT from a file's bytes. Raises EngineError."""
    schema = schema_module()
    if len(data) < 8 or data[4:8] != FILE_ID:
        raise EngineError(f"{name} is not a TFLite model", next_step="verify the model with `models verify`")
    try:
        view = schema.Model.GetRootAs(data, 0)
        _check_counts(view, len(data))
        model = _unpacked(schema, view)
        _check_model(model)
    except _BROKEN as err:
        raise EngineError(
            f"{name} is damaged: {str(err)[:200] or type(err).__name__}",
            next_step="verify the model with `models verify`",
        ) from err
    return model


def to_bytes(model: Any) -> bytes:
    """The same model always gives the same bytes; weights are aligned as the schema demands."""
    schema = schema_module()
    import flatbuffers

    weights = sum(len(buffer.data) + BUFFER_ALIGNMENT for buffer in model.buffers if buffer.data is not None)
    builder = flatbuffers.Builder(min(weights + (64 << 10), MAX_MODEL_BYTES))
    packed = schema.ModelT()
    packed.version, packed.operatorCodes, packed.subgraphs = model.version, model.operatorCodes, model.subgraphs
    packed.metadata, packed.description = model.metadata, "cut by midstream"
    packed.buffers = [_Weights(schema, buffer.data) for buffer in model.buffers]
    builder.Finish(packed.Pack(builder), FILE_ID)
    return bytes(builder.Output())


class _Weights:
    """A BufferT whose data is aligned; the generated one packs bytes at any multiple of 4."""

    def __init__(self, schema: Any, data: Any) -> None:
        self._schema = schema
        self._data = b"" if data is None else bytes(data)

    def Pack(self, builder: Any) -> Any:  # noqa: N802
        vector = None
        if self._data:
            builder.StartVector(1, len(self._data), BUFFER_ALIGNMENT)
            builder.head -= len(self._data)
            builder.Bytes[builder.head : builder.head + len(self._data)] = self._data
            vector = builder.EndVector()
        self._schema.BufferStart(builder)
        if vector is not None:
            self._schema.BufferAddData(builder, vector)
        return self._schema.BufferEnd(builder)


def datatype_name(code: int) -> str:
    """TFLite's name of an element type; KeyError for one that this schema does not have."""
    return _reverse(schema_module().TensorType)[code]


def builtin_number(code: Any) -> int:
    """BuiltinOperator of an operator code: numbers up to 127 may stand in the deprecated field alone."""
    return max(int(code.builtinCode), int(code.deprecatedBuiltinCode))


def operator_name(model: Any, operator: Any) -> str:
    """BuiltinOperator name, or the name a custom operator has in the file."""
    schema = schema_module()
    code = model.operatorCodes[operator.opcodeIndex]
    number = builtin_number(code)
    if number == schema.BuiltinOperator.CUSTOM:
        return f"CUSTOM:{(code.customCode or b'').decode('utf-8', 'replace')[:64]}"
    return _reverse(schema.BuiltinOperator).get(number, f"BUILTIN:{number}")


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Stored shape; free dimensions stand as 1 there."""
    return () if tensor.shape is None else tuple(int(size) for size in tensor.shape)


def size_bytes(tensor: Any) -> int:
    """Of all elements, unpacked; 0 for element types without a fixed size."""
    return (prod(shape_of(tensor)) * _BITS.get(datatype_name(tensor.type), 0) + 7) // 8


def signature_of(tensor: Any) -> tuple[int, ...]:
    """Stored shape with -1 for free dimensions."""
    found = indices(tensor.shapeSignature)
    return found if found else shape_of(tensor)


def indices(values: Any) -> tuple[int, ...]:
    """A vector of tensor indices; -1 stands for an absent optional input."""
    return () if values is None else tuple(int(value) for value in values)


def body_fields(operator: Any) -> Iterator[tuple[Any, str]]:
    """(options, field) for every reference to another subgraph that an operator makes."""
    for options in (operator.builtinOptions, operator.builtinOptions2):
        for field in vars(options) if options is not None else ():
            if "ubgraph" in field:
                yield options, field


def bodies(operator: Any) -> tuple[int, ...]:
    """Subgraphs that an operator runs: branches, loop bodies, functions."""
    found: list[int] = []
    for options, field in body_fields(operator):
        value = getattr(options, field)
        if isinstance(value, int):
            found.append(value)
        else:
            found.extend(indices(value))
    return tuple(index for index in found if index >= 0)


def reachable(model: Any, operators: Sequence[Any]) -> tuple[int, ...]:
    """Subgraphs that these operators run, directly or through others, in ascending order."""
    seen: set[int] = set()
    open_ = [index for operator in operators for index in bodies(operator)]
    while open_:
        index = open_.pop()
        if index in seen:
            continue
        seen.add(index)
        open_.extend(inner for operator in model.subgraphs[index].operators for inner in bodies(operator))
    return tuple(sorted(seen))


@cache
def _reverse(enum: Any) -> Mapping[int, str]:
    return {number: name for name, number in vars(enum).items() if isinstance(number, int)}


def _unpacked(schema: Any, view: Any) -> Any:
    """What of the file the runtime needs. Signatures name tensors that a part no longer has: they are left out."""
    model = schema.ModelT()
    model.version = view.Version()
    model.operatorCodes = [
        schema.OperatorCodeT.InitFromObj(view.OperatorCodes(i)) for i in range(view.OperatorCodesLength())
    ]
    model.subgraphs = [schema.SubGraphT.InitFromObj(view.Subgraphs(i)) for i in range(view.SubgraphsLength())]
    model.buffers = [schema.BufferT.InitFromObj(view.Buffers(i)) for i in range(view.BuffersLength())]
    found = [schema.MetadataT.InitFromObj(view.Metadata(i)) for i in range(view.MetadataLength())]
    model.metadata = [entry for entry in found if entry.name in KEPT_METADATA]
    for graph in model.subgraphs:
        graph.tensors, graph.operators = graph.tensors or [], graph.operators or []
    return model


def _check_counts(view: Any, size_bytes: int) -> None:
    """Lengths before anything is built from them: a small file may claim, or repeat, very many parts."""
    _at_most("operator codes", view.OperatorCodesLength(), MAX_OPERATORS)
    _at_most("buffers", view.BuffersLength(), MAX_BUFFERS)
    _at_most("metadata", view.MetadataLength(), MAX_BUFFERS)
    _at_most("subgraphs", view.SubgraphsLength(), MAX_SUBGRAPHS)
    tensors = operators = names = inner = 0
    for graph in (view.Subgraphs(i) for i in range(view.SubgraphsLength())):
        tensors += graph.TensorsLength()
        operators += graph.OperatorsLength()
        _at_most("tensors", tensors, MAX_TENSORS)
        _at_most("operators", operators, MAX_OPERATORS)
        for tensor in (graph.Tensors(i) for i in range(graph.TensorsLength())):
            sparsity = tensor.Sparsity()
            names += len(tensor.Name() or b"")
            inner += tensor.VariantTensorsLength() + (sparsity.DimMetadataLength() if sparsity is not None else 0)
            _at_most("bytes of names", names, MAX_NAMES_BYTES)
            _at_most("parts of tensors", inner, MAX_TENSORS)
    if size_bytes > MAX_MODEL_BYTES:
        raise ValueError("too large")


def _at_most(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"{count} {what}, the limit is {limit}")


def _check_model(model: Any) -> None:
    if model.version != 3:
        raise ValueError(f"version {model.version}, not 3")
    if not model.subgraphs or not model.subgraphs[0].operators or not len(indices(model.subgraphs[0].outputs)):
        raise ValueError("it holds no graph")
    for buffer in model.buffers:
        if buffer.offset > 1 or buffer.size > 1:
            raise ValueError("weights outside the flatbuffer are not supported; serve it whole")
    for entry in model.metadata:
        _within("metadata buffer", entry.buffer, len(model.buffers))
    known = _reverse(schema_module().TensorType)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            _check_tensor(model, tensor, known)
        _check_wiring(model, graph)


def _check_tensor(model: Any, tensor: Any, known: Mapping[int, str]) -> None:
    _within("buffer", tensor.buffer, len(model.buffers))
    if tensor.type not in known:
        raise ValueError(f"element type {tensor.type} is not known here")
    if tensor.externalBuffer:
        raise ValueError("weights outside the flatbuffer are not supported; serve it whole")
    shape = shape_of(tensor)
    if len(shape) > MAX_RANK or any(size < 0 for size in shape) or prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"a tensor of shape {list(shape)[:MAX_RANK]}")
    if tensor.shapeSignature is not None and len(tensor.shapeSignature) not in (0, len(shape)):
        raise ValueError("a shape signature of another rank")
    data = model.buffers[tensor.buffer].data
    if data is None or not len(data) or known[tensor.type] not in _BITS or tensor.sparsity is not None:
        return
    if len(data) != size_bytes(tensor):
        raise ValueError(f"{len(data)} bytes of data for {known[tensor.type]}{list(shape)}")


def _check_wiring(model: Any, graph: Any) -> None:
    """Every index in range, options that this schema can write again, and one maker per tensor."""
    count, made = len(graph.tensors), set(indices(graph.inputs))
    for index in (*indices(graph.inputs), *indices(graph.outputs)):
        _within("tensor", index, count)
    for operator in graph.operators:
        _within("operator code", operator.opcodeIndex, len(model.operatorCodes))
        if operator.largeCustomOptionsOffset or operator.largeCustomOptionsSize:
            raise ValueError("operator options outside the flatbuffer are not supported; serve it whole")
        for kind, options in (
            (operator.builtinOptionsType, operator.builtinOptions),
            (operator.builtinOptions2Type, operator.builtinOptions2),
        ):
            if kind and options is None:
                raise ValueError(f"operator options of kind {kind} are not known here; ai-edge-litert may be too old")
        for index in (*indices(operator.inputs), *indices(operator.intermediates)):
            _within("tensor", index, count, low=-1)
        for index in indices(operator.outputs):
            _within("tensor", index, count)
            if index in made:
                raise ValueError(f"tensor {index} is made twice")
            made.add(index)
        for index in bodies(operator):
            _within("subgraph", index, len(model.subgraphs), low=1)


def _within(what: str, index: int, count: int, low: int = 0) -> None:
    if not low <= index < count:
        raise ValueError(f"{what} {index} of {count}")
