"""One suite over every TensorRuntime and its models: the fake, onnxruntime, LiteRT and a slowed one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import pytest
from attrs import evolve, frozen

from engines.fakes_tensor import MAGIC, FakeTensorRuntime
from engines.onnx import OnnxRuntime
from engines.port import StoppableModel, TensorModel, TensorRuntime
from engines.slowed import SlowedRuntime
from engines.stop import Stop, Stopped
from engines.tflite import TfliteRuntime
from protocol.errors import BadRequest, EngineError
from protocol.tensors import DATATYPE_BYTES, Tensor, TensorSpec, check_against

FREE_SIZES = {"x": (1, 3, 48, 192)}


@frozen
class Case:
    runtime: TensorRuntime
    file: Path


@pytest.fixture(params=["fake", "onnx", "tflite", "slowed"])
def case(request: pytest.FixtureRequest, tmp_path: Path, model_file: Callable[[str], Path]) -> Case:
    if request.param == "onnx":
        return Case(OnnxRuntime(), model_file("ppocr-v2-cls"))
    if request.param == "tflite":
        return Case(TfliteRuntime(), model_file("face-short-range"))
    file = tmp_path / "model.fake"
    file.write_bytes(MAGIC)
    fake = FakeTensorRuntime(delay_s=0.001, stoppable=True)
    return Case(fake if request.param == "fake" else SlowedRuntime(fake, 3.0), file)


@pytest.fixture
def model(case: Case) -> Iterator[TensorModel]:
    found = case.runtime.load(case.file, 1)
    yield found
    found.close()


def tensor_for(spec: TensorSpec) -> Tensor:
    """Bytes 0, 1, 2, ... of small floats in a shape that fits."""
    shape = tuple(2 if size is None else size for size in spec.shape)
    if len(shape) == len(FREE_SIZES["x"]) and None in spec.shape:
        shape = FREE_SIZES["x"]
    assert spec.datatype == "FP32"
    pattern = bytes([0, 0, 0, 63, 0, 0, 128, 62])  # 0.5, 0.25
    size = prod(shape) * DATATYPE_BYTES[spec.datatype]
    return Tensor(spec.name, spec.datatype, shape, (pattern * (size // len(pattern) + 1))[:size])


def inputs_for(model: TensorModel) -> list[Tensor]:
    return [tensor_for(spec) for spec in model.inputs]


def test_names_and_versions_its_runtime(case: Case) -> None:
    assert case.runtime.name
    assert case.runtime.version[0].isdigit()


def test_answers_all_outputs_in_order_as_specified(model: TensorModel) -> None:
    outputs = model.run(inputs_for(model))
    assert [t.name for t in outputs] == [s.name for s in model.outputs]
    for tensor, spec in zip(outputs, model.outputs, strict=True):
        check_against(tensor, spec)


def test_answers_the_same_again_and_keeps_earlier_answers(model: TensorModel) -> None:
    inputs = inputs_for(model)
    first = model.run(inputs)
    kept = [bytes(t.data) for t in first]
    other = [evolve(t, data=bytes(len(t.data))) for t in inputs]
    different = [bytes(t.data) for t in model.run(other)]
    assert [bytes(t.data) for t in first] == kept
    assert different != kept
    assert [bytes(t.data) for t in model.run(inputs)] == kept


def test_takes_memoryviews(model: TensorModel) -> None:
    inputs = inputs_for(model)
    views = [evolve(t, data=memoryview(b"xx" + t.data)[2:]) for t in inputs]
    assert [bytes(t.data) for t in model.run(views)] == [bytes(t.data) for t in model.run(inputs)]


@pytest.mark.parametrize("wrong", ["datatype", "rank", "size", "data", "missing", "unknown", "twice"])
def test_refuses_inputs_that_do_not_fit_and_goes_on(model: TensorModel, wrong: str) -> None:
    inputs = inputs_for(model)
    good = inputs[0]
    fixed = next(at for at, size in enumerate(model.inputs[0].shape) if size is not None)
    bad_shape = tuple(size + 1 if at == fixed else size for at, size in enumerate(good.shape))
    bad: dict[str, list[Tensor]] = {
        "datatype": [evolve(good, datatype="INT32")],
        "rank": [evolve(good, shape=(*good.shape, 1))],
        "size": [evolve(good, shape=bad_shape, data=bytes(4 * prod(bad_shape)))],
        "data": [evolve(good, data=good.data[:-4])],
        "missing": [],
        "unknown": [*inputs, evolve(good, name="no such input")],
        "twice": [good, good],
    }
    with pytest.raises(BadRequest) as refused:
        model.run(bad[wrong])
    assert refused.value.field
    assert model.run(inputs)


def test_closing_is_idempotent_and_final(case: Case) -> None:
    model = case.runtime.load(case.file, 1)
    inputs = inputs_for(model)
    model.close()
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.run(inputs)


@pytest.mark.parametrize("content", [b"", b"\x08\x07garbage", b"\0\0\0\0TFL3" + bytes(100), bytes(4096), b"GGUF" * 100])
def test_a_file_that_is_not_a_model_is_an_engine_error_with_a_next_step(
    case: Case, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "bad.model"
    file.write_bytes(content)
    with pytest.raises(EngineError, match=r"bad\.model"):
        case.runtime.load(file, 1)


def test_a_truncated_model_is_an_engine_error(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "cut.model"
    content = case.file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(EngineError):
        case.runtime.load(file, 1)


def test_an_absent_file_is_an_engine_error(case: Case, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not there"):
        case.runtime.load(tmp_path / "absent.model", 1)


def test_runs_in_any_thread(model: TensorModel) -> None:
    inputs = inputs_for(model)
    here = [bytes(t.data) for t in model.run(inputs)]
    there: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: there.append([bytes(t.data) for t in model.run(inputs)]))
    thread.start()
    thread.join(10)
    assert there == [here]


def test_a_model_whose_runtime_says_so_can_be_stopped_and_runs_again(case: Case, model: TensorModel) -> None:
    assert getattr(case.runtime, "stoppable", False) == isinstance(model, StoppableModel)
    if not isinstance(model, StoppableModel):
        return
    inputs = inputs_for(model)
    answer = [bytes(t.data) for t in model.run(inputs)]
    stop = Stop()
    assert [bytes(t.data) for t in model.run_until(inputs, stop)] == answer
    stop.ask()
    with pytest.raises(Stopped):
        model.run_until(inputs, stop)
    assert [bytes(t.data) for t in model.run(inputs)] == answer
