"""What real graphs hold besides chains of layers: bodies, constants, chance, skips, foreign operators, side files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from protocol.errors import EngineError
from split_models.cuts import MAX_CROSSING, all_cuts, multi_tensor_cuts, single_tensor_cuts
from split_models.min_cut import Costs, cut_of, min_cut
from split_models.onnx_files import SHAPE_BYTES
from split_models.partition_onnx import Partitioner
from split_models.prepare_onnx import Prepared, prepare, whole_file
from tests.unit.split_models.onnx_graphs import (
    FLOAT,
    INT64,
    difference,
    if_model,
    loop_model,
    node,
    run,
    save,
    scan_model,
    side_file_model,
    value,
    weight,
)


def drawn(*shape: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def equal_everywhere(prepared: Prepared, feed: Mapping[str, np.ndarray], whole: list[np.ndarray]) -> list[str]:
    """Every cut of the model gives its answer; the ids."""
    partitioner = Partitioner(prepared)
    cuts = all_cuts(prepared.graph)
    assert all(difference(partitioner, cut, feed, whole) <= 1e-6 for cut in cuts)
    return [cut.id for cut in cuts]


@pytest.mark.parametrize(
    ("make", "shape", "op"),
    [(loop_model, (1, 4), "Loop"), (if_model, (1, 4), "If"), (scan_model, (5, 4), "Scan")],
)
def test_a_body_stays_whole_with_what_it_captures(
    make: Callable[[Path], Path], shape: tuple[int, ...], op: str, tmp_path: Path
) -> None:
    file = make(tmp_path / "body.onnx")
    prepared = prepare(file, {})
    (body,) = [one for one in prepared.graph.nodes if one.op == op]
    assert len(body.inputs) >= 2, "the captured tensor counts among the inputs"
    for seed in range(3):
        x = drawn(*shape, seed=seed)
        whole = run(file.read_bytes(), {"x": x})
        ids = equal_everywhere(prepared, {"x": x}, whole)
    assert len(ids) >= 3
    parts = Partitioner(prepared).split(single_tensor_cuts(prepared.graph)[-1], "raw")
    assert op in [one.op_type for one in onnx.load_from_string(parts.head).graph.node]


def test_weights_of_a_body_in_a_side_file_survive(tmp_path: Path) -> None:
    """onnxruntime writes such a body's weights twice when it saves the graph, and refuses the file then."""
    model = onnx.load(str(loop_model(tmp_path / "plain.onnx", own=3)))
    x = drawn(1, 4)
    whole = run(model.SerializeToString(), {"x": x})
    file = tmp_path / "body.onnx"
    onnx.save(model, str(file), save_as_external_data=True, location="body.data", size_threshold=0)
    prepared = prepare(file, {})
    assert len(equal_everywhere(prepared, {"x": x}, whole)) >= 3


def test_constants_and_what_is_made_of_weights_alone_never_cross(tmp_path: Path) -> None:
    """They stand first in the order and are read last; counted as computed, no cut would have a single tensor."""
    nodes = [
        node("Constant", [], ["k"], value=weight("k", FLOAT, [1, 4], [1.0, 2.0, 3.0, 4.0])),
        node("ConstantOfShape", ["two"], ["ones"], value=weight("one", FLOAT, [1], [1.0])),
        node("Transpose", ["w"], ["wt"]),
        node("Mul", ["wt", "ones"], ["w2"]),
        node("Relu", ["x"], ["a"]),
        node("MatMul", ["a", "w2"], ["b"]),
        node("Sub", ["b", "k"], ["y"]),
    ]
    weights = [weight("w", FLOAT, [4, 4], list(range(16))), weight("two", INT64, [2], [4, 4])]
    file = save(tmp_path / "c.onnx", nodes, [value("x", [1, 4])], [value("y", [1, 4])], weights)
    prepared = prepare(file, {})
    assert [cut.crossing[0].name for cut in single_tensor_cuts(prepared.graph)] == ["a", "b"]
    x = drawn(1, 4)
    equal_everywhere(prepared, {"x": x}, run(file.read_bytes(), {"x": x}))


