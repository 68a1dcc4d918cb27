"""The onnxruntime adapter: element types, free sizes, errors of the graph, session options."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from engines.onnx import OnnxRuntime, session_options
from engines.stop import Stop, Stopped
from protocol.errors import BadRequest, EngineError
from protocol.oip_data import pack_bytes
from protocol.tensors import Tensor

ELEMENT_TYPES = [
    ("BOOL", TensorProto.BOOL, bytes([0, 1, 1, 0])),
    ("UINT8", TensorProto.UINT8, bytes([0, 1, 254, 255])),
    ("UINT16", TensorProto.UINT16, struct.pack("<4H", 0, 1, 2, 65535)),
    ("UINT32", TensorProto.UINT32, struct.pack("<4I", 0, 1, 2, 2**32 - 1)),
    ("UINT64", TensorProto.UINT64, struct.pack("<4Q", 0, 1, 2, 2**64 - 1)),
    ("INT8", TensorProto.INT8, struct.pack("<4b", -128, -1, 0, 127)),
    ("INT16", TensorProto.INT16, struct.pack("<4h", -(2**15), -1, 0, 2**15 - 1)),
    ("INT32", TensorProto.INT32, struct.pack("<4i", -(2**31), -1, 0, 2**31 - 1)),
    ("INT64", TensorProto.INT64, struct.pack("<4q", -(2**63), -1, 0, 2**63 - 1)),
    ("FP16", TensorProto.FLOAT16, struct.pack("<4e", -1.5, 0, 1, 65504)),
    ("FP32", TensorProto.FLOAT, struct.pack("<4f", -1.5, 0, 1, 1e30)),
    ("FP64", TensorProto.DOUBLE, struct.pack("<4d", -1.5, 0, 1, 1e300)),
    ("BYTES", TensorProto.STRING, pack_bytes([b"", b"a", "é".encode(), b"longer text"])),
]


def write(file: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **graph: Any) -> Path:
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, **graph), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 9
    onnx.save(model, str(file))
    return file


def identity(file: Path, kind: int) -> Path:
    value = helper.make_tensor_value_info
    return write(
        file, [helper.make_node("Identity", ["x"], ["y"])], [value("x", kind, ["n"])], [value("y", kind, ["n"])]
    )


@pytest.mark.parametrize(("datatype", "kind", "data"), ELEMENT_TYPES)
def test_every_element_type_passes_unchanged(tmp_path: Path, datatype: str, kind: int, data: bytes) -> None:
    model = OnnxRuntime().load(identity(tmp_path / "m.onnx", kind), 1)
    assert (model.inputs[0].datatype, model.inputs[0].shape) == (datatype, (None,))
    (y,) = model.run([Tensor("x", datatype, (4,), data)])
    assert (y.datatype, y.shape, bytes(y.data)) == (datatype, (4,), data)
    model.close()


def test_empty_and_scalar_tensors_pass(tmp_path: Path) -> None:
    model = OnnxRuntime().load(identity(tmp_path / "m.onnx", TensorProto.FLOAT), 1)
    (y,) = model.run([Tensor("x", "FP32", (0,), b"")])
    assert (y.shape, bytes(y.data)) == ((0,), b"")
    value = helper.make_tensor_value_info
    node = helper.make_node("Identity", ["x"], ["y"])
    one = TensorProto.FLOAT
    file = write(tmp_path / "s.onnx", [node], [value("x", one, [])], [value("y", one, [])])
    (y,) = OnnxRuntime().load(file, 1).run([Tensor("x", "FP32", (), bytes(4))])
    assert y.shape == ()


def test_a_bool_byte_that_is_no_bool_is_a_bad_request(tmp_path: Path) -> None:
    model = OnnxRuntime().load(identity(tmp_path / "m.onnx", TensorProto.BOOL), 1)
    with pytest.raises(BadRequest, match="0 or 1"):
        model.run([Tensor("x", "BOOL", (2,), bytes([0, 7]))])


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\1\0\0\0", b"\0\0\0\0\0", b"\0\0"])
def test_string_lengths_that_do_not_add_up_are_a_bad_request(tmp_path: Path, data: bytes) -> None:
    model = OnnxRuntime().load(identity(tmp_path / "m.onnx", TensorProto.STRING), 1)
    with pytest.raises(BadRequest):
        model.run([Tensor("x", "BYTES", (1,), data)])


def test_free_sizes_that_clash_inside_the_graph_are_a_bad_request(tmp_path: Path) -> None:
    value, one = helper.make_tensor_value_info, TensorProto.FLOAT
    file = write(
        tmp_path / "add.onnx",
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [value("a", one, ["n"]), value("b", one, ["m"])],
        [value("y", one, ["k"])],
    )
    model = OnnxRuntime().load(file, 1)
    with pytest.raises(BadRequest, match="does not take these inputs"):
        model.run([Tensor("a", "FP32", (2,), bytes(8)), Tensor("b", "FP32", (3,), bytes(12))])
    assert model.run([Tensor("b", "FP32", (3,), bytes(12)), Tensor("a", "FP32", (3,), bytes(12))])[0].shape == (3,)


def test_a_sequence_at_the_border_is_an_engine_error_at_load(tmp_path: Path) -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [None])
    sequence = helper.make_value_info("y", helper.make_sequence_type_proto(tensor))
    file = write(
        tmp_path / "seq.onnx",
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [sequence],
    )
    with pytest.raises(EngineError, match="no request can carry"):
        OnnxRuntime().load(file, 1)


def test_an_operator_of_another_world_is_an_engine_error(tmp_path: Path) -> None:
    value, one = helper.make_tensor_value_info, TensorProto.FLOAT
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.example")
    graph = helper.make_graph([node], "g", [value("x", one, [1])], [value("y", one, [1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("com.example", 1)])
    model.ir_version = 9
    onnx.save(model, str(tmp_path / "odd.onnx"))
    with pytest.raises(EngineError, match=r"odd\.onnx"):
        OnnxRuntime().load(tmp_path / "odd.onnx", 1)


def test_idle_sessions_neither_spin_nor_hoard() -> None:
    options = session_options(3)
    assert options.intra_op_num_threads == 3
    assert not options.enable_cpu_mem_arena
    for pool in ("intra_op", "inter_op"):
        assert options.get_session_config_entry(f"session.{pool}.allow_spinning") == "0"


def test_digest_is_of_the_file(tmp_path: Path) -> None:
    file = identity(tmp_path / "m.onnx", TensorProto.FLOAT)
    assert OnnxRuntime().load(file, 1).digest == hashlib.sha256(file.read_bytes()).hexdigest()


def test_one_session_serves_several_threads_at_once(model_file: Callable[[str], Path]) -> None:
    model = OnnxRuntime().load(model_file("ppocr-v2-cls"), 1)
    inputs = [Tensor("x", "FP32", (n, 3, 48, 192), bytes(4 * n * 3 * 48 * 192)) for n in (1, 2, 3)]
    expected = [bytes(model.run([x])[0].data) for x in inputs]
    wrong: list[int] = []

    def work(at: int) -> None:
        for _ in range(10):
            if bytes(model.run([inputs[at]])[0].data) != expected[at]:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    model.close()


def test_closing_while_another_thread_runs_is_safe(model_file: Callable[[str], Path]) -> None:
    model = OnnxRuntime().load(model_file("ppocr-v4-det"), 1)
    x = Tensor("x", "FP32", (1, 3, 160, 160), bytes(4 * 3 * 160 * 160))
    answers: list[int] = []
    started = threading.Event()

    def work() -> None:
        started.set()
        with contextlib.suppress(EngineError):
            answers.append(len(model.run([x])))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(5)
    model.close()
    thread.join(10)
    assert answers in ([1], [])  # it ran whole, or came after the close and was refused


def test_a_run_that_is_stopped_ends_long_before_it_would_have(model_file: Callable[[str], Path]) -> None:
    """The largest input that a test can afford; the stop comes when the run has begun."""
    model = OnnxRuntime().load(model_file("ppocr-v4-det"), 1)
    x = Tensor("x", "FP32", (1, 3, 960, 960), bytes(4 * 3 * 960 * 960))
    began_s = time.monotonic()
    model.run([x])
    whole_s = time.monotonic() - began_s
    stop = Stop()
    threading.Timer(0.1 * whole_s, stop.ask).start()
    began_s = time.monotonic()
    with pytest.raises(Stopped):
        model.run_until([x], stop)
    assert time.monotonic() - began_s < 0.8 * whole_s
    model.close()
