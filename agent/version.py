"""The version of the installed distribution."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def own_version() -> str:
    """`0.1.0`, or `sources` when run without an installation."""
    try:
        return version("midstream")
    except PackageNotFoundError:
        return "sources"
