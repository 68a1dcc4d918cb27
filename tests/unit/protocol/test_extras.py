"""What is typed to bring a missing extra works there: this environment's pip, from where midstream came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.extras import command, install_step, pip


def _recorded(folder: Path, **info: bool) -> str:
    return json.dumps({"url": folder.as_uri(), "dir_info": info})


def test_the_command_names_the_folder_that_midstream_came_from(tmp_path: Path) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    assert command("onnx,llama", _recorded(folder), "pip") == f"pip install '{folder}[onnx,llama]'"
    assert command("zstd", _recorded(folder, editable=True), "pip") == f"pip install -e '{folder}[zstd]'"
    assert command("zstd", _recorded(folder), "pip", again=True) == f"pip install --force-reinstall '{folder}[zstd]'"


@pytest.mark.parametrize(
    "recorded",
    [None, "", "[]", "{", '{"url": 3, "dir_info": {}}', '{"url": "https://a/b.whl", "archive_info": {}}',
     '{"url": "file:///nowhere/midstream", "dir_info": {}}', '{"url": "file:///", "dir_info": null}'],
)  # fmt: skip
def test_without_the_folder_it_names_a_clone(recorded: str | None) -> None:
    assert command("onnx", recorded, "pip") == "pip install '.[onnx]' in a clone of midstream"


def test_the_environments_own_pip_is_named_unless_it_is_the_shells(tmp_path: Path) -> None:
    own = tmp_path / "bin" / "pip"
    assert pip(tmp_path, "/usr/bin/pip") == "pip"
    own.parent.mkdir()
    own.touch()
    assert pip(tmp_path, str(own)) == "pip"
    assert pip(tmp_path, "/usr/bin/pip") == pip(tmp_path, None) == str(own)


def test_the_step_of_this_environment_names_its_extra() -> None:
    assert " install " in install_step("cache")
    assert "[cache]'" in install_step("cache") or install_step("cache").endswith("[cache]")
