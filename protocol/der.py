"""The little of DER (ITU-T X.690) that a certificate request and a look into a certificate need; bounded."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

from attrs import frozen

INTEGER, BIT_STRING, OCTET_STRING, OID, UTF8_STRING = 0x02, 0x03, 0x04, 0x06, 0x0C
UTC_TIME, GENERALIZED_TIME = 0x17, 0x18
SEQUENCE, SET, CONTEXT_0 = 0x30, 0x31, 0xA0

MAX_DER_BYTES = 64 << 10
MAX_ITEMS = 64
LINE_CHARS = 64


@frozen
class Item:
    """One element: its tag, its content, and all of its bytes."""

    tag: int
    content: bytes
    whole: bytes


def encode(tag: int, *parts: bytes) -> bytes:
    """One element with the parts as its content.

    >>> encode(INTEGER, bytes([5])).hex()
    '020105'
    """
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def items(data: bytes) -> list[Item]:
    """The elements that `data` consists of, in order; single-byte tags. Raises ValueError for anything else."""
    if len(data) > MAX_DER_BYTES:
        raise ValueError(f"over {MAX_DER_BYTES} bytes")
    found = list(_walk(data))
    if len(found) > MAX_ITEMS:
        raise ValueError(f"over {MAX_ITEMS} elements")
    return found


def inside(item: Item, tag: int) -> list[Item]:
    """The elements within one that has this tag. Raises ValueError."""
    if item.tag != tag:
        raise ValueError(f"tag {item.tag:#x} where {tag:#x} is expected")
    return items(item.content)


def only(data: bytes, tag: int) -> Item:
    """The one element that `data` is. Raises ValueError."""
    found = items(data)
    if len(found) != 1 or found[0].tag != tag:
        raise ValueError(f"not one element of tag {tag:#x}")
    return found[0]


def to_pem(label: str, data: bytes) -> str:
    """PEM (RFC 7468) of DER bytes."""
    text = base64.b64encode(data).decode()
    lines = [text[at : at + LINE_CHARS] for at in range(0, len(text), LINE_CHARS)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])


def from_pem(label: str, pem: str) -> bytes:
    """DER bytes of the first block with this label. Raises ValueError."""
    if len(pem) > 2 * MAX_DER_BYTES:
        raise ValueError("too long")
    _, begin, rest = pem.partition(f"-----BEGIN {label}-----")
    body, end, _ = rest.partition(f"-----END {label}-----")
    if not begin or not end:
        raise ValueError(f"no {label} in PEM form")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error as err:
        raise ValueError(f"the {label} is not base64") from err


def _walk(data: bytes) -> Iterator[Item]:
    at = 0
    while at < len(data):
        start, tag = at, data[at]
        if tag & 0x1F == 0x1F:
            raise ValueError("a tag of several bytes")
        size, at = _length(data, at + 1)
        if at + size > len(data):
            raise ValueError("an element is longer than what holds it")
        yield Item(tag, data[at : at + size], data[start : at + size])
        at += size


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Length of the content and where it begins; the shortest form alone is DER."""
    if at >= len(data):
        raise ValueError("cut off")
    first = data[at]
    if first < 0x80:
        return first, at + 1
    count = first & 0x7F
    raw = data[at + 1 : at + 1 + count]
    if not 1 <= count <= 3 or len(raw) != count:
        raise ValueError("a length that is not definite, too long or cut off")
    size = int.from_bytes(raw, "big")
    if raw[0] == 0 or size < 0x80:
        raise ValueError("a length that is not in its shortest form")
    return size, at + 1 + count
