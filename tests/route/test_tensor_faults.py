"""Faulty tensor requests over real HTTP to a device with a real engine: a status, a text that names the field, and the
next request works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import pytest_asyncio
from attrs import frozen

from engines.arrays import to_array, to_tensor
from links.http import HttpLink
from links.port import Reply
from protocol.models import CatalogueEntry, Source
from protocol.oip import MAX_BODY_BYTES, InferRequest, decode_response, encode_request
from protocol.tensors import Tensor
from tests.tensor_house import Device, device, store_with

DOUBLE = "double"
X = to_tensor("x", np.array([[1, 2, 3, 4]], dtype=np.float32))


def double_model(path: Path) -> Path:
    """y = 2 x in FP32."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    two = helper.make_tensor("two", kind, (), [2.0])
    ports = [helper.make_tensor_value_info(name, kind, [None, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "two"], ["y"])], DOUBLE, [ports[0]], [ports[1]], [two])
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )
    return path


@frozen
class User:
    """Sends whatever a test wants to the front of a device."""

    link: HttpLink
    device: Device

    async def post(self, body: bytes, headers: Mapping[str, str] | None = None, model: str = DOUBLE) -> Reply:
        return await self.link.exchange(f"/v2/models/{model}/infer", headers or {}, body, 20.0)

    async def infer(self, *tensors: Tensor, model: str = DOUBLE) -> Reply:
        headers, body = encode_request(InferRequest(model, tensors, binary=True))
        return await self.post(body, headers, model)

    async def works(self) -> bool:
        """A good request is answered after all this."""
        reply = await self.infer(X)
        return reply.status == 200 and doubled(reply).tolist() == [[2, 4, 6, 8]]


def doubled(reply: Reply) -> np.ndarray:
    return to_array(decode_response(reply.headers, reply.body).outputs[0])


def error(reply: Reply) -> str:
    text: Any = json.loads(reply.body)["error"]
    assert isinstance(text, str)
    return text


@pytest_asyncio.fixture
async def user(tmp_path: Path) -> AsyncIterator[User]:
    file = double_model(tmp_path / "double.onnx")
    data = file.read_bytes()
    entry = CatalogueEntry(DOUBLE, "onnx", "double.onnx", sha256(data).hexdigest(), len(data), Source("file"))
    async with device(store_with(tmp_path / "models", {DOUBLE: file}, {DOUBLE: entry})) as running:
        link = HttpLink("user", f"http://127.0.0.1:{running.server.port}")
        yield User(link, running)
        await link.close()


WRONG = {
    "datatype": (to_tensor("x", np.array([[1, 2, 3, 4]], dtype=np.int64)), "datatype"),
    "other float": (to_tensor("x", np.array([[1, 2, 3, 4]], dtype=np.float64)), "datatype"),
    "last dimension": (to_tensor("x", np.zeros((1, 5), dtype=np.float32)), "shape"),
    "rank": (to_tensor("x", np.zeros((1, 1, 4), dtype=np.float32)), "shape"),
    "name": (to_tensor("z", np.zeros((1, 4), dtype=np.float32)), "it takes x"),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_a_tensor_that_does_not_fit_is_named(user: User, kind: str) -> None:
    tensor, text = WRONG[kind]
    reply = await user.infer(tensor)
    assert reply.status == 400
    assert text in error(reply)
    assert await user.works()


async def test_missing_and_surplus_inputs_are_400(user: User) -> None:
    surplus = await user.infer(X, to_tensor("more", np.zeros(1, dtype=np.float32)))
    assert surplus.status == 400
    assert "more" in error(surplus)
    twice = await user.infer(X, X)
    assert twice.status == 400
    assert await user.works()


async def test_an_unknown_model_names_those_that_are_here(user: User) -> None:
    reply = await user.infer(X, model="nobody")
    assert reply.status == 404
    assert "'nobody'" in error(reply)
    assert DOUBLE in error(reply)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1, 3]},
        {"shape": [2, 4]},
        {"shape": [1 << 40, 4]},
        {"shape": [-1, 4]},
        {"parameters": {"binary_data_size": 12}},
        {"parameters": {"binary_data_size": 20}},
        {"parameters": {"binary_data_size": -16}},
        {"parameters": {"binary_data_size": "16"}},
        {"parameters": {"binary_data_size": 1 << 62}},
        {"data": [1, 2, 3, 4]},
    ],
    ids=str,
)
async def test_binary_sizes_that_disagree_are_400(user: User, change: dict[str, Any]) -> None:
    raw = np.arange(4, dtype="<f4").tobytes()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}} | change
    head = json.dumps({"inputs": [tensor]}).encode()
    reply = await user.post(head + raw, {"inference-header-content-length": str(len(head))})
    assert reply.status == 400, error(reply)
    assert error(reply)
    assert await user.works()


@pytest.mark.parametrize("length", ["-1", "99999999", "x", "1e3", "5"])
async def test_a_header_length_that_lies_is_400(user: User, length: str) -> None:
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
    reply = await user.post(head, {"inference-header-content-length": length})
    assert reply.status == 400
    assert error(reply)
    assert await user.works()


@pytest.mark.parametrize(
    "body", [b"\x00" * 64, b'{"inputs":', b"null", b"[" * 20_000, b'{"inputs":{}}', "é".encode("latin-1")]
)
async def test_bodies_that_are_no_json_request_are_400(user: User, body: bytes) -> None:
    reply = await user.post(body)
    assert reply.status == 400
    assert error(reply)
    assert await user.works()


async def test_a_body_over_the_maximum_is_413_before_it_is_read(user: User) -> None:
    port = user.device.server.port
    lines = [f"POST /v2/models/{DOUBLE}/infer HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    lines += [f"Content-Length: {MAX_BODY_BYTES + 1}", "", ""]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(4096), 5.0)
    finally:
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 413")
    assert str(MAX_BODY_BYTES).encode() in answer
    assert await user.works()


async def test_values_that_are_not_finite_pass_through(user: User) -> None:
    """They are the client's own; the model says what they mean."""
    values = np.array([[np.nan, np.inf, -np.inf, 1.0]], dtype=np.float32)
    reply = await user.infer(to_tensor("x", values))
    assert reply.status == 200
    assert np.array_equal(doubled(reply), values * 2, equal_nan=True)


async def test_every_fault_is_reported_as_one_request(user: User) -> None:
    await user.infer(WRONG["rank"][0])
    await user.infer(X)
    assert [event.status for event in user.device.done()] == ["invalid_value", "ok"]
