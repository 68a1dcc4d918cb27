"""The side files of an ONNX model: found by walking its protobuf, without reading a weight or needing the onnx package.

Models over 2 GB keep their weights beside the file (`model.onnx.data`); a model in the store is whole only with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from engines.digest import file_sha256
from engines.model_files import read_varint, skip_length
from protocol.errors import ConfigError
from protocol.models import joined_sha256

MAX_SIDE_FILES = 1024
"""Old exporters write one file per weight; a thousand is a large model of that kind."""

MAX_NAME_BYTES = 128
MAX_DEPTH = 32
"""Bodies within bodies; each takes four messages."""

# Field numbers of onnx.proto that lead to tensors, by message.
_INSIDE = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {13: "entry"},
}
_KEY, _VALUE = 1, 2


def side_files(file: Path) -> tuple[Path, ...]:
    """The side files of an ONNX model, in order of name; none for a model that holds its weights itself.

    Raises ConfigError when one is missing, lies outside the model's folder, or there are too many.
    """
    names: set[str] = set()
    with file.open("rb") as stream:
        for name in _locations(stream, "model", file.stat().st_size, 0):
            names.add(name)
            if len(names) > MAX_SIDE_FILES:
                raise ConfigError(
                    f"{file.name} has more than {MAX_SIDE_FILES} side files",
                    next_step="save it again with all weights in one side file",
                    field="file",
                )
    return tuple(_beside(file, name) for name in sorted(names))


def source_sha256(file: Path, kind: str) -> str:
    """Names a model's bytes, those of its side files included, as CatalogueEntry.source_sha256 does.

    Raises OSError when they cannot be read, ConfigError as side_files does.
    """
    beside = side_files(file) if kind == "onnx" else ()
    return joined_sha256(file_sha256(file), [file_sha256(one) for one in beside])


def _beside(file: Path, name: str) -> Path:
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise ConfigError(
            f"{file.name} keeps weights in {name[:80]!r}, which is not a file beside it",
            next_step="save it again with its side file in the same folder",
            field="file",
        )
    beside = file.parent / name
    if not beside.is_file():
        raise ConfigError(
            f"{file.name} keeps weights in {name[:80]!r}, which is missing",
            next_step="put it beside the model file",
            field="file",
        )
    return beside


def folder_files(file: Path) -> tuple[Path, ...]:
    """All other files of a model's folder, in order of name. Raises ConfigError when there are too many."""
    found = tuple(sorted(one for one in file.parent.iterdir() if one.is_file() and one.name != file.name))
    if len(found) > MAX_SIDE_FILES:
        raise ConfigError(
            f"{file.parent} has more than {MAX_SIDE_FILES} files",
            next_step="put the model into a folder of its own",
            field="file",
        )
    return found


def _locations(stream: BinaryIO, message: str, end: int, depth: int) -> Iterator[str]:
    """Every `location` of external data between the stream's place and `end`.

    What is damaged or too deep is passed over: whoever loads the model says so.
    """
    while stream.tell() < end and depth <= 4 * MAX_DEPTH:
        key = read_varint(stream)
        length = skip_length(stream, key & 7) if key is not None else None
        if key is None or length is None or stream.tell() + length > end:
            return
        after = stream.tell() + length
        inside = _INSIDE[message].get(key >> 3) if key & 7 == 2 else None
        if inside == "entry":
            name = _location(stream.read(min(length, 4 * MAX_NAME_BYTES)))
            if name is not None:
                yield name
        elif inside is not None:
            yield from _locations(stream, inside, after, depth + 1)
        stream.seek(after)


def _location(entry: bytes) -> str | None:
    """The value of a StringStringEntryProto whose key is `location`. Longer names than a store takes come out cut."""
    fields: dict[int, bytes] = {}
    place = 0
    while place + 1 < len(entry):
        number, length, place = entry[place] >> 3, entry[place + 1], place + 2
        if length & 0x80:  # two bytes: up to 16,383
            length, place = (length & 0x7F) | (entry[place] << 7), place + 1
        fields[number] = entry[place : place + length]
        place += length
    if fields.get(_KEY) != b"location":
        return None
    return fields.get(_VALUE, b"").decode("utf-8", "replace")
