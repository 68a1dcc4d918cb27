"""Reads the metadata at the front of a GGUF file, with bounds; the tensors behind it are not touched.

Layout (GGUF 2 and 3, little-endian): magic, u32 version, u64 tensors, u64 pairs, then per pair a string key, a u32 type
and the value; a string is a u64 length and UTF-8 bytes, an array a u32 type, a u64 count and the values.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from protocol.errors import EngineError

Value = int | float | bool | bytes | tuple[int | float | bool | bytes, ...]

MAX_PAIRS = 4096
MAX_STRING_BYTES = 4 << 20
MAX_ITEMS = 4 << 20
MAX_METADATA_BYTES = 256 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(file: Path) -> Mapping[str, Value]:
    """All key-value pairs; strings stay bytes. Raises EngineError when `file` is no GGUF file."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _Reader(memory, file.name).pairs()
    except (OSError, ValueError) as err:
        raise EngineError(f"{file.name} cannot be read: {err}", next_step="check the file, or pull it again") from err


def pools(file: Path) -> bool:
    """Whether a GGUF file says how token vectors become one: embedding models do, chat models do not."""
    metadata = read_metadata(file)
    kind = metadata.get("general.architecture", b"")
    architecture = kind.decode("utf-8", "replace") if isinstance(kind, bytes) else str(kind)
    return f"{architecture}.pooling_type" in metadata


class _Reader:
    def __init__(self, memory: mmap.mmap, name: str) -> None:
        self._memory = memory
        self._name = name
        self._at = 0

    def pairs(self) -> Mapping[str, Value]:
        if bytes(self._memory[:4]) != b"GGUF":
            raise self._broken("it does not begin with GGUF")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise self._broken(f"its version is {version}, this reads 2 and 3")
        _, count = self._unpack("QQ")
        if count > MAX_PAIRS:
            raise self._broken(f"it claims {count} metadata pairs")
        found: dict[str, Value] = {}
        for _ in range(count):
            key = self._string().decode("utf-8", "replace")
            (kind,) = self._unpack("I")
            found[key] = self._value(kind)
        return found

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        value: int | float | bool = self._unpack(self._scalar(kind))[0]
        return value

    def _array(self) -> tuple[int | float | bool | bytes, ...]:
        kind, count = self._unpack("IQ")
        if count > MAX_ITEMS:
            raise self._broken(f"an array claims {count} items")
        if kind == _STRING:
            return tuple(self._string() for _ in range(count))
        return self._unpack(f"{count}{self._scalar(kind)}")

    def _scalar(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"unknown value type {kind}")
        return code

    def _string(self) -> bytes:
        (length,) = self._unpack("Q")
        if length > MAX_STRING_BYTES:
            raise self._broken(f"a string claims {length} bytes")
        self._need(length)
        at, self._at = self._at, self._at + length
        return self._memory[at : self._at]

    def _unpack(self, code: str) -> tuple[int, ...]:
        code = f"<{code}"
        size = struct.calcsize(code)
        self._need(size)
        values: tuple[int, ...] = struct.unpack_from(code, self._memory, self._at)
        self._at += size
        return values

    def _need(self, count: int) -> None:
        end = self._at + count
        if end > len(self._memory) or end > MAX_METADATA_BYTES:
            raise self._broken("it ends in the middle of its metadata")

    def _broken(self, why: str) -> EngineError:
        return EngineError(
            f"{self._name} is not a usable GGUF model: {why}", next_step="check the file, or pull it again"
        )


def parameters_of(metadata: Mapping[str, Value]) -> float | None:
    """Parameters of a dense transformer by its sizes, embeddings once; None where a size is missing.

    A mixture of experts counts the experts that work on one token.
    """
    family = metadata.get("general.architecture")
    prefix = family.decode("utf-8", "replace") if isinstance(family, bytes) else ""

    def size(name: str) -> float | None:
        value = metadata.get(f"{prefix}.{name}")
        return float(value) if isinstance(value, (int, float)) and value > 0 else None

    width, blocks, inner = size("embedding_length"), size("block_count"), size("feed_forward_length")
    heads, tokens = size("attention.head_count"), metadata.get("tokenizer.ggml.tokens")
    if width is None or blocks is None or inner is None or heads is None or not isinstance(tokens, tuple):
        return None
    head = size("attention.key_length") or width / heads
    attention = 2 * width * head * (heads + (size("attention.head_count_kv") or heads))
    return blocks * (attention + 3 * width * inner * (size("expert_used_count") or 1)) + len(tokens) * width
