"""Preparing and cutting real ONNX files, and what happens with files that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from engines.arrays import to_tensor
from protocol.errors import ConfigError, EngineError, Unsupported
from split_models.codec import FP16, INT8, RAW, Affine, affine_for, check_codec, dequantise, halve, quantise, wire_bytes
from split_models.cuts import single_tensor_cuts
from split_models.onnx_files import MAX_MODEL_BYTES, load_model
from split_models.partition_onnx import Partitioner
from split_models.prepare_onnx import Prepared, prepare

SHAPE = (1, 3, 48, 192)
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT


@pytest.fixture(scope="module")
def cls(model_file: Callable[[str], Path]) -> Prepared:
    return prepare(model_file("ppocr-v2-cls"), {"x": SHAPE})


def run(data: bytes, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    found: list[np.ndarray] = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(
        None, feed
    )
    return found


def test_the_digest_is_the_same_every_time(cls: Prepared, model_file: Callable[[str], Path]) -> None:
    assert prepare(model_file("ppocr-v2-cls"), {"x": SHAPE}).digest == cls.digest
    assert prepare(model_file("ppocr-v2-cls"), {"x": (1, 3, 48, 96)}).digest != cls.digest


def test_prepared_equals_the_original(cls: Prepared, model_file: Callable[[str], Path]) -> None:
    x = np.random.default_rng(7).normal(size=SHAPE).astype(np.float32)
    (whole,), (prepared,) = run(model_file("ppocr-v2-cls").read_bytes(), {"x": x}), run(cls.data, {"x": x})
    assert np.abs(whole - prepared).max() < 1e-5


def test_folding_leaves_no_constants_and_only_used_domains(cls: Prepared) -> None:
    assert all(node.op_type not in ("Constant", "Shape") for node in cls.proto.graph.node)
    assert [opset.domain for opset in cls.proto.opset_import] == [""]
    assert len(cls.graph.nodes) < 200


def test_int8_in_the_graph_is_the_arithmetic_of_the_codec(cls: Prepared) -> None:
    """The head's last operators give the codes that `quantise` gives, and the tail undoes them."""
    cut = single_tensor_cuts(cls.graph)[6]
    partitioner = Partitioner(cls)
    x = np.random.default_rng(7).normal(size=SHAPE).astype(np.float32)
    (activation,) = run(partitioner.split(cut, RAW).head, {"x": x})
    channels = activation.min(axis=(0, 2, 3)), activation.max(axis=(0, 2, 3))
    affine = affine_for(channels[0].tolist(), channels[1].tolist())
    parts = partitioner.split(cut, INT8, {cut.crossing[0].name: affine})
    (codes,) = run(parts.head, {"x": x})
    assert codes.dtype == np.uint8
    assert np.abs(codes.astype(int) - quantise(activation, affine).astype(int)).max() <= 1
    plain = np.frombuffer(dequantise(to_tensor("t", codes), affine).data, np.float32).reshape(activation.shape)
    (tail,) = run(parts.tail, {parts.crossing[0][0]: codes})
    (wanted,) = run(partitioner.split(cut, RAW).tail, {cut.crossing[0].name: plain})
    assert np.allclose(tail, wanted, atol=1e-6)


def test_fp16_in_the_graph_is_the_arithmetic_of_the_codec(cls: Prepared) -> None:
    cut = single_tensor_cuts(cls.graph)[6]
    partitioner = Partitioner(cls)
    x = np.random.default_rng(7).normal(size=SHAPE).astype(np.float32)
    (activation,) = run(partitioner.split(cut, RAW).head, {"x": x})
    parts = partitioner.split(cut, FP16)
    assert parts.crossing == ((f"{cut.crossing[0].name}__wire", "FP16", cut.crossing[0].shape),)
    (halves,) = run(parts.head, {"x": x})
    assert halves.dtype == np.float16
    assert (halves == halve(activation)).all()
    (tail,) = run(parts.tail, {parts.crossing[0][0]: halves})
    (wanted,) = run(partitioner.split(cut, RAW).tail, {cut.crossing[0].name: halves.astype(np.float32)})
    assert np.allclose(tail, wanted, atol=1e-6)


@pytest.mark.parametrize("version", [9, 13])
def test_values_beyond_fp16_are_cut_off_in_the_graph(tmp_path: Path, version: int) -> None:
    nodes = [helper.make_node("Mul", ["x", "x"], ["a"]), helper.make_node("Sqrt", ["a"], ["y"])]
    file = tiny(tmp_path / "large.onnx", nodes, version=version)
    prepared = prepare(file, {"x": (1, 4)})
    parts = Partitioner(prepared).split(single_tensor_cuts(prepared.graph)[0], FP16)
    (halves,) = run(parts.head, {"x": np.array([[1e3, 2.0, 0.0, -1e9]], dtype=np.float32)})
    assert halves.tolist() == [[65504.0, 4.0, 0.0, 65504.0]]