def test_what_chance_makes_is_made_once(tmp_path: Path) -> None:
    """A random tensor reads no input and yet is no constant: run on both sides it would differ."""
    nodes = [
        node("RandomNormal", [], ["r"], shape=[1, 4]),
        node("Relu", ["x"], ["a"]),
        node("Add", ["a", "r"], ["b"]),
        node("Mul", ["b", "r"], ["y"]),
    ]
    graph = prepare(save(tmp_path / "r.onnx", nodes, [value("x", [1, 4])], [value("y", [1, 4])]), {}).graph
    assert [one.op for one in graph.nodes].count("RandomNormal") == 1
    cut = next(cut for cut in all_cuts(graph) if "b" in {tensor.name for tensor in cut.crossing})
    assert {tensor.name for tensor in cut.crossing} == {"b", "r"}


def test_a_weight_that_is_also_an_input_is_a_weight(tmp_path: Path) -> None:
    """Older exporters list every weight as an input: none may be asked for, sent, or left unfolded."""
    nodes = [node("Add", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])]
    w = weight("w", FLOAT, [1, 4], [1.0] * 4)
    file = save(tmp_path / "w.onnx", nodes, [value("x", [1, 4]), value("w", [1, 4])], [value("y", [1, 4])], [w])
    prepared = prepare(file, {})
    assert [tensor.name for tensor in prepared.graph.inputs] == ["x"]
    assert [one.inputs for one in prepared.graph.nodes] == [("x",), ("a",)]


