"""Models whose weights lie beside them: found, copied, verified, and named by all their bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from engines.catalogue import load_catalogue
from engines.digest import file_sha256
from engines.onnx import OnnxRuntime
from engines.side_files import MAX_SIDE_FILES, side_files, source_sha256
from engines.store import ModelStore
from protocol.errors import ConfigError, EngineError
from split_models.measure import zeros
from tests.unit.split_models.onnx_graphs import FLOAT, loop_model, node, save, value, weight


def with_side_file(folder: Path, name: str = "m.onnx") -> Path:
    """A product whose weight lies in m.data."""
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Tanh", ["a"], ["y"])]
    weights = [weight("w", FLOAT, [8, 8], range(64))]
    graph = helper.make_graph(nodes, "g", [value("x", [1, 8])], [value("y", [1, 8])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder.mkdir(exist_ok=True)
    onnx.save(model, str(folder / name), save_as_external_data=True, location="m.data", size_threshold=0)
    return folder / name


def test_they_are_found_in_the_graph_and_in_bodies(tmp_path: Path) -> None:
    assert [one.name for one in side_files(with_side_file(tmp_path))] == ["m.data"]
    model = onnx.load(str(loop_model(tmp_path / "loop.onnx", own=2)))
    onnx.save(model, str(tmp_path / "b.onnx"), save_as_external_data=True, location="b.data", size_threshold=0)
    assert [one.name for one in side_files(tmp_path / "b.onnx")] == ["b.data"]
    assert side_files(tmp_path / "loop.onnx") == ()


def test_real_models_have_none(model_file: Callable[[str], Path]) -> None:
    for name in ("ppocr-v2-cls", "ppocr-v4-rec", "minilm-int8"):
        file = model_file(name)
        assert side_files(file) == ()
        assert source_sha256(file, "onnx") == file_sha256(file)


def test_a_model_is_added_with_its_side_files_and_runs_from_the_store(tmp_path: Path) -> None:
    file = with_side_file(tmp_path / "mine")
    store = ModelStore(tmp_path / "store", load_catalogue())
    entry = store.add(file, name="mine")
    assert [one.filename for one in entry.side_files] == ["m.data"]
    file.unlink()
    (tmp_path / "mine" / "m.data").unlink()
    model = OnnxRuntime().load(store.path("mine"), 1)
    assert model.run([zeros(spec) for spec in model.inputs])[0].shape == (1, 8)
    model.close()
    assert store.verify("mine") == store.path("mine")
    assert entry.source_sha256 == source_sha256(store.path("mine"), "onnx") != entry.sha256


def test_a_damaged_side_file_is_moved_aside(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", load_catalogue())
    store.add(with_side_file(tmp_path / "mine"), name="mine")
    side = tmp_path / "store" / "mine" / "m.data"
    side.write_bytes(side.read_bytes()[:-1] + b"x")
    with pytest.raises(EngineError, match="damaged"):
        store.verify("mine")
    assert not side.exists()
    assert (tmp_path / "store" / ".aside" / "mine-m.data").exists()


def test_the_same_graph_with_other_weights_is_another_model(tmp_path: Path) -> None:
    first, second = with_side_file(tmp_path / "a"), with_side_file(tmp_path / "b")
    data = bytearray((tmp_path / "b" / "m.data").read_bytes())
    data[0] ^= 1
    (tmp_path / "b" / "m.data").write_bytes(data)
    assert file_sha256(first) == file_sha256(second)
    assert source_sha256(first, "onnx") != source_sha256(second, "onnx")


def test_one_that_is_missing_is_named_before_anything_is_copied(tmp_path: Path) -> None:
    file = with_side_file(tmp_path / "mine")
    (tmp_path / "mine" / "m.data").unlink()
    with pytest.raises(ConfigError, match="which is missing"):
        ModelStore(tmp_path / "store", load_catalogue()).add(file)
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").glob("[!.]*"))


@pytest.mark.parametrize("place", ["../m.data", "/etc/hostname", "sub/m.data", ".hidden", ""])
def test_one_outside_the_folder_is_refused(place: str, tmp_path: Path) -> None:
    file = with_side_file(tmp_path)
    model = onnx.load(str(file), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = place
    file.write_bytes(model.SerializeToString())
    with pytest.raises(ConfigError, match="not a file beside it"):
        side_files(file)


def test_files_without_end_are_refused(tmp_path: Path) -> None:
    weights = []
    for k in range(MAX_SIDE_FILES + 1):
        tensor = onnx.TensorProto(name=f"w{k}", data_type=FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=f"w{k}")
        weights.append(tensor)
    file = save(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], [value("x", [1])], [value("y", [1])], weights)
    with pytest.raises(ConfigError, match="more than"):
        side_files(file)


@pytest.mark.parametrize("content", [b"", b"\x3a\xff\xff\xff\xff\x0f", b"\x08\x07\x3a\x02\x0a", bytes(range(256)) * 8])
def test_damage_is_for_others_to_tell(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    assert side_files(tmp_path / "x.onnx") == ()