def test_a_quantised_answer_keeps_its_name(cls: Prepared) -> None:
    cut = single_tensor_cuts(cls.graph)[0]
    one = Affine((1 / 255,), (0,))
    parts = Partitioner(cls).split(cut, INT8, {cut.crossing[0].name: one}, one)
    output = onnx.load_from_string(parts.tail).graph.output[0]
    assert output.name == cls.graph.outputs[0].name
    assert output.type.tensor_type.elem_type == onnx.TensorProto.UINT8


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_head_is_a_model_of_its_own_that_holds_nothing_of_the_tail(cls: Prepared, place: int) -> None:
    """Asking the whole model for an early output runs all of it all the same."""
    cut = single_tensor_cuts(cls.graph)[place]
    parts = Partitioner(cls).split(cut, RAW)
    head, tail = onnx.load_from_string(parts.head).graph, onnx.load_from_string(parts.tail).graph
    made = [{name for node in graph.node for name in node.output} for graph in (head, tail, cls.proto.graph)]
    assert [output.name for output in head.output] == [cut.crossing[0].name] == [value.name for value in tail.input]
    assert made[0] | made[1] == made[2]
    assert not made[0] & made[1]
    assert made[1], "there is no tail"
    weights = [{tensor.name for tensor in graph.initializer} for graph in (head, tail)]
    assert all(name in weights[0] for node in head.node for name in node.input if name in weights[1])


def test_a_model_that_came_back_empty_is_refused(cls: Prepared, tmp_path: Path) -> None:
    """The file parses and has inputs, outputs and weights; what it lacks is nodes."""
    hollow = onnx.ModelProto()
    hollow.CopyFrom(cls.proto)
    del hollow.graph.node[:]
    file = tmp_path / "hollow.onnx"
    file.write_bytes(hollow.SerializeToString())
    with pytest.raises(EngineError, match="holds no graph"):
        load_model(file)


def test_a_model_over_protobufs_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Beyond it shape inference gives back an empty graph without a word."""
    file = tmp_path / "huge.onnx"
    with file.open("wb") as sparse:
        sparse.truncate(MAX_MODEL_BYTES + 1)
    with pytest.raises(EngineError, match="is over") as raised:
        load_model(file)
    assert "whole" in raised.value.next_step


@pytest.mark.parametrize("content", [b"", b"not a model", bytes(1000), b"\x08\x07\x12\x00" * 10])
def test_files_that_are_no_model(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.onnx"
    file.write_bytes(content)
    with pytest.raises(EngineError) as raised:
        prepare(file, {"x": SHAPE})
    assert raised.value.next_step


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot read"):
        prepare(tmp_path / "none.onnx", {})


@pytest.mark.parametrize("shapes", [{"y": SHAPE}, {"x": (1, 3)}, {"x": (1, 3, 0, 192)}, {"x": (1, 3, -1, 192)}])
def test_input_shapes_that_do_not_fit(model_file: Callable[[str], Path], shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(model_file("ppocr-v2-cls"), shapes)
    assert raised.value.field == "input_shapes"


def test_free_dimensions_must_be_fixed(model_file: Callable[[str], Path]) -> None:
    with pytest.raises(EngineError):
        prepare(model_file("ppocr-v2-cls"), {})


def tiny(path: Path, nodes: list[onnx.NodeProto], outputs: list[str] | None = None, version: int = 13) -> Path:
    ports = [helper.make_tensor_value_info("x", FLOAT, [1, 4])]
    ends = [helper.make_tensor_value_info(name, FLOAT, [1, 4]) for name in outputs or ["y"]]
    model = helper.make_model(
        helper.make_graph(nodes, "tiny", ports, ends), opset_imports=[helper.make_opsetid("", version)], ir_version=8
    )
    path.write_bytes(model.SerializeToString())
    return path


def test_a_model_that_cannot_be_separated_has_no_cuts(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])]
    assert single_tensor_cuts(prepare(tiny(tmp_path / "skip.onnx", nodes), {"x": (1, 4)}).graph) == []


def test_codecs_are_named_and_counted() -> None:
    crossing = (("t", "FP32", (1, 8, 4, 4)),)
    assert wire_bytes(RAW, crossing) == 512
    assert wire_bytes(INT8, crossing) == 128
    with pytest.raises(Unsupported) as raised:
        check_codec("zip")
    assert raised.value.field == "codec"


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (-1e-20, 1e-20), (5.0, 5.0), (-3.0, -1.0), (-1e30, 1e30)])
def test_degenerate_ranges_still_make_a_scale(low: float, high: float) -> None:
    affine = affine_for([low], [high])
    assert affine.scales[0] > 0
    assert 0 <= affine.zeros[0] <= 255


def test_a_range_that_is_not_finite_is_refused() -> None:
    with pytest.raises(EngineError):
        affine_for([0.0], [float("inf")])
