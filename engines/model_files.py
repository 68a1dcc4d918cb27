"""Tells by their bytes which kind of model a file is, so that other files never enter the store."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from protocol.errors import ConfigError
from protocol.models import Format

GENAI_FILE = "genai_config.json"
"""The settings of an ONNX language model for onnxruntime-genai; the rest of the model lies in the same folder."""

# Fields of onnx.ModelProto (onnx/onnx.proto): ir_version is 1 (varint), graph is 7 (message).
_IR_VERSION, _GRAPH = 1, 7
_MAX_FIELDS = 4096
"""A model has a dozen fields at its top level, metadata_props and functions repeat; more is not a model."""


def sniff(file: Path) -> Format:
    """Kind of model in `file`. Raises ConfigError when it is none that an engine here could load."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            if head[:4] == b"GGUF":
                return "gguf"
            if head[4:8] == b"TFL3":
                return "tflite"
            if file.name == GENAI_FILE and head.lstrip()[:1] == b"{":
                return "genai"
            stream.seek(0)
            if _is_onnx(stream, size_bytes):
                return "onnx"
    except OSError as err:
        raise ConfigError(f"{file} cannot be read: {err.strerror}", next_step="check the path") from err
    raise ConfigError(
        f"{file.name} is not an ONNX, TFLite or GGUF model, nor a genai_config.json",
        next_step="export it to one of these formats",
        field="file",
    )


def _is_onnx(stream: BinaryIO, size_bytes: int) -> bool:
    """Walk the top-level protobuf fields: an ir_version and a graph, all within the file."""
    found: set[int] = set()
    for _ in range(_MAX_FIELDS):
        if stream.tell() == size_bytes:
            return {_IR_VERSION, _GRAPH} <= found
        key = read_varint(stream)
        length = skip_length(stream, key & 7) if key is not None else None
        if key is None or length is None or stream.tell() + length > size_bytes:
            return False
        found.add(key >> 3)
        stream.seek(length, 1)
    return False


def skip_length(stream: BinaryIO, wire_type: int) -> int | None:
    """Bytes to skip after a field's key; None for what no current protobuf writer makes."""
    if wire_type == 0:
        return 0 if read_varint(stream) is not None else None
    if wire_type == 2:
        return read_varint(stream)
    return {1: 8, 5: 4}.get(wire_type)


def read_varint(stream: BinaryIO) -> int | None:
    """A protobuf varint at the stream's place; None at its end or when it is none."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None