def skip_model(file: Path) -> Path:
    """A mask that every layer reads, a long skip, and an output that the first half makes."""
    nodes = [
        node("Conv", ["x", "w1"], ["a"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Mul", ["a", "mask"], ["b"]),
        node("ReduceMean", ["b"], ["early"], axes=[2, 3], keepdims=0),
        node("Conv", ["b", "w2"], ["c"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["d"]),
        node("ReduceMean", ["mask"], ["m"], axes=[2, 3], keepdims=1),
        node("Mul", ["d", "m"], ["e"]),
        node("ReduceMean", ["e"], ["y"], axes=[2, 3], keepdims=0),
    ]
    draw = np.random.default_rng(3)
    weights = [
        weight("w1", FLOAT, [2, 3, 3, 3], draw.normal(size=54)),
        weight("w2", FLOAT, [2, 2, 3, 3], draw.normal(size=36)),
    ]
    inputs = [value("x", [1, 3, 16, 16]), value("mask", [1, 1, 8, 8])]
    return save(file, nodes, inputs, [value("y", [1, 2]), value("early", [1, 2])], weights)


def test_inputs_are_sent_again_and_early_outputs_travel_along(tmp_path: Path) -> None:
    """Both count in bytes, have names of their own on the wire, and the answer is the whole model's."""
    file = skip_model(tmp_path / "skip.onnx")
    prepared = prepare(file, {})
    assert single_tensor_cuts(prepared.graph) == []
    cuts = multi_tensor_cuts(prepared.graph, [])
    feed = {"x": drawn(1, 3, 16, 16), "mask": drawn(1, 1, 8, 8)}
    ids = equal_everywhere(prepared, feed, run(file.read_bytes(), feed))
    assert ids == [cut.id for cut in cuts] == [f"m{k:03d}" for k in range(len(cuts))]
    again = next(cut for cut in cuts if {"mask", "early"} <= {tensor.name for tensor in cut.crossing})
    assert again.size_bytes == sum(tensor.size_bytes for tensor in again.crossing)
    names = [name for name, _, _ in Partitioner(prepared).split(again, "raw").crossing]
    assert {"mask__sent", "early__sent"} < set(names)
    assert all(len(cut.crossing) <= MAX_CROSSING for cut in cuts)


def test_a_minimum_cut_is_a_cut_like_any_other(tmp_path: Path) -> None:
    file = skip_model(tmp_path / "skip.onnx")
    prepared = prepare(file, {})
    graph = prepared.graph
    feed = {"x": drawn(1, 3, 16, 16), "mask": drawn(1, 1, 8, 8)}
    whole = run(file.read_bytes(), feed)
    device_s = [0.001] * len(graph.nodes)
    found = set()
    for bytes_per_s in (1e4, 1e5, 1e6):
        moves = {name: tensor.size_bytes / bytes_per_s for name, tensor in graph.tensors.items()}
        head = min_cut(graph, Costs(device_s, [s / 50 for s in device_s], moves)).head
        cut = cut_of(graph, head, "d000")
        if cut is not None:
            found.add(cut.crossing)
            assert difference(Partitioner(prepared), cut, feed, whole) <= 1e-6
    assert found, "every setting gave an endpoint"


def test_cuts_of_several_tensors_send_less_than_every_single_one_before(model_file: Callable[[str], Path]) -> None:
    graph = prepare(model_file("ppocr-v4-det"), {"x": (1, 3, 96, 96)}).graph
    singles = single_tensor_cuts(graph)
    for cut in multi_tensor_cuts(graph, singles):
        assert 2 <= len(cut.crossing) <= MAX_CROSSING
        assert all(cut.size_bytes < single.size_bytes for single in singles if single.after <= cut.after)


def test_functions_and_metadata_come_along(tmp_path: Path) -> None:
    """extract_model drops metadata; a recipe's dictionary may be in it."""
    double = helper.make_function(
        "own", "Twice", ["p"], ["q"], [node("Add", ["p", "p"], ["q"])], [helper.make_opsetid("", 17)]
    )
    nodes = [node("Relu", ["x"], ["a"]), node("Twice", ["a"], ["b"], domain="own"), node("Neg", ["b"], ["y"])]
    file = save(
        tmp_path / "f.onnx", nodes, [value("x", [1, 4])], [value("y", [1, 4])], domains={"own": 1}, functions=[double]
    )
    model = onnx.load(str(file))
    model.metadata_props.add(key="words", value="one two")
    onnx.save(model, str(file))
    prepared = prepare(file, {})
    x = drawn(1, 4)
    assert len(equal_everywhere(prepared, {"x": x}, run(file.read_bytes(), {"x": x}))) >= 1
    head = onnx.load_from_string(Partitioner(prepared).split(single_tensor_cuts(prepared.graph)[0], "raw").head)
    assert [(one.key, one.value) for one in head.metadata_props if one.key == "words"] == [("words", "one two")]


def test_shapes_behind_operators_that_onnx_does_not_know(tmp_path: Path) -> None:
    """com.microsoft operators have no shape inference in onnx; onnxruntime knows them."""
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Gelu", ["a"], ["b"], domain="com.microsoft"),
        node("Neg", ["b"], ["c"]),
        node("Tanh", ["c"], ["y"]),
    ]
    file = save(tmp_path / "ms.onnx", nodes, [value("x", [1, 4])], [value("y", [1, 4])], domains={"com.microsoft": 1})
    prepared = prepare(file, {})
    assert [cut.crossing[0].name for cut in single_tensor_cuts(prepared.graph)] == ["a", "b", "c"]
    x = drawn(1, 4)
    equal_everywhere(prepared, {"x": x}, run(file.read_bytes(), {"x": x}))


def test_a_shape_that_depends_on_values_is_no_fixed_shape(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("NonZero", ["a"], ["where"]),
        node("Cast", ["where"], ["b"], to=TensorProto.FLOAT),
        node("ReduceSum", ["b"], ["y"], keepdims=0),
    ]
    graph = prepare(save(tmp_path / "n.onnx", nodes, [value("x", [4, 8])], [value("y", [])]), {}).graph
    assert [cut.crossing[0].name for cut in single_tensor_cuts(graph)] == ["a"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 9999), "operator set 9999"),
        (lambda m: setattr(m, "ir_version", 99), "format version 99"),
        (lambda m: setattr(m.graph.node[0], "domain", "com.acme"), "domain 'com.acme'"),
        (lambda m: m.ClearField("opset_import"), "names no operator set"),
    ],
)
def test_why_a_model_cannot_be_cut_is_said_in_words(
    spoil: Callable[[onnx.ModelProto], None], words: str, tmp_path: Path
) -> None:
    file = save(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], [value("x", [1, 4])], [value("y", [1, 4])])
    model = onnx.load(str(file))
    spoil(model)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=words) as raised:
        prepare(file, {})
    assert "export" in raised.value.next_step


