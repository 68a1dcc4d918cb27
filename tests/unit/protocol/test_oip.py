"""Open Inference Protocol: round trips, the stock client's bytes, bad bodies, bounds."""

from __future__ import annotations

import gzip
import importlib
import json
import struct
import zlib
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import oip
from protocol.errors import (
    BadRequest,
    EngineError,
    Full,
    MidstreamError,
    NotFound,
    ProtocolError,
    TooLarge,
    Unsupported,
)
from protocol.oip import (
    HEADER_LENGTH,
    MAX_TENSORS,
    InferRequest,
    InferResponse,
    ModelMetadata,
    bytes_elements,
    bytes_tensor,
    decode_metadata,
    decode_request,
    decode_response,
    encode_metadata,
    encode_request,
    encode_response,
    inflate,
)
from protocol.tensors import DATATYPE_BYTES, Tensor, TensorSpec

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@st.composite
def tensors(draw: st.DrawFn, datatypes: tuple[str, ...] = (*DATATYPE_BYTES, "BYTES")) -> Tensor:
    name, datatype, shape = draw(names), draw(st.sampled_from(datatypes)), draw(shapes)
    if datatype == "BYTES":
        return bytes_tensor(name, [draw(st.binary(max_size=6)) for _ in range(prod(shape))], shape)
    size = prod(shape) * DATATYPE_BYTES[datatype]
    return Tensor(name, datatype, shape, draw(st.binary(min_size=size, max_size=size)))


tensor_lists = st.lists(tensors(), min_size=1, max_size=4, unique_by=lambda t: t.name).map(tuple)


@settings(max_examples=100)
@given(tensor_lists, st.none() | st.lists(names, min_size=1, max_size=3, unique=True).map(tuple), st.booleans())
def test_binary_requests_come_back(inputs: tuple[Tensor, ...], outputs: tuple[str, ...] | None, binary: bool) -> None:
    wanted: frozenset[str] | bool = binary if outputs is None else frozenset(outputs if binary else ())
    request = InferRequest("m", inputs, id="r1", outputs=outputs, binary=wanted, parameters={"priority": 1})
    headers, body = encode_request(request)
    assert decode_request("m", headers, body) == request


@settings(max_examples=100)
@given(tensor_lists, st.data())
def test_responses_come_back(outputs: tuple[Tensor, ...], data: st.DataObject) -> None:
    binary = frozenset(t.name for t in outputs if not _has_json_form(t) or data.draw(st.booleans()))
    response = InferResponse("m", outputs, "1", "r1", {"digest": "abc"})
    found = decode_response(*encode_response(response, binary))
    assert (found.model_name, found.model_version, found.id, found.parameters) == ("m", "1", "r1", {"digest": "abc"})
    for got, want in zip(found.outputs, outputs, strict=True):
        assert (got.name, got.datatype, got.shape) == (want.name, want.datatype, want.shape)
        if want.datatype == "BOOL" and want.name not in binary:
            assert [b != 0 for b in bytes(got.data)] == [b != 0 for b in bytes(want.data)]
        else:
            assert bytes(got.data) == bytes(want.data)


def _has_json_form(tensor: Tensor) -> bool:
    if tensor.datatype in ("FP16", "BYTES"):
        return False
    if tensor.datatype in ("FP32", "FP64"):
        code = "f" if tensor.datatype == "FP32" else "d"
        numbers = struct.unpack(f"<{prod(tensor.shape)}{code}", bytes(tensor.data))
        return all(number - number == 0 for number in numbers)
    return True


def body_of(**entry: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2], **entry}]}).encode()


