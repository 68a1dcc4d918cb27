"""An import without what the imported library only uses where it is there."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from links.spared_import import without

NAME = "midstream_optional_thing"


@pytest.fixture(autouse=True)
def optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that may be left out, and a library that looks for it."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("")
    (tmp_path / NAME / "part.py").write_text("")
    looks = f"try:\n    import {NAME}.part\n    FOUND = True\nexcept ImportError:\n    FOUND = False\n"
    (tmp_path / "midstream_looking.py").write_text(looks)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in (NAME, f"{NAME}.part", "midstream_looking"):
        sys.modules.pop(name, None)


def test_the_library_goes_on_without_it_and_others_have_it_afterwards() -> None:
    with without(NAME):
        looking = importlib.import_module("midstream_looking")
    assert looking.FOUND is False
    assert NAME not in sys.modules
    assert importlib.import_module(f"{NAME}.part") is not None


def test_what_is_loaded_already_stays() -> None:
    importlib.import_module(f"{NAME}.part")
    with without(NAME):
        assert importlib.import_module("midstream_looking").FOUND is True


def test_another_thread_imports_what_it_likes() -> None:
    found: list[object] = []
    with without(NAME):
        other = threading.Thread(target=lambda: found.append(importlib.import_module(NAME)))
        other.start()
        other.join()
    assert [getattr(one, "__name__", "") for one in found] == [NAME]


def test_nothing_of_it_stays_behind_when_the_import_fails() -> None:
    before = list(sys.meta_path)
    with pytest.raises(ModuleNotFoundError, match="left out"), without(NAME):
        importlib.import_module(NAME)
    assert sys.meta_path == before
