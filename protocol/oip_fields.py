"""Checks that all bodies of the Open Inference Protocol share, their bounds, and their encodings."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from protocol import zstd
from protocol.errors import EngineError, ProtocolError, TooLarge, Unsupported
from protocol.tensors import MAX_RANK

MAX_BODY_BYTES = 64 << 20
"""Triton's default for one request; more than any tensor of a model that a device can run."""
MAX_HEADER_BYTES = 1 << 20
"""The JSON part of a binary body: names and shapes only."""
MAX_TENSORS = 256
MAX_NAME_CHARS = 512

_COMPACT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def inflate(headers: Mapping[str, str], body: bytes, max_bytes: int) -> bytes:
    """Undo a gzip, deflate or zstd Content-Encoding, never making more than `max_bytes`.

    Some HTTP servers inflate on their own and leave the header: a body that begins with JSON is taken as it is.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if len(body) > max_bytes:
        raise TooLarge(f"the body has {len(body)} bytes, at most {max_bytes} are taken")
    if encoding in ("", "identity") or body[:1] == b"{":
        return body
    if encoding == zstd.NAME:
        return zstd.decompress(body, max_bytes)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise Unsupported(f"content-encoding {encoding[:32]!r} is not supported", next_step="use gzip or deflate")
    inflater = zlib.decompressobj(wbits=47)  # gzip or zlib by their own headers
    try:
        whole = inflater.decompress(body, max_bytes + 1)
    except zlib.error as err:
        raise ProtocolError(f"the body is not valid {encoding}: {err}", field="content-encoding") from err
    if len(whole) > max_bytes:
        raise TooLarge(f"the body inflates over {max_bytes} bytes")
    if not inflater.eof or inflater.unused_data:
        raise ProtocolError(f"the {encoding} body is cut short or has bytes after its end", field="content-encoding")
    return whole


def dump(document: Mapping[str, Any]) -> bytes:
    """Compact JSON; raises EngineError for NaN and Infinity."""
    try:
        text = _COMPACT.encode(document)
    except ValueError as err:
        raise EngineError(
            "the answer holds NaN or Infinity, which JSON cannot say", next_step="ask for binary outputs"
        ) from err
    # A name with half a surrogate pair, which JSON can say and UTF-8 cannot, keeps its escape.
    return text.encode("utf-8", "backslashreplace")


def as_list(value: Any, path: str) -> list[Any]:
    """A list of at most MAX_TENSORS entries; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ProtocolError(f"{path} must be a list", field=path)
    if len(value) > MAX_TENSORS:
        raise TooLarge(f"{path} has {len(value)} entries, at most {MAX_TENSORS} are taken", field=path)
    return value


def as_object(value: Any, path: str) -> dict[str, Any]:
    """A JSON object; null is an empty one except for a whole body (empty path)."""
    if value is None and path:
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"{path or 'the body'} must be an object", field=path or None)
    return value


def as_text(value: Any, path: str) -> str:
    """A string of bounded length."""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise ProtocolError(f"{path} must be a string of at most {MAX_NAME_CHARS} characters", field=path)
    return value


def as_shape(value: Any, path: str, least: int = 0) -> tuple[int, ...]:
    """A list of sizes, each at least `least`."""
    fits = isinstance(value, list) and len(value) <= MAX_RANK
    if not fits or any(type(d) is not int or not least <= d < 1 << 31 for d in value):
        raise ProtocolError(f"{path} must be a list of at most {MAX_RANK} sizes", field=path)
    return tuple(value)
