"""Zstandard bodies (RFC 8878): the standard library's module from Python 3.14 on, its backport before that.

Optional: without either, `available()` is False and nothing here is offered to a peer. Blocking: about 2 ms per MB.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from protocol.errors import ConfigError, ProtocolError, TooLarge, Unsupported

NAME = "zstd"
"""The content coding, and the extension of the same name in GET /v2."""

LEVEL = 1
"""Levels above gain little on activations and cost several times the time."""

MAX_WINDOW_LOG = 27
"""128 MiB of history, what level 22 asks for: a frame cannot make its reader hold more."""


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
        raise ConfigError("no Zstandard library is installed", next_step="install midstream[zstd]")
    frame: bytes = zstd.compress(body, level)
    return frame


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
