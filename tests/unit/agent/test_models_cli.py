"""`midstream models add` and `analyse`: the table of cuts, its bound, JSON, and reasons instead of a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent.cli.analysis_table import MOST_ROWS
from agent.cli.models import models
from engines.catalogue import load_catalogue
from engines.store import ModelStore
from protocol.errors import ConfigError
from tests.unit.split_models.onnx_graphs import node, save, value

SHAPE = ["--input-shape", "x=1x3x48x192"]


def store(tmp_path: Path) -> list[str]:
    return ["--models-dir", str(tmp_path / "m")]


def test_add_prints_what_can_be_cut_best_first_and_bounded(
    tmp_path: Path, model_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(model_file("ppocr-v2-cls"))
    assert models(["add", file, "--name", "mine", *SHAPE, "--no-measure", *store(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "added mine"
    assert "44 cuts of one tensor" in lines[1]
    rows = [line for line in lines if line[:3].isdigit()]
    assert len(rows) == MOST_ROWS
    totals = [float(row.split()[-1]) for row in rows]
    assert totals == sorted(totals)
    assert "32 more cuts; --all lists them" in lines[-1]
    entry = ModelStore(tmp_path / "m", load_catalogue()).entry("mine")
    assert dict(entry.input_shapes) == {"x": (1, 3, 48, 192)}, "the coordinator cuts for these shapes"
    assert models(["analyse", "mine", "--no-measure", "--all", *store(tmp_path)]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line[:3].isdigit()]) == 44


def test_add_measures_and_tells_machines_everything(
    tmp_path: Path, model_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(model_file("ppocr-v2-cls"))
    assert models(["add", file, "--name", "mine", *SHAPE, "--json", *store(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["analysis"]
    assert len(found["cuts"]) == 44
    assert found["measured"]
    assert any(cut["measured"] for cut in found["cuts"])
    assert {"id", "crossing", "raw_bytes", "wire_bytes", "codec", "predicted", "total_s"} <= set(found["cuts"][0])


def test_add_without_a_look(
    tmp_path: Path, model_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert models(["add", str(model_file("ppocr-v2-cls")), "--name", "mine", "--no-analyse", *store(tmp_path)]) == 0
    assert capsys.readouterr().out == "added mine\n"


def test_a_model_without_cuts_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save(tmp_path / "one.onnx", [node("Relu", ["x"], ["y"])], [value("x", [1, 4])], [value("y", [1, 4])])
    assert models(["add", str(file), *store(tmp_path)]) == 0
    assert "one cannot be cut: it is a single operator" in capsys.readouterr().out
    assert models(["analyse", "one", *store(tmp_path)]) == 1


def test_a_sample_gives_the_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])]
    file = save(tmp_path / "free.onnx", nodes, [value("x", ["n", 4])], [value("y", ["n", 4])])
    np.save(tmp_path / "x.npy", np.zeros((3, 4), dtype=np.float32))
    assert models(["add", str(file), "--sample", str(tmp_path / "x.npy"), "--json", *store(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["analysis"]
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [3, 4]}]
    assert not found["notes"]


def test_a_recipe_gives_the_shape_that_it_feeds(
    tmp_path: Path, model_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(model_file("ppocr-v2-cls"))
    options = ["--name", "mine", "--recipe", "ppocr-cls", "--no-measure", "--json", *store(tmp_path)]
    assert models(["add", file, *options]) == 0
    found = json.loads(capsys.readouterr().out)["analysis"]
    assert [one["shape"] for one in found["inputs"]] == [[1, 3, 48, 192]]
    assert not found["notes"], "nothing was guessed"


def test_a_sample_speaks_for_itself_whatever_the_model_was_added_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])]
    file = save(tmp_path / "free.onnx", nodes, [value("x", ["n", 4])], [value("y", ["n", 4])])
    assert models(["add", str(file), "--input-shape", "x=1x4", "--no-analyse", *store(tmp_path)]) == 0
    capsys.readouterr()
    np.save(tmp_path / "x.npy", np.zeros((3, 4), dtype=np.float32))
    assert models(["analyse", "free", "--sample", str(tmp_path / "x.npy"), "--json", *store(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inputs"][0]["shape"] == [3, 4]
    assert found["measured"]


@pytest.mark.parametrize("wrong", [["--uplink-mbit", "0"], ["--rtt-ms", "-1"], ["--server-speed", "nan"]])
def test_conditions_that_are_none(wrong: list[str], tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    file = str(model_file("ppocr-v2-cls"))
    with pytest.raises(ConfigError, match="cannot be"):
        models(["add", file, "--name", "mine", *SHAPE, "--no-measure", *wrong, *store(tmp_path)])
    assert not (tmp_path / "m" / "mine").exists()


def test_shapes_are_refused_before_anything_is_copied(tmp_path: Path) -> None:
    file = save(tmp_path / "one.onnx", [node("Relu", ["x"], ["y"])], [value("x", [1, 4])], [value("y", [1, 4])])
    with pytest.raises(ConfigError):
        models(["add", str(file), "--input-shape", "x=1xfour", *store(tmp_path)])
    assert not (tmp_path / "m" / "one").exists()
