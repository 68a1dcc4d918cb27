"""sha256 of files: the name of a model's weights on disk and on the wire."""

from __future__ import annotations

import hashlib
from pathlib import Path

CHUNK_BYTES = 1 << 20


def file_sha256(file: Path) -> str:
    """Hex sha256 of the file's bytes. Raises OSError when it cannot be read."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
