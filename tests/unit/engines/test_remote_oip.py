"""What the remote endpoint makes of a server's refusals and oddities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from engines.remote_oip import RETRY_AFTER_S, RemoteEndpoint, error_of, server_seconds
from links.port import FrameStream, Reply
from protocol import zstd
from protocol.errors import (
    BadRequest,
    EngineError,
    Full,
    LinkError,
    LinkTimeout,
    MidstreamError,
    NotAllowed,
    NotFound,
    ProtocolError,
    TooLarge,
)
from protocol.oip import InferResponse, decode_request, encode_response, server_metadata
from protocol.tensors import Tensor


class OneReply:
    """A Link that answers the same to every request and remembers them."""

    name = "one"

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[tuple[str, dict[str, str], bytes]] = []

    async def exchange(self, path: str, headers: object, body: bytes, deadline_s: float, method: str = "POST") -> Reply:
        assert isinstance(headers, dict)
        self.asked.append((path, headers, body))
        return self.reply

    def lines(self, *args: object) -> object:
        raise AssertionError("infer asks once")

    async def open(self, path: str) -> FrameStream:
        raise AssertionError("infer opens no stream")

    async def close(self) -> None:
        return None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest), (401, NotAllowed), (403, NotAllowed), (404, NotFound), (408, LinkTimeout), (413, TooLarge),
        (422, BadRequest), (429, Full), (500, EngineError), (501, EngineError), (502, LinkError), (503, Full),
        (504, LinkTimeout), (302, LinkError),
    ],
)  # fmt: skip
def test_each_status_is_the_error_that_it_means(status: int, kind: type[MidstreamError]) -> None:
    error = error_of(Reply(status, {}, json.dumps({"error": "words of the server"}).encode()), "m")
    assert type(error) is kind
    assert "words of the server" in str(error)


@pytest.mark.parametrize("body", [b"", b"<html>" + bytes(100_000), b"\xff\xfe", b"[1]", b'{"error": 7}'])
def test_a_body_that_is_no_error_document_is_survived(body: bytes) -> None:
    assert len(str(error_of(Reply(500, {}, body), "m"))) < 700


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("Wed, 21 Oct", RETRY_AFTER_S), ("-1", RETRY_AFTER_S), ("9e9", 3600.0)],
)
def test_retry_after_is_read_and_bounded(text: str, seconds: float) -> None:
    error = error_of(Reply(503, {"retry-after": text}, b""), "m")
    assert isinstance(error, Full)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("app;dur=12.5", 0.0125),
        ("db, app;desc=x;dur=3", 0.003),
        ("", None),
        ("app;dur=soon", None),
        ("app;dur=-4", None),
    ],
)
def test_server_timing_is_read(header: str, seconds: float | None) -> None:
    assert server_seconds({"server-timing": header}) == (pytest.approx(seconds) if seconds is not None else None)


async def test_tensors_travel_in_binary_and_names_are_quoted() -> None:
    y = Tensor("y", "FP16", (2,), b"\0\0\0\x3c")
    headers, body = encode_response(InferResponse("a/b", (y,)), True)
    link = OneReply(Reply(200, {**headers, "server-timing": "app;dur=4"}, body))
    answer = await RemoteEndpoint(link, headers={"authorization": "Bearer k"}).infer("a/b", [y], 1.0)  # type: ignore[arg-type]
    assert bytes(answer.outputs[0].data) == y.data
    assert (answer.digest, answer.compute_s) == ("", 0.004)
    path, sent, request = link.asked[0]
    assert path == "/v2/models/a%2Fb/infer"
    assert sent["authorization"] == "Bearer k"
    assert decode_request("a/b", sent, request).inputs[0].datatype == "FP16"


@pytest.mark.parametrize(
    "parameters", [{"digest": 7, "wait_s": "long", "compute_s": -1}, {"wait_s": True}, {"wait_s": 10**400}]
)
async def test_parameters_of_wrong_types_are_ignored(parameters: dict[str, object]) -> None:
    headers, body = encode_response(InferResponse("m", (), parameters=parameters), True)
    endpoint = RemoteEndpoint(OneReply(Reply(200, headers, body)))  # type: ignore[arg-type]
    answer = await endpoint.infer("m", [Tensor("x", "UINT8", (1,), b"a")], 1.0)
    assert (answer.digest, answer.wait_s, answer.compute_s) == ("", 0.0, 0.0)


async def test_an_answer_that_is_none_is_a_protocol_error() -> None:
    endpoint = RemoteEndpoint(OneReply(Reply(200, {}, b"hello")))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        await endpoint.infer("m", [Tensor("x", "UINT8", (1,), b"a")], 1.0)


class Server:
    """A Link to a server that answers y = x, lists `extensions`, and refuses codings it does not list."""

    name = "server"

    def __init__(self, *extensions: str) -> None:
        self.extensions = extensions
        self.bodies: list[tuple[str, str]] = []
        self.looks = 0

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        if path == "/v2":
            self.looks += 1
            return Reply(200, {}, server_metadata("1", self.extensions))
        coding = headers.get("content-encoding", "")
        self.bodies.append((coding, headers.get("accept-encoding", "")))
        if coding and coding not in self.extensions:
            return Reply(400, {}, b'{"error": "content-encoding is not supported"}')
        asked = decode_request("m", headers, body)
        told, answer = encode_response(InferResponse("m", asked.inputs), True)
        if headers.get("accept-encoding") == "zstd":
            return Reply(200, {**told, "content-encoding": "zstd"}, zstd.compress(answer))
        return Reply(200, told, answer)

    def lines(self, *args: object) -> object:
        raise AssertionError("infer asks once")

    async def open(self, path: str) -> FrameStream:
        raise AssertionError("infer opens no stream")

    async def close(self) -> None:
        return None


BIG = Tensor("x", "UINT8", (300_000,), bytes(300_000))


async def met(server: Server) -> RemoteEndpoint:
    """An endpoint after its first request, when what the server can do is known."""
    endpoint = RemoteEndpoint(server)  # type: ignore[arg-type]
    await endpoint.infer("m", [BIG], 5.0)
    for _ in range(3):
        await asyncio.sleep(0)
    return endpoint


async def test_zstd_goes_to_a_server_that_lists_it_and_to_no_other() -> None:
    server = Server("binary_tensor_data", "zstd")
    packed = (await met(server)).compressing()
    assert packed is not None
    answer = await packed.infer("m", [BIG], 5.0)
    assert bytes(answer.outputs[0].data) == bytes(BIG.data)
    assert answer.up_bytes < 1000 > answer.down_bytes
    assert server.bodies == [("", ""), ("zstd", "zstd")]
    foreign = Server("binary_tensor_data")
    assert (await met(foreign)).compressing() is None
    assert foreign.bodies == [("", "")]


async def test_extensions_are_asked_once_and_again_after_the_link_broke() -> None:
    server = Server("zstd")
    endpoint = await met(server)
    await endpoint.infer("m", [BIG], 5.0)
    assert server.looks == 1
    gone = server.exchange

    async def broken(*args: object, **more: object) -> Reply:
        raise LinkError("gone")

    server.exchange = broken  # type: ignore[method-assign]
    with pytest.raises(LinkError):
        await endpoint.infer("m", [BIG], 5.0)
    assert endpoint.compressing() is None
    server.exchange = gone  # type: ignore[method-assign]
    await endpoint.infer("m", [BIG], 5.0)
    await asyncio.sleep(0.01)
    assert server.looks == 2


async def test_another_server_behind_the_same_link_gets_the_plain_body() -> None:
    """A coordinator was replaced by one without zstd, and no request failed in between."""
    server = Server("zstd")
    packed = (await met(server)).compressing()
    assert packed is not None
    server.extensions = ("binary_tensor_data",)
    answer = await packed.infer("m", [BIG], 5.0)
    assert bytes(answer.outputs[0].data) == bytes(BIG.data)
    assert server.bodies[1:] == [("zstd", "zstd"), ("", "")]
