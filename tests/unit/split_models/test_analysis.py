"""Analysing models that users bring: shapes, bytes, predicted and measured seconds, and reasons in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from engines.port import TensorModel
from protocol.errors import ConfigError
from protocol.tensors import Tensor
from split_models.analyse_file import Asked, analyse_file
from split_models.analysis import Conditions, Sides, analyse, work_of
from split_models.cuts import all_cuts
from split_models.input_shapes import InputPort, parse_shapes, read_sample, resolve
from split_models.measure import Timed, time_model
from split_models.measured_cuts import ANCHORS
from tests.unit.split_models.graphs import graph_from
from tests.unit.split_models.onnx_graphs import FLOAT, INT64, loop_model, node, save, side_file_model, value, weight

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def free_model(file: Path) -> Path:
    """Token ids of a free batch and length through an embedding; the mask shares both dimensions."""
    nodes = [
        node("Gather", ["table", "ids"], ["a"]),
        node("Unsqueeze", ["mask", "last"], ["m"]),
        node("Mul", ["a", "m"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("ReduceMean", ["c"], ["y"], axes=[1], keepdims=0),
    ]
    weights = [weight("table", FLOAT, [9, 4], range(36)), weight("last", INT64, [1], [-1])]
    inputs = [value("ids", ["batch", "length"], INT64), value("mask", ["batch", "length"])]
    return save(file, nodes, inputs, [value("y", ["batch", 4])], weights)


def test_a_real_model_is_listed_best_first_with_bytes_and_both_kinds_of_seconds(
    model_file: Callable[[str], Path],
) -> None:
    found = analyse_file(model_file("ppocr-v2-cls"), "onnx", Asked(shapes={"x": (1, 3, 48, 192)}))
    assert found.single_cuts >= 40
    assert [row.total_s for row in found.cuts] == sorted(row.total_s for row in found.cuts)
    measured = [row for row in found.cuts if row.measured is not None]
    assert len(measured) == ANCHORS
    assert found.measured and found.whole_s > 0
    for row in found.cuts:
        assert row.raw_bytes == sum(tensor.size_bytes for tensor in row.cut.crossing)
        assert row.wire_bytes * 4 == row.raw_bytes
        assert row.predicted.head_s >= 0
        assert row.predicted.tail_s >= 0
    assert not found.why_none


def test_what_was_not_measured_lies_between_what_was(model_file: Callable[[str], Path]) -> None:
    """Whatever the bench gives, here a counter: no prediction leaves the range of the measurements and 0."""
    turns = iter(range(1, 100))

    def by_turn(model: TensorModel, inputs: Sequence[Tensor]) -> Timed:
        return Timed(next(turns) / 1e3, 0.0)

    found = analyse_file(model_file("ppocr-v2-cls"), "onnx", Asked(shapes={"x": (1, 3, 48, 192)}), measure=by_turn)
    for row in found.cuts:
        sides = row.measured or row.predicted
        assert 0 <= sides.head_s <= 0.1
    assert found.whole_s == 0.001


def test_a_prediction_never_knows_its_own_measurement() -> None:
    graph = graph_from([[-1], [0], [1], [2]])
    cuts = all_cuts(graph)
    honest = {cut.id: Sides(0.1 * (cut.after + 1), 0.4 - 0.1 * (cut.after + 1)) for cut in cuts}
    found = analyse("m", "onnx", graph, Conditions(), whole_s=0.4, measured=honest)
    lied = honest | {"001": Sides(9.0, 9.0)}
    again = analyse("m", "onnx", graph, Conditions(), whole_s=0.4, measured=lied)
    before = {row.cut.id: row.predicted for row in found.cuts}
    after = {row.cut.id: row.predicted for row in again.cuts}
    assert after["001"] == before["001"]
    assert before["001"].head_s == pytest.approx(0.2, rel=0.05)
    assert after["000"] != before["000"], "its neighbours do use it"


def test_work_rises_to_the_whole() -> None:
    work = work_of(graph_from([[-1], [0], [0, 1]]))
    assert list(work) == sorted(work)
    assert work[0] == 0 < work[-1]


def test_a_dense_graph_of_hundreds_of_operators(tmp_path: Path) -> None:
    """DenseNet-121 as the onnx package ships it: weights are ConstantOfShape nodes, skips everywhere."""
    found = analyse_file(LIGHT / "light_densenet121.onnx", "onnx", Asked(measure=False))
    assert found.single_cuts >= 40
    assert not any(
        "__SHAPE" in tensor.name or "_w_0" in tensor.name for row in found.cuts for tensor in row.cut.crossing
    )
    assert not found.measured


def test_free_dimensions_are_guessed_and_said(tmp_path: Path) -> None:
    found = analyse_file(free_model(tmp_path / "free.onnx"), "onnx", Asked(measure=False))
    assert [tensor.shape for tensor in found.inputs] == [(1, 128), (1, 128)]
    assert any("batch" in note and "taken as 1x128" in note for note in found.notes)


def test_shapes_that_were_asked_for_beat_samples_and_bind_names(tmp_path: Path) -> None:
    file = free_model(tmp_path / "free.onnx")
    sample = tmp_path / "s.npz"
    np.savez(sample, mask=np.ones((2, 7), dtype=np.float32))
    found = analyse_file(file, "onnx", Asked(sample=sample, measure=False))
    assert [tensor.shape for tensor in found.inputs] == [(2, 7), (2, 7)], "the other input shares both dimensions"
    with pytest.raises(ConfigError, match="cannot be both"):
        analyse_file(file, "onnx", Asked(shapes={"ids": (1, 5)}, sample=sample, measure=False))
    asked = analyse_file(file, "onnx", Asked(shapes={"ids": (1, 5)}, measure=False))
    assert not asked.notes
    assert asked.outputs[0].shape == (1, 4)


def test_a_whole_sample_is_what_is_measured(tmp_path: Path) -> None:
    """Token 8 of 9 is in the table, others would be too; what arrives is the sample."""
    file = free_model(tmp_path / "free.onnx")
    np.savez(tmp_path / "s.npz", mask=np.ones((1, 3), dtype=np.float32), ids=np.full((1, 3), 8, dtype=np.int64))
    seen: list[Sequence[Tensor]] = []

    def watch(model: TensorModel, inputs: Sequence[Tensor]) -> Timed:
        seen.append(inputs)
        return time_model(model, inputs)

    found = analyse_file(file, "onnx", Asked(sample=tmp_path / "s.npz"), measure=watch)
    assert found.measured
    ids = next(tensor for tensor in seen[0] if tensor.name == "ids")
    assert set(np.frombuffer(ids.data, np.int64)) == {8}


@pytest.mark.parametrize("text", ["x", "x=", "x=1xa", "=1x2", "x=1x0", "x=-1x2", "x=1.5"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_shapes([text])
    assert raised.value.field == "input_shape"


def test_shapes_in_words() -> None:
    assert parse_shapes(["a=1x3x224X224", "b:0=7"]) == {"a": (1, 3, 224, 224), "b:0": (7,)}
    with pytest.raises(ConfigError, match="twice"):
        parse_shapes(["a=1", "a=2"])


def test_defaults_fit_pictures_and_tokens() -> None:
    ports = [
        InputPort("nchw", "FP32", (None, 3, None, None)),
        InputPort("nhwc", "UINT8", ("N", "H", "W", 3)),
        InputPort("ids", "INT64", ("batch", "seq")),
        InputPort("odd", "FP32", ("?", "?", 40)),
        InputPort("fixed", "FP32", (1, 7)),
        InputPort("scalar", "FP32", ()),
    ]
    found = resolve(ports, {})
    assert dict(found.shapes) == {
        "nchw": (1, 3, 224, 224), "nhwc": (1, 224, 224, 3), "ids": (1, 128), "odd": (1, 64, 40), "fixed": (1, 7),
        "scalar": (),
    }  # fmt: skip
    assert len(found.notes) == 4


def test_an_input_of_gigabytes_is_a_slip() -> None:
    with pytest.raises(ConfigError, match="would hold"):
        resolve([InputPort("x", "FP32", (None, None))], {"x": (1 << 20, 1 << 20)})


def test_samples_that_do_not_fit(tmp_path: Path) -> None:
    port = InputPort("x", "FP32", (None, 4))
    (tmp_path / "no.npz").write_bytes(b"PK nothing")
    for file, words in ((tmp_path / "no.npz", "no .npy"), (tmp_path / "absent.npy", "no .npy")):
        with pytest.raises(ConfigError, match=words):
            read_sample(file, [port])
    np.save(tmp_path / "f.npy", np.zeros((1, 4), dtype=np.float64))
    with pytest.raises(ConfigError, match="FP64"):
        read_sample(tmp_path / "f.npy", [port])
    with pytest.raises(ConfigError, match="one array"):
        read_sample(tmp_path / "f.npy", [port, port])
    np.savez(tmp_path / "u.npz", other=np.zeros((1, 4), dtype=np.float32))
    with pytest.raises(ConfigError, match="no input 'other'"):
        read_sample(tmp_path / "u.npz", [port])
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="plain arrays"):
        read_sample(tmp_path / "objects.npy", [port])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda f: save(f, [node("Relu", ["x"], ["y"])], [value("x", [1, 4])], [value("y", [1, 4])]),
            "single operator",
        ),
        (
            lambda f: save(
                f,
                [node("Relu", ["x"], ["a"]), node("Add", ["a", "x"], ["y"])],
                [value("x", [1, 4])],
                [value("y", [1, 4])],
            ),
            "",
        ),
        (
            lambda f: save(
                f, [node("Own", ["x"], ["y"], domain="acme")], [value("x", [1])], [value("y", [1])], domains={"acme": 1}
            ),
            "domain 'acme'",
        ),
    ],
)
def test_why_a_model_has_no_cuts_is_said(make: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    found = analyse_file(make(tmp_path / "m.onnx"), "onnx", Asked(measure=False))
    if words:
        assert words in found.why_none
        assert not found.cuts
    else:
        assert [row.cut.id for row in found.cuts] == ["m000"], "the input is sent again, and that is said"
        assert found.cuts[0].sends_input


def test_a_file_that_is_no_model_is_an_answer_too(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"nothing of the kind")
    found = analyse_file(tmp_path / "x.onnx")
    assert "not an ONNX model" in found.why_none


def test_a_model_whose_weights_stay_in_their_side_file_is_measured_too(tmp_path: Path) -> None:
    """They are not read into the parts, and nothing stays beside the model."""
    file, _ = side_file_model(tmp_path)
    before = sorted(one.name for one in tmp_path.iterdir())
    found = analyse_file(file, "onnx", Asked(inline_bytes=0))
    assert any("side file" in note for note in found.notes)
    assert found.measured
    assert any(row.measured is not None for row in found.cuts)
    assert sorted(one.name for one in tmp_path.iterdir()) == before


def test_a_body_is_analysed_and_measured(tmp_path: Path) -> None:
    found = analyse_file(loop_model(tmp_path / "loop.onnx"))
    assert found.measured
    assert len(found.cuts) >= 3


def test_a_model_that_fails_at_run_time_keeps_its_predictions(tmp_path: Path) -> None:
    """A sample with a token outside the table: the message says so, the list stays."""
    file = free_model(tmp_path / "free.onnx")
    np.savez(tmp_path / "s.npz", mask=np.ones((1, 3), dtype=np.float32), ids=np.full((1, 3), 99, dtype=np.int64))
    found = analyse_file(file, "onnx", Asked(sample=tmp_path / "s.npz"))
    assert not found.measured
    assert found.cuts
    assert any("could not be measured" in note for note in found.notes)
