"""One suite over every TensorEndpoint: the fake, the local one, and the remote twin over a real HTTP link."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import field, frozen

from engines.executor import BoundedExecutor
from engines.fakes_tensor import MAGIC, FakeTensorEndpoint, FakeTensorRuntime
from engines.local import LocalEndpoint
from engines.pool import ModelPool
from engines.port import TensorEndpoint
from engines.remote_frames import FramesEndpoint, OpenStream
from engines.remote_oip import RemoteEndpoint, collecting
from links.channel_link import ChannelLink
from links.channel_server import ChannelServer, Peer
from links.channel_session import Session
from links.http import HttpLink
from links.http_front import plain_error
from links.http_server import serve
from links.memory import MemoryLink
from links.port import FrameRoute, FrameStream, Request, Response, Route
from links.shaped import Conditions, ShapedLink
from protocol.errors import BadRequest, EngineError, Full, LinkError, MidstreamError, NotFound
from protocol.events import TransferSample
from protocol.oip import InferResponse, decode_request, encode_response, error_body
from protocol.tensors import Tensor
from split_models.frames_front import FramesFront
from split_models.service import Service, Shown
from tests.unit.links.data_channels import memory_channels

X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))
DELAY_S = 0.15


@frozen
class Case:
    """streams: frame streams that were opened so far."""

    endpoint: TensorEndpoint
    slow: str
    remote: bool = False
    streams: list[FrameStream] = field(factory=list)


def twin_case(open_stream: OpenStream) -> tuple[FramesEndpoint, Case]:
    """The remote twin over frames."""
    streams: list[FrameStream] = []

    async def opening(path: str) -> FrameStream:
        streams.append(await open_stream(path))
        return streams[-1]

    twin = FramesEndpoint("peer", opening)
    return twin, Case(twin, "slow", remote=True, streams=streams)


def front(endpoint: TensorEndpoint) -> Route:
    """The smallest Open Inference Protocol server over an endpoint."""

    async def infer(request: Request) -> Response:
        try:
            asked = decode_request(request.params["model"], request.headers, request.body)
            answer = await endpoint.infer(asked.model, asked.inputs, 5.0)
        except MidstreamError as err:
            status, headers, body = error_body(err)
            return Response(status, headers, body)
        told = {"digest": answer.digest, "wait_s": answer.wait_s, "compute_s": answer.compute_s}
        headers, body = encode_response(InferResponse(asked.model, tuple(answer.outputs), parameters=told), True)
        return Response(200, headers, body)

    return Route("POST", "/v2/models/{model}/infer", infer)


def frames_front(endpoint: LocalEndpoint, executor: BoundedExecutor) -> FrameRoute:
    """The server's side of tensor frames over an endpoint."""
    shown = {name: Shown(name, "fake") for name in ("double", "slow", "broken")}
    return FramesFront(Service(endpoint, executor, time.monotonic, lambda: shown, side="server")).route


def local(folder: Path, executor: BoundedExecutor) -> tuple[LocalEndpoint, ModelPool]:
    pool = ModelPool(1 << 30)
    runtimes = {"fake": FakeTensorRuntime(), "slow": FakeTensorRuntime(delay_s=DELAY_S)}
    endpoint = LocalEndpoint(None, pool, executor, runtimes)
    for name, runtime in (("double", "fake"), ("slow", "slow"), ("broken", "fake")):
        file = folder / f"{name}.bin"
        file.write_bytes(b"not a model" if name == "broken" else MAGIC)
        endpoint.register(name, file, runtime=runtime)
    return endpoint, pool


@pytest.fixture(
    params=["fake", "local", "remote", "frames", "frames in memory", "frames shaped", "frames over a channel"]
)
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    if request.param == "fake":
        yield Case(FakeTensorEndpoint(("double", "slow"), delay_s=DELAY_S), "slow")
        return
    executor = BoundedExecutor("endpoint", 1, 0.1, max_waiting=1)
    endpoint, pool = local(tmp_path, executor)
    try:
        if request.param == "local":
            yield Case(endpoint, "slow")
        elif request.param in ("frames in memory", "frames shaped"):
            memory = MemoryLink("peer", [], [frames_front(endpoint, executor)])
            fast = Conditions(up_bytes_per_s=1e9, down_bytes_per_s=1e9, delay_s=0.001)
            shaped = request.param == "frames shaped"
            twin, made = twin_case((ShapedLink(memory, lambda at_s: fast) if shaped else memory).open)
            yield made
            await twin.close()
            await memory.close()
        elif request.param == "frames over a channel":
            ours, theirs = memory_channels()
            served = ChannelServer([], [frames_front(endpoint, executor)], Peer("pi-1"), on_error=plain_error)
            session = Session(theirs, "pi-1", accept=served.accept)
            channel = ChannelLink("peer", Session(ours, "peer"))
            twin, made = twin_case(channel.open)
            yield made
            await twin.close()
            await channel.close()
            await session.close()
            await served.close()
        elif request.param == "frames":
            server = await serve([], [frames_front(endpoint, executor)], host="127.0.0.1", port=0)
            link = HttpLink("peer", f"http://127.0.0.1:{server.port}")
            twin, made = twin_case(link.open)
            yield made
            await twin.close()
            await link.close()
            await server.close()
        else:
            server = await serve([front(endpoint)], [], host="127.0.0.1", port=0)
            link = HttpLink("peer", f"http://127.0.0.1:{server.port}", sink=collecting(lambda sample: None))
            yield Case(RemoteEndpoint(link), "slow", remote=True)
            await link.close()
            await server.close()
    finally:
        await endpoint.close()
        executor.close()
        pool.close()


