"""How far apart a shared library wants its segments: one linked for small pages cannot be loaded on a kernel of larger.

(raspberrypi/bookworm-feedback#107: a Raspberry Pi 5 has pages of 16 KiB.)
"""

from __future__ import annotations

import struct
from pathlib import Path

_PT_LOAD = 1
_MAX_HEADERS = 64


def least_alignment_bytes(file: Path) -> int | None:
    """The smallest p_align of the LOAD segments of a 64-bit little-endian ELF file; None for anything else."""
    try:
        with file.open("rb") as stream:
            head = stream.read(64)
            if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
                return None
            (offset,) = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            if size < 56 or not 0 < count <= _MAX_HEADERS:
                return None
            stream.seek(offset)
            table = stream.read(size * count)
    except (OSError, OverflowError, ValueError):
        return None
    if len(table) < size * count:
        return None
    found = []
    for start in range(0, size * count, size):
        (kind,) = struct.unpack_from("<I", table, start)
        if kind == _PT_LOAD:
            found.append(struct.unpack_from("<Q", table, start + 48)[0])
    return min(found, default=None)