@pytest.mark.parametrize(
    ("datatype", "values", "packed"),
    [
        ("BOOL", [True, False], b"\1\0"),
        ("BOOL", [1, 0], b"\1\0"),
        ("UINT8", [0, 255], b"\0\xff"),
        ("INT8", [-128, 127], b"\x80\x7f"),
        ("UINT16", [1, 65535], b"\1\0\xff\xff"),
        ("INT32", [-1, 1], b"\xff\xff\xff\xff\1\0\0\0"),
        ("UINT64", [2**64 - 1, 0], b"\xff" * 8 + bytes(8)),
        ("INT64", [-(2**63), 0], b"\0" * 7 + b"\x80" + bytes(8)),
        ("FP32", [1.5, -2], struct.pack("<2f", 1.5, -2)),
        ("FP64", [[1.5], [2]], struct.pack("<2d", 1.5, 2)),
        ("BYTES", ["ä", ""], b"\2\0\0\0\xc3\xa4\0\0\0\0"),
    ],
)
def test_json_data_of_each_datatype(datatype: str, values: list[Any], packed: bytes) -> None:
    request = decode_request("m", {}, body_of(datatype=datatype, data=values))
    assert bytes(request.inputs[0].data) == packed


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"datatype": "FP16"}, "inputs[0].data"),
        ({"datatype": "BF16"}, "inputs[0].datatype"),
        ({"datatype": "UINT8", "data": [0, 256]}, "inputs[0].data"),
        ({"datatype": "UINT8", "data": [-1, 0]}, "inputs[0].data"),
        ({"datatype": "INT64", "data": [2**63, 0]}, "inputs[0].data"),
        ({"datatype": "INT32", "data": [1.5, 0]}, "inputs[0].data"),
        ({"datatype": "BOOL", "data": [2, 0]}, "inputs[0].data"),
        ({"datatype": "BYTES", "data": [1, 2]}, "inputs[0].data"),
        ({"datatype": "BYTES", "data": ["\ud800", ""]}, "inputs[0].data"),
        ({"data": ["a", "b"]}, "inputs[0].data"),
        ({"data": [[1], 2]}, "inputs[0].data"),
        ({"data": [1]}, "inputs[0].data"),
        ({"data": 1}, "inputs[0].data"),
        ({"shape": [-1]}, "inputs[0].shape"),
        ({"shape": [2.0]}, "inputs[0].shape"),
        ({"shape": [True, 2]}, "inputs[0].shape"),
        ({"shape": [1] * 17}, "inputs[0].shape"),
        ({"shape": [2**31]}, "inputs[0].shape"),
        ({"shape": "2"}, "inputs[0].shape"),
        ({"name": 1}, "inputs[0].name"),
        ({"name": "x" * 513}, "inputs[0].name"),
        ({"parameters": []}, "inputs[0].parameters"),
        ({"parameters": {"binary_data_size": 8}}, "inputs[0].parameters.binary_data_size"),
    ],
)
def test_bad_inputs_are_refused_and_named(change: dict[str, Any], where: str) -> None:
    with pytest.raises((BadRequest, ProtocolError)) as caught:
        decode_request("m", {}, body_of(**change))
    assert caught.value.field == where
    assert caught.value.http_status == 400


def test_the_highest_rank_is_taken() -> None:
    assert decode_request("m", {}, body_of(shape=[1] * 15 + [2])).inputs[0].shape[-1] == 2


def test_data_nested_too_deeply_is_refused() -> None:
    data: Any = [1.0, 2.0]
    for _ in range(15):
        data = [data]
    decode_request("m", {}, body_of(data=data))
    for _ in range(3):
        data = [data]
    with pytest.raises(BadRequest):
        decode_request("m", {}, body_of(data=data))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"inputs":[]}', b'{"inputs":{}}', b'{"inputs":[1]}', b"\xff", b"{"]
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises((BadRequest, ProtocolError)):
        decode_request("m", {}, body)


def test_as_many_inputs_as_allowed_and_one_more() -> None:
    def body(count: int) -> bytes:
        entry = {"shape": [0], "datatype": "FP32", "data": []}
        return json.dumps({"inputs": [{"name": str(n), **entry} for n in range(count)]}).encode()

    assert len(decode_request("m", {}, body(MAX_TENSORS)).inputs) == MAX_TENSORS
    with pytest.raises(TooLarge):
        decode_request("m", {}, body(MAX_TENSORS + 1))


