"""Small reads from pseudo files: bounded, and never an exception."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 1 << 20
"""A /proc/cpuinfo of a thousand CPUs fits."""


def read_text(path: Path) -> str | None:
    """Content without NUL bytes and blanks at its ends; None when the file cannot be read. Bad bytes are replaced."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except (OSError, ValueError):
        return None
    return data.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def read_int(path: Path, base: int = 10) -> int | None:
    """The number in a file; None when there is none."""
    text = read_text(path)
    if text is None or len(text) > 32:
        return None
    try:
        return int(text, base)
    except ValueError:
        return None
