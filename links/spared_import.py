"""An import that leaves out what the imported library only uses where it is there."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Within, this thread's imports of the packages `names` raise ModuleNotFoundError unless they are loaded already.

    For a library that looks for another one and goes on without it, when nothing that it would do with it is asked of
    it here. Other threads import what they like.
    """
    absent = _Absent(frozenset(names))
    sys.meta_path.insert(0, absent)
    try:
        yield
    finally:
        sys.meta_path.remove(absent)


class _Absent(importlib.abc.MetaPathFinder):
    """Finds that `names` are not there."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._names and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is left out here", name=fullname)
        return None