def test_two_inputs_of_one_name_are_refused() -> None:
    entry = {"name": "x", "shape": [0], "datatype": "FP32", "data": []}
    with pytest.raises(BadRequest):
        decode_request("m", {}, json.dumps({"inputs": [entry, entry]}).encode())


def test_shared_memory_and_classification_are_not_supported() -> None:
    with pytest.raises(Unsupported):
        decode_request("m", {}, body_of(parameters={"shared_memory_region": "r"}))
    asked = json.loads(body_of())
    asked["outputs"] = [{"name": "y", "parameters": {"classification": 3}}]
    with pytest.raises(Unsupported):
        decode_request("m", {}, json.dumps(asked).encode())


def test_an_output_overrides_the_request_for_binary() -> None:
    asked = json.loads(body_of())
    asked["parameters"] = {"binary_data_output": True}
    asked["outputs"] = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}]
    assert decode_request("m", {}, json.dumps(asked).encode()).binary == frozenset({"a"})


@pytest.mark.parametrize("length", ["-1", "x", "", "1e3", "9" * 19, "5000", "٣"])
def test_a_bad_header_length_is_refused(length: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_request("m", {HEADER_LENGTH: length}, body_of())
    assert caught.value.field == HEADER_LENGTH


def test_binary_data_that_is_short_long_or_left_over() -> None:
    headers, body = encode_request(InferRequest("m", (Tensor("x", "FP32", (2,), bytes(8)),)))
    for wrong in (body[:-1], body + b"\0"):
        with pytest.raises((BadRequest, ProtocolError)):
            decode_request("m", headers, wrong)
    claimed = body.replace(b'"binary_data_size":8', b'"binary_data_size":4') + bytes(0)
    with pytest.raises((BadRequest, ProtocolError)):
        decode_request("m", headers, claimed[:-4])


@pytest.mark.parametrize("data", [b"\1\0\0", b"\5\0\0\0abcd", b"\xff\xff\xff\xff", b"\0\0\0\0\0\0\0\0"])
def test_bytes_elements_that_do_not_add_up(data: bytes) -> None:
    with pytest.raises(BadRequest):
        bytes_elements(Tensor("x", "BYTES", (1,), data))


@pytest.mark.parametrize(
    ("spec", "raw", "shape"),
    [
        (TensorSpec("x", "FP32", (1, 2)), bytes(8), (1, 2)),
        (TensorSpec("x", "FP32", (None, 2)), bytes(24), (3, 2)),
        (TensorSpec("image", "BYTES", (1,)), b"jpeg", (1,)),
    ],
)
def test_the_raw_shortcut(spec: TensorSpec, raw: bytes, shape: tuple[int, ...]) -> None:
    request = decode_request("m", {HEADER_LENGTH: "0"}, raw, specs=[spec])
    assert request.inputs[0].shape == shape
    assert request.binary is True
    if spec.datatype == "BYTES":
        assert bytes_elements(request.inputs[0]) == [raw]


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [TensorSpec("x", "FP32", (2,)), TensorSpec("y", "FP32", (2,))],
        [TensorSpec("x", "FP32", (3,))],
        [TensorSpec("x", "FP32", (None, None))],
        [TensorSpec("x", "FP32", (0, None))],
    ],
)
def test_the_raw_shortcut_that_does_not_fit(specs: list[TensorSpec]) -> None:
    with pytest.raises(BadRequest):
        decode_request("m", {HEADER_LENGTH: "0"}, bytes(8), specs=specs)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies(encoding: str, pack: Any) -> None:
    headers, body = encode_request(InferRequest("m", (Tensor("x", "FP32", (2,), bytes(8)),)))
    found = decode_request("m", {**headers, "content-encoding": encoding}, pack(body))
    assert found.inputs[0].shape == (2,)
    already = decode_request("m", {**headers, "content-encoding": encoding}, body)  # the HTTP server inflated it
    assert already == found


