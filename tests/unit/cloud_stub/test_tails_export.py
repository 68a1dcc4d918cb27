"""The exported model repository: what Triton's documentation asks of it, whole or absent, and never overwritten."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_stub.config import load_config
from cloud_stub.tails_cli import tails
from cloud_stub.tails_export import export_repository, model_config
from engines.digest import file_sha256
from engines.onnx import OnnxRuntime
from protocol.errors import ConfigError, NotFound
from protocol.models import foreign_name, tail_name
from protocol.tensors import TensorSpec
from split_models.bundle_files import read_bundle
from tests.tensor_house import CLS, bundle_root


@pytest.fixture
def state(model_file: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator's state folder with one bundle."""
    root = bundle_root([CLS], model_file, tmp_path_factory.mktemp("bundles"))
    shutil.copytree(root, tmp_path / "state" / "bundles")
    return tmp_path / "state"


def test_every_tail_and_the_whole_model_stand_in_the_repository(state: Path, tmp_path: Path) -> None:
    bundle = state / "bundles" / CLS
    manifest = read_bundle(bundle)
    done = export_repository([bundle], tmp_path / "repository", OnnxRuntime())
    names = {tail_name(CLS, manifest.digest, cut.id, cut.codec): cut.tail_sha256 for cut in manifest.cuts}
    names[foreign_name(CLS, manifest.digest)] = manifest.whole_sha256
    assert {one.name for one in done} == set(names) and all(one.new for one in done)
    assert {path.name for path in (tmp_path / "repository").iterdir()} == set(names)
    for name, sha256 in names.items():
        folder = tmp_path / "repository" / name
        assert file_sha256(folder / "1" / "model.onnx") == sha256
        text = (folder / "config.pbtxt").read_text()
        model = OnnxRuntime().load(folder / "1" / "model.onnx", 1)
        assert f'name: "{name}"' in text and 'platform: "onnxruntime_onnx"' in text
        told = re.findall(r'(input|output) \{ name: "(.*)" data_type: TYPE_(\w+) dims: \[ (.*) \] \}', text)
        specs = [("input", spec) for spec in model.inputs] + [("output", spec) for spec in model.outputs]
        assert told == [
            (k, s.name, s.datatype, ", ".join(str(-1 if d is None else d) for d in s.shape)) for k, s in specs
        ]
        model.close()


def test_a_second_export_changes_nothing_and_another_file_is_not_overwritten(state: Path, tmp_path: Path) -> None:
    bundle, out = state / "bundles" / CLS, tmp_path / "repository"
    (first, *_) = export_repository([bundle], out, OnnxRuntime())
    assert not any(one.new for one in export_repository([bundle], out, OnnxRuntime()))
    file = out / first.name / "1" / "model.onnx"
    file.write_bytes(b"somebody else's")
    with pytest.raises(ConfigError, match="holds another file"):
        export_repository([bundle], out, OnnxRuntime())
    assert file.read_bytes() == b"somebody else's"


def test_another_users_server_can_read_it_under_any_umask(state: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        export_repository([state / "bundles" / CLS], tmp_path / "repository", OnnxRuntime())
    finally:
        os.umask(before)
    for path in (tmp_path / "repository", *(tmp_path / "repository").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_names_are_quoted_and_free_dimensions_are_minus_one() -> None:
    text = model_config("m", [TensorSpec('a"b', "BYTES", (None, 3))], [TensorSpec("y", "FP16", ())])
    assert 'input { name: "a\\"b" data_type: TYPE_STRING dims: [ -1, 3 ] }' in text
    assert 'output { name: "y" data_type: TYPE_FP16 dims: [  ] }' in text


def test_the_command_says_what_it_did_and_what_is_missing(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(tmp_path / "repository"), "--state-dir", str(state)]
    assert tails(arguments) == 0
    assert "--tails-url" in capsys.readouterr().out
    with pytest.raises(NotFound, match="no bundle of 'other'"):
        tails([*arguments, "--model", "other"])
    with pytest.raises(NotFound, match="cut its models once"):
        tails(["export", str(tmp_path), "--state-dir", str(tmp_path / "empty")])


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"tails_url": "host:8000"}, "tails_url"),
        ({"tails_url": "http://user:secret@host:8000"}, "tails_url"),
        ({"tails_token_file": "/dev/null"}, "tails_token_file"),
        ({"tails_url": "http://host:8000", "tails_ca": "/nowhere/ca.pem"}, "tails_ca"),
    ],
)
def test_settings_of_the_foreign_server_are_checked(flags: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, {"HOME": "/nowhere"})
    assert caught.value.field == field