def test_a_model_of_an_old_operator_set_is_told_how_to_become_newer(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "x"], ["a"]), node("Neg", ["a"], ["y"])]
    model = onnx.load(str(save(tmp_path / "old.onnx", nodes, [value("x", [1, 4])], [value("y", [1, 4])])))
    model.opset_import[0].version = 6
    (tmp_path / "old.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(EngineError) as raised:
        prepare(tmp_path / "old.onnx", {})
    assert "operator set 6" in raised.value.next_step
    assert "version_converter" in raised.value.next_step


def test_sparse_weights_are_refused_in_words(tmp_path: Path) -> None:
    values = helper.make_tensor("w", FLOAT, [2], [2.0, 3.0])
    sparse = helper.make_sparse_tensor(values, helper.make_tensor("at", INT64, [2], [1, 3]), [4])
    nodes = [node("Relu", ["x"], ["a"]), node("Mul", ["a", "w"], ["y"])]
    graph = helper.make_graph(nodes, "s", [value("x", [1, 4])], [value("y", [1, 4])], sparse_initializer=[sparse])
    file = tmp_path / "s.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(file))
    with pytest.raises(EngineError, match="sparse weight 'w'") as raised:
        prepare(file, {})
    assert "dense" in raised.value.next_step


@pytest.mark.parametrize("inline_bytes", [1 << 30, SHAPE_BYTES])
def test_weights_in_a_side_file(inline_bytes: int, tmp_path: Path) -> None:
    """Read into the prepared file, or, when they are more than the bound, taken into each part by reference."""
    file, whole = side_file_model(tmp_path)
    prepared = prepare(file, {}, inline_bytes)
    assert (prepared.folder is None) == (inline_bytes > 1 << 20)
    assert (len(prepared.data) < 8_000) == (prepared.folder is not None)
    ids = equal_everywhere(prepared, {"x": drawn(1, 64)}, [whole])
    assert len(ids) >= 3
    (answer,) = run(whole_file(prepared), {"x": drawn(1, 64)})
    assert np.allclose(answer, whole, atol=1e-6)


def test_other_weights_in_the_side_file_are_another_model(tmp_path: Path) -> None:
    file, _ = side_file_model(tmp_path)
    first = prepare(file, {}, SHAPE_BYTES).digest
    assert prepare(file, {}, SHAPE_BYTES).digest == first
    data = bytearray((tmp_path / "side.data").read_bytes())
    data[1000] ^= 1
    (tmp_path / "side.data").write_bytes(data)
    assert prepare(file, {}, SHAPE_BYTES).digest != first


@pytest.mark.parametrize("place", ["../side.data", "/etc/hostname", "sub/../../x"])
def test_a_side_file_outside_the_folder_is_never_read(place: str, tmp_path: Path) -> None:
    file, _ = side_file_model(tmp_path)
    model = onnx.load(str(file), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = place
    file.write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match="outside"):
        prepare(file, {})


def test_a_side_file_that_is_missing_or_short(tmp_path: Path) -> None:
    file, _ = side_file_model(tmp_path)
    side = tmp_path / "side.data"
    side.write_bytes(side.read_bytes()[:1000])
    with pytest.raises(EngineError, match="too short"):
        prepare(file, {})
    side.unlink()
    with pytest.raises(EngineError, match="missing"):
        prepare(file, {})


def test_over_two_gigabytes_of_weights_are_enumerated_without_reading_them(tmp_path: Path) -> None:
    """A sparse file of 3 GB: graph, cuts and a small head come from references; the tail is refused in words."""
    count = 3 << 28  # FP32 values in the second weight: 3 GiB
    with (tmp_path / "big.data").open("wb") as sparse:
        sparse.truncate(1024 * 64 * 4 + count * 4)
    small = onnx.TensorProto(name="w1", data_type=FLOAT, dims=[64, 1024], data_location=TensorProto.EXTERNAL)
    large = onnx.TensorProto(name="w2", data_type=FLOAT, dims=[1024, count // 1024], data_location=TensorProto.EXTERNAL)
    for tensor, offset, length in ((small, 0, 1024 * 64 * 4), (large, 1024 * 64 * 4, count * 4)):
        for key, text in (("location", "big.data"), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=text)
    nodes = [node("MatMul", ["x", "w1"], ["a"]), node("Relu", ["a"], ["b"]), node("MatMul", ["b", "w2"], ["y"])]
    outputs = [value("y", [1, count // 1024])]
    file = save(tmp_path / "big.onnx", nodes, [value("x", [1, 64])], outputs, [small, large])
    prepared = prepare(file, {})
    assert len(prepared.data) < 4_000
    cuts = single_tensor_cuts(prepared.graph)
    assert [cut.crossing[0].name for cut in cuts] == ["a", "b"]
    assert sum(one.weight_bytes for one in prepared.graph.nodes) > 3 << 30
    (head,) = run(Partitioner(prepared).with_outputs(["b"]), {"x": drawn(1, 64)})
    assert head.shape == (1, 1024)
    with pytest.raises(EngineError, match="GB of weights"):
        Partitioner(prepared).split(cuts[1], "raw")