def test_a_body_may_inflate_to_the_bound_and_no_further() -> None:
    assert len(inflate({"content-encoding": "gzip"}, gzip.compress(bytes(1000)), 1000)) == 1000
    with pytest.raises(TooLarge):
        inflate({"content-encoding": "gzip"}, gzip.compress(bytes(1001)), 1000)
    with pytest.raises(TooLarge):
        inflate({}, bytes(1001), 1000)
    assert len(inflate({}, bytes(1000), 1000)) == 1000


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"\x1f\x8bgarbage"),
        ("gzip", gzip.compress(b"x" * 99, mtime=0)[:-4]),
        ("deflate", zlib.compress(b"x") + b"more"),
    ],
)
def test_broken_compression_is_refused(encoding: str, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        inflate({"content-encoding": encoding}, body, 1000)
    with pytest.raises(Unsupported):
        inflate({"content-encoding": "br"}, body, 1000)


def test_what_json_cannot_say_asks_for_binary() -> None:
    for tensor, family in (
        (Tensor("y", "FP16", (1,), bytes(2)), BadRequest),
        (Tensor("y", "FP32", (1,), struct.pack("<f", float("nan"))), EngineError),
        (bytes_tensor("y", [b"\xff"]), BadRequest),
    ):
        with pytest.raises(family, match="binary"):
            encode_response(InferResponse("m", (tensor,)), False)
        assert encode_response(InferResponse("m", (tensor,)), True)[1]


@settings(max_examples=200)
@given(st.binary(max_size=100), st.none() | st.integers(0, 100))
def test_any_bytes_give_a_request_or_an_error_of_ours(body: bytes, length: int | None) -> None:
    headers = {} if length is None else {HEADER_LENGTH: str(length)}
    for decoder in (lambda: decode_request("m", headers, body), lambda: decode_response(headers, body)):
        try:
            decoder()
        except MidstreamError as err:
            assert err.http_status in (400, 413)


def test_an_id_with_half_a_surrogate_pair_is_echoed() -> None:
    asked = json.loads(body_of())
    asked["id"] = "\ud800"
    request = decode_request("m", {}, json.dumps(asked).encode())
    _, body = encode_response(InferResponse("m", request.inputs, id=request.id), False)
    assert json.loads(body.decode("utf-8"))["id"] == "\ud800"


def test_a_bad_answer_is_the_peers_fault() -> None:
    body = json.dumps({"outputs": [{"name": "y", "shape": [2], "datatype": "FP32", "data": [1]}]}).encode()
    with pytest.raises(ProtocolError):
        decode_response({}, body)


def test_metadata_comes_back_with_free_dimensions() -> None:
    metadata = ModelMetadata(
        "m", (TensorSpec("x", "FP32", (None, 3)),), (TensorSpec("y", "INT64", ()),), "onnx_onnxv1", ("1",)
    )
    document = json.loads(encode_metadata(metadata))
    assert document["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert decode_metadata(encode_metadata(metadata)) == metadata


def test_extensions_of_servers_that_list_some_none_or_garbage() -> None:
    assert oip.server_extensions(oip.server_metadata("1", ["binary_tensor_data", "zstd"])) == {
        "binary_tensor_data",
        "zstd",
    }
    assert oip.server_extensions(b'{"name":"ovms"}') == frozenset()
    assert oip.server_extensions(b'{"extensions":"all"}') == frozenset()


def test_refusals_carry_status_field_and_retry() -> None:
    status, headers, body = oip.error_body(NotFound("no model 'z'"))
    assert (status, json.loads(body)) == (404, {"error": "no model 'z'"})
    assert oip.error_text(body) == "no model 'z'"
    status, headers, body = oip.error_body(Full("busy", retry_after_s=2.4))
    assert (status, headers["retry-after"]) == (503, "2")
    assert json.loads(oip.error_body(BadRequest("wrong", field="x.shape"))[2])["error"].startswith("x.shape: ")
    assert oip.error_text(b"<html>502</html>") == "<html>502</html>"
    assert oip.error_text(b'{"error":{"message":"x"}}') == ""


class TestStockClient:
    """The unmodified tritonclient builds requests that we read and reads answers that we build."""

    def test_fp16_and_bytes_in_binary(self) -> None:
        numpy = importlib.import_module("numpy")
        triton = importlib.import_module("tritonclient.http")
        half = triton.InferInput("x", [2, 3], "FP16")
        half.set_data_from_numpy(numpy.arange(6, dtype=numpy.float16).reshape(2, 3))
        image = triton.InferInput("image", [1], "BYTES")
        image.set_data_from_numpy(numpy.array([b"\xff\xd8jpeg"], dtype=numpy.object_))
        body, length = triton.InferenceServerClient.generate_request_body([half, image], request_id="7")
        request = decode_request("m", {HEADER_LENGTH: str(length)}, body)
        assert request.id == "7"
        assert request.binary is True  # it sends binary_data_output when no outputs are named
        assert bytes(request.inputs[0].data) == numpy.arange(6, dtype="<f2").tobytes()
        assert bytes_elements(request.inputs[1]) == [b"\xff\xd8jpeg"]

    def test_it_reads_our_answers(self) -> None:
        numpy = importlib.import_module("numpy")
        triton = importlib.import_module("tritonclient.http")
        values = numpy.arange(4, dtype="<f2").reshape(2, 2)
        outputs = (Tensor("y", "FP16", (2, 2), values.tobytes()), bytes_tensor("z", [b"a", b""]))
        headers, body = encode_response(InferResponse("m", outputs, id="7"), True)
        result = triton.InferResult(_Reply(headers, body), verbose=False)
        assert (result.as_numpy("y") == values).all()
        assert list(result.as_numpy("z")) == [b"a", b""]
        assert result.get_response()["id"] == "7"

    def test_json_inputs(self) -> None:
        numpy = importlib.import_module("numpy")
        triton = importlib.import_module("tritonclient.http")
        given_input = triton.InferInput("x", [2, 2], "INT32")
        given_input.set_data_from_numpy(numpy.array([[1, 2], [3, -4]], dtype=numpy.int32), binary_data=False)
        body, length = triton.InferenceServerClient.generate_request_body(
            [given_input], outputs=[triton.InferRequestedOutput("y", binary_data=False)]
        )
        request = decode_request("m", {} if length is None else {HEADER_LENGTH: str(length)}, body)
        assert struct.unpack("<4i", bytes(request.inputs[0].data)) == (1, 2, 3, -4)
        assert (request.outputs, request.binary) == (("y",), frozenset())


class _Reply:
    """What tritonclient's InferResult wants of an HTTP reply."""

    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        self._headers = headers
        self._body = body
        self._at = 0

    def get(self, name: str) -> str | None:
        return self._headers.get(name.lower())

    def read(self, length: int = -1) -> bytes:
        start, self._at = self._at, len(self._body) if length < 0 else self._at + length
        return self._body[start : self._at]


def test_null_in_an_answer_means_nothing_to_say() -> None:
    """KServe's Python server writes null for a version, an id and parameters that it does not have."""
    body = (
        b'{"model_name": "m", "model_version": null, "id": null, "parameters": null, "outputs": '
        b'[{"name": "y", "shape": [1], "datatype": "FP32", "parameters": null, "data": [2.0]}]}'
    )
    found = decode_response({}, body)
    assert (found.model_version, found.id, dict(found.parameters)) == ("", "", {})
    assert struct.unpack("<f", bytes(found.outputs[0].data)) == (2.0,)
