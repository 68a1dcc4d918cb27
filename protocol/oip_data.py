"""Tensor data as JSON numbers and strings, and the elements of BYTES tensors; no numpy."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

from protocol.errors import BadRequest
from protocol.tensors import MAX_RANK, Tensor, check_tensor

_TYPECODES = {
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP32": "f", "FP64": "d",
}  # fmt: skip
_BIG_ENDIAN = sys.byteorder == "big"


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any, path: str) -> Tensor:
    """A tensor from a flat or nested JSON list. Raises BadRequest naming `path`."""
    if datatype == "FP16":
        raise BadRequest("FP16 has no JSON form", next_step="send it with the binary tensor data extension", field=path)
    flat = _flatten(data, path)
    if len(flat) != prod(shape):
        raise BadRequest(f"{datatype}{list(shape)} needs {prod(shape)} values, got {len(flat)}", field=path)
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, pack_bytes(_encoded(flat, path)))
    tensor = Tensor(name, datatype, shape, _packed(datatype, flat, path))
    check_tensor(tensor)
    return tensor


def to_json(tensor: Tensor) -> list[Any]:
    """The flat values of a tensor. Raises BadRequest for what JSON cannot say."""
    if tensor.datatype == "FP16":
        raise BadRequest(
            f"{tensor.name} is FP16, which has no JSON form", next_step="ask for binary data", field="outputs"
        )
    if tensor.datatype == "BYTES":
        try:
            return [element.decode("utf-8") for element in elements_of(tensor)]
        except UnicodeDecodeError as err:
            raise BadRequest(
                f"{tensor.name} holds bytes that are not UTF-8", next_step="ask for binary data", field="outputs"
            ) from err
    if tensor.datatype == "BOOL":
        return [byte != 0 for byte in bytes(tensor.data)]
    values = array(_TYPECODES[tensor.datatype])
    values.frombytes(tensor.data)
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tolist()


def pack_bytes(elements: Sequence[bytes]) -> bytes:
    """Elements of a BYTES tensor in their wire form."""
    return b"".join(chain.from_iterable((struct.pack("<I", len(element)), element) for element in elements))


def elements_of(tensor: Tensor) -> list[bytes]:
    """Split a BYTES tensor. Raises BadRequest unless exactly prod(shape) elements fill it."""
    data = memoryview(tensor.data)
    found: list[bytes] = []
    at = 0
    while at < len(data):
        if len(data) - at < 4:
            raise BadRequest("a BYTES element has no room for its length", field=f"{tensor.name}.data")
        size = int.from_bytes(data[at : at + 4], "little")
        if size > len(data) - at - 4:
            raise BadRequest(
                f"a BYTES element of {size} bytes runs over the end of the data", field=f"{tensor.name}.data"
            )
        found.append(bytes(data[at + 4 : at + 4 + size]))
        at += 4 + size
    if len(found) != prod(tensor.shape):
        raise BadRequest(
            f"BYTES{list(tensor.shape)} needs {prod(tensor.shape)} elements, got {len(found)}",
            field=f"{tensor.name}.data",
        )
    return found


def _flatten(data: object, path: str) -> list[Any]:
    if not isinstance(data, list):
        raise BadRequest("data must be a list", field=path)
    for _ in range(MAX_RANK):
        if not data or not isinstance(data[0], list):
            return data
        if not all(type(item) is list for item in data):
            raise BadRequest("data mixes values and lists", field=path)
        data = list(chain.from_iterable(data))
    raise BadRequest(f"data nests more than {MAX_RANK} levels deep", field=path)


def _packed(datatype: str, flat: list[Any], path: str) -> bytes:
    if datatype == "BOOL":
        if not all(value is True or value is False or (type(value) is int and value in (0, 1)) for value in flat):
            raise BadRequest("BOOL data must be true or false", field=path)
        return bytes(flat)
    code = _TYPECODES.get(datatype)
    if code is None:
        raise BadRequest(f"unknown datatype {datatype[:32]!r}", field=path.removesuffix(".data") + ".datatype")
    try:
        values = array(code, flat)
    except (TypeError, OverflowError, ValueError) as err:
        raise BadRequest(f"data does not fit {datatype}: {err}", field=path) from err
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tobytes()


def _encoded(flat: list[Any], path: str) -> list[bytes]:
    try:
        return [value.encode("utf-8") for value in flat]
    except (AttributeError, UnicodeEncodeError) as err:
        raise BadRequest("BYTES data in JSON must be valid strings", field=path) from err
