"""Which way a server is asked: frames once it said that it speaks them, plain exchanges else and after it changed."""

from __future__ import annotations

import asyncio
import struct
import time

import pytest

from engines.fakes_tensor import FakeTensorEndpoint
from engines.remote_oip import collecting
from engines.remote_twin import RemoteTwin, oldest
from links.http import HttpLink
from links.http_server import RunningServer, serve
from protocol.errors import LinkError, NotFound
from protocol.events import TransferSample
from protocol.tensor_frames import TENSOR_FRAMES
from protocol.tensors import Tensor, TensorSpec
from split_models.frames_front import FramesFront
from split_models.front import Front
from split_models.service import Service, Shown

X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))


class Fake(FakeTensorEndpoint):
    async def describe(self, name: str) -> tuple[list[TensorSpec], list[TensorSpec], str]:
        return [], [], ""

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None:
        return None

    def loaded(self, name: str) -> bool:
        return True


class Unused:
    async def run(self, *args: object) -> object:
        raise AssertionError("no recipe runs here")


async def house(port: int = 0, *, frames: bool = True) -> RunningServer:
    shown = {"double": Shown("double", "fake")}
    service = Service(Fake(("double",)), Unused(), time.monotonic, lambda: shown, side="server")  # type: ignore[arg-type]
    front = Front(service, extensions=(TENSOR_FRAMES,) if frames else ())
    return await serve(front.routes, [FramesFront(service).route] if frames else [], host="127.0.0.1", port=port)


async def until_pipelined(twin: RemoteTwin) -> None:
    async with asyncio.timeout(5):
        while not twin.pipelined:
            await twin.infer("double", [X], 5.0)
            await asyncio.sleep(0.01)


def sample(seconds: float) -> TransferSample:
    return TransferSample(at_s=0.0, link="cloud", direction="up", size_bytes=1, seconds=seconds, complete=False)


async def test_exchanges_first_then_frames_and_one_sample_for_each_request() -> None:
    server, samples = await house(), []
    link = HttpLink("cloud", f"http://127.0.0.1:{server.port}", sink=collecting(samples.append))
    twin = RemoteTwin(link, sink=samples.append)
    assert not twin.pipelined
    answer = await twin.infer("double", [X], 5.0)
    assert len(answer.transfers) == 1
    await until_pipelined(twin)
    await twin.infer("double", [X], 5.0)
    samples.clear()
    answers = await asyncio.gather(*(twin.infer("double", [X], 5.0) for _ in range(20)))
    assert all(struct.unpack("<4f", bytes(a.outputs[0].data)) == (2, 4, 6, 8) for a in answers)
    assert all(len(a.transfers) == 1 and a.wire.total_s > 0 for a in answers)
    assert len(samples) == 20
    with pytest.raises(NotFound):
        await twin.infer("nobody", [X], 5.0)
    assert twin.pipelined
    assert twin.wait_s() == 0.0
    await twin.close()
    await link.close()
    await server.close()


async def test_a_server_without_frames_is_asked_by_exchanges_for_ever() -> None:
    server = await house(frames=False)
    link = HttpLink("cloud", f"http://127.0.0.1:{server.port}")
    twin = RemoteTwin(link)
    for _ in range(5):
        assert await twin.infer("double", [X], 5.0)
        await asyncio.sleep(0.02)
    assert not twin.pipelined
    await twin.close()
    await link.close()
    await server.close()


async def test_a_server_that_lost_its_frames_answers_all_the_same() -> None:
    server = await house()
    link = HttpLink("cloud", f"http://127.0.0.1:{server.port}")
    twin = RemoteTwin(link)
    await until_pipelined(twin)
    await twin.infer("double", [X], 5.0)
    await server.close(0.0)
    older = await house(server.port, frames=False)
    async with asyncio.timeout(5):
        while True:
            try:
                assert await twin.infer("double", [X], 5.0)
                break
            except LinkError:  # what the old connections still have to tell
                await asyncio.sleep(0.02)
    assert await twin.infer("double", [X], 5.0)
    assert not twin.pipelined
    await twin.close()
    await link.close()
    await older.close()


def test_the_oldest_of_all_is_under_way() -> None:
    found = oldest(lambda: sample(1.0), lambda: None, lambda: sample(3.0))()
    assert found is not None
    assert found.seconds == 3.0
    assert oldest(lambda: None)() is None