async def test_answers_with_outputs_digest_and_times(case: Case) -> None:
    answer = await case.endpoint.infer("double", [X], 5.0)
    (y,) = answer.outputs
    assert (y.name, y.datatype, y.shape) == ("y", "FP32", (1, 4))
    assert struct.unpack("<4f", bytes(y.data)) == (2, 4, 6, 8)
    assert len(answer.digest) == 64
    assert answer.wait_s >= 0
    assert answer.compute_s >= 0
    assert case.endpoint.wait_s() >= 0


async def test_tells_the_transfers_of_this_request_and_of_no_other(case: Case) -> None:
    answers = await asyncio.gather(*(case.endpoint.infer("double", [X], 5.0) for _ in range(2)), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, Full):
            continue
        assert not isinstance(answer, BaseException)
        directions = [sample.direction for sample in answer.transfers]
        # The way down is sampled for answers that are large enough to tell a rate.
        assert directions == (["up"] if case.remote else [])
        assert all(isinstance(sample, TransferSample) for sample in answer.transfers)


async def test_unknown_models_are_not_found(case: Case) -> None:
    with pytest.raises(NotFound):
        await case.endpoint.infer("nobody", [X], 5.0)


async def test_inputs_that_do_not_fit_are_a_bad_request(case: Case) -> None:
    with pytest.raises(BadRequest):
        await case.endpoint.infer("double", [Tensor("x", "FP32", (1, 5), bytes(20))], 5.0)
    with pytest.raises(BadRequest):
        await case.endpoint.infer("double", [Tensor("z", "FP32", (1, 4), bytes(16))], 5.0)
    assert await case.endpoint.infer("double", [X], 5.0)


async def test_the_deadline_is_kept(case: Case) -> None:
    began_s = asyncio.get_running_loop().time()
    with pytest.raises((EngineError, LinkError)):
        await case.endpoint.infer(case.slow, [X], 0.02)
    assert asyncio.get_running_loop().time() - began_s < DELAY_S
    await asyncio.sleep(DELAY_S)
    assert await case.endpoint.infer(case.slow, [X], 5.0)


async def test_a_cancelled_request_leaves_the_endpoint_usable(case: Case) -> None:
    task = asyncio.create_task(case.endpoint.infer(case.slow, [X], 5.0))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(DELAY_S)
    assert await case.endpoint.infer("double", [X], 5.0)


async def test_who_is_cancelled_while_sending_leaves_the_others_and_the_stream_whole(case: Case) -> None:
    large = Tensor("x", "FP32", (1 << 17, 4), bytes(1 << 21))
    assert await case.endpoint.infer("double", [X], 5.0)
    for turns in range(1, 6):
        given_up = asyncio.create_task(case.endpoint.infer("double", [large], 5.0))
        other = asyncio.create_task(case.endpoint.infer("double", [X], 5.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        assert await other
        with contextlib.suppress(asyncio.CancelledError, Full):
            await given_up
    assert await case.endpoint.infer("double", [X], 5.0)
    assert len(case.streams) <= 1


async def test_too_many_at_once_are_refused_with_a_time_to_come_back(case: Case) -> None:
    if isinstance(case.endpoint, FakeTensorEndpoint):
        case = Case(FakeTensorEndpoint(failures=[Full("full", retry_after_s=1.0)]), "double")
    asked = (case.endpoint.infer(case.slow, [X], 5.0) for _ in range(5))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [a for a in answers if isinstance(a, Full)]
    assert refused
    assert all(r.retry_after_s >= 0 for r in refused)
    assert len([a for a in answers if not isinstance(a, BaseException)]) == 5 - len(refused)
