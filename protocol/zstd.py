"""Zstandard bodies (RFC 8878): the standard library's module from Python 3.14 on, its backport before that.

Optional: without either, `available()` is False and nothing here is offered to a peer. Blocking: about 2 ms per MB.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

from protocol.errors import ConfigError, ProtocolError, TooLarge, Unsupported
from protocol.extras import install_step
from protocol.tensors import Tensor

NAME = "zstd"
"""The content coding, and the extension of the same name in GET /v2."""

LEVEL = 1
"""Levels above gain little on activations and cost several times the time."""

LEAST_PLANE_BYTES = 1_536
"""A block's own code lengths take about 70 bytes; below this they cost what they save."""

MOST_PLANE_BYTES = 32 << 10
"""Larger planes fill blocks by themselves."""

MAX_WINDOW_LOG = 23
"""8 MiB of history, the most that RFC 9659 allows here: a short frame cannot make its reader hold more."""


@cache
def _module() -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def available() -> bool:
    """Whether this Python can read and write Zstandard."""
    return _module() is not None


def compress(body: bytes, level: int = LEVEL) -> bytes:
    """One frame that declares the size of its content. Raises ConfigError when no library is here."""
    zstd = _module()
    if zstd is None:
        raise ConfigError("no Zstandard library is installed", next_step=install_step("zstd"))
    frame: bytes = zstd.compress(body, level)
    return frame


def compress_tensors(head: bytes, tensors: Sequence[Tensor], level: int = LEVEL) -> bytes:
    """`head` and the data of the tensors as one frame. Raises ConfigError without a library.

    Codes of one channel are alike and unlike the next channel's, so where a channel fills a block it gets one, with
    code lengths of its own: the codes of a layer's middle-sized planes come out a tenth shorter.
    """
    zstd = _module()
    if zstd is None or not any(map(_plane_bytes, tensors)):
        return compress(b"".join((head, *(tensor.data for tensor in tensors))), level)
    packer = zstd.ZstdCompressor(level=level)
    packer.set_pledged_input_size(len(head) + sum(tensor.size_bytes for tensor in tensors))
    parts = [packer.compress(head, packer.FLUSH_BLOCK)]
    for tensor in tensors:
        plane_bytes = _plane_bytes(tensor) or max(1, tensor.size_bytes)
        data = memoryview(tensor.data)
        for start in range(0, tensor.size_bytes, plane_bytes):
            parts.append(packer.compress(data[start : start + plane_bytes], packer.FLUSH_BLOCK))
    return b"".join((*parts, packer.flush()))


def _plane_bytes(tensor: Tensor) -> int:
    """Bytes of one channel of byte codes, 0 where a block of its own would not pay."""
    if tensor.datatype not in ("UINT8", "INT8") or len(tensor.shape) < 3:
        return 0
    plane_bytes = prod(tensor.shape[2:])
    return plane_bytes if LEAST_PLANE_BYTES <= plane_bytes <= MOST_PLANE_BYTES else 0


def decompress(body: bytes, max_bytes: int) -> bytes:
    """The content of one whole frame, never more than `max_bytes`; a greater declared size is refused before any work.

    Raises TooLarge, ProtocolError (damaged, cut short, bytes after the end, or a dictionary is wanted), or Unsupported
    without a library.
    """
    zstd = _module()
    if zstd is None:
        raise Unsupported(
            "zstd bodies are not taken here", next_step="send the body as it is", field="content-encoding"
        )
    try:
        declared = zstd.get_frame_info(body)
        if (declared.decompressed_size or 0) > max_bytes:
            raise TooLarge(f"the body inflates to {declared.decompressed_size} bytes, at most {max_bytes} are taken")
        options = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
        reader = zstd.ZstdDecompressor(options=options)
        whole: bytes = reader.decompress(body, max_bytes + 1)
    except zstd.ZstdError as err:
        raise ProtocolError(f"the body is not valid zstd: {str(err)[:120]}", field="content-encoding") from err
    if len(whole) > max_bytes:
        raise TooLarge(f"the body inflates over {max_bytes} bytes")
    if not reader.eof or reader.unused_data:
        raise ProtocolError("the zstd body is cut short or has bytes after its end", field="content-encoding")
    return whole
