"""The serving side of tensor frames: queue, credit, cancellation, bounds and frames that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from attrs import define

from engines.executor import BoundedExecutor
from engines.fakes_tensor import MAGIC, FakeTensorEndpoint, FakeTensorRuntime
from engines.frame_sender import MAX_SMALL
from engines.local import LocalEndpoint
from engines.pool import ModelPool
from engines.port import TensorAnswer
from engines.remote_frames import SILENT_S, FramesEndpoint
from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.memory import MemoryLink
from links.port import FrameRoute, FrameStream
from protocol import zstd
from protocol.errors import BadRequest, Full, LinkClosed, LinkError, LinkTimeout, ProtocolError
from protocol.events import TransferSample
from protocol.handoff_frames import Refuse
from protocol.tensor_frames import (
    LAST,
    MAX_TEXT_BYTES,
    TENSOR_FRAMES_PATH,
    Answer,
    Ask,
    Cancel,
    Credit,
    Data,
    Hello,
    Received,
    TensorFramed,
    TensorHead,
    decode,
    encode,
    heads_of,
)
from protocol.tensors import Tensor, TensorSpec
from split_models.frames_front import FramesFront, StreamLimits
from split_models.service import Service, Shown

DELAY_S = 0.25
X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))


def large(elements: int) -> Tensor:
    return Tensor("x", "FP32", (elements // 4, 4), bytes(4 * elements))


@define
class House:
    executor: BoundedExecutor
    runtime: FakeTensorRuntime
    link: MemoryLink
    route: FrameRoute

    @property
    def runs(self) -> int:
        return sum(model.runs for model in self.runtime.loaded)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async for found in houses(tmp_path, StreamLimits()):
        yield found


async def houses(folder: Path, limits: StreamLimits) -> AsyncIterator[House]:
    """ "double" answers at once, "slow" after DELAY_S, on one worker with room for eight."""
    executor = BoundedExecutor("frames", 1, 60.0, max_waiting=8)
    runtime, pool = FakeTensorRuntime(delay_s=DELAY_S), ModelPool(1 << 30)
    local = LocalEndpoint(None, pool, executor, {"fake": FakeTensorRuntime(), "slow": runtime})
    for name, kind in (("double", "fake"), ("slow", "slow")):
        file = folder / f"{name}.bin"
        file.write_bytes(MAGIC)
        local.register(name, file, runtime=kind)
    shown = {name: Shown(name, "fake") for name in ("double", "slow")}
    front = FramesFront(Service(local, executor, time.monotonic, lambda: shown, side="server"), limits)
    link = MemoryLink("cloud", [], [front.route])
    yield House(executor, runtime, link, front.route)
    await link.close()
    await local.close()
    executor.close()
    pool.close()


async def opened(house: House, credit_bytes: int = 1 << 30) -> FrameStream:
    stream = await house.link.open(TENSOR_FRAMES_PATH)
    await stream.send(encode(0, Hello(credit_bytes=credit_bytes)))
    assert isinstance((await told(stream)).frame, Hello)
    assert isinstance((await told(stream)).frame, Received)
    return stream


async def told(stream: FrameStream) -> TensorFramed:
    async with asyncio.timeout(5):
        data = await stream.receive()
    assert data is not None
    return decode(data)


def ask(model: str, tensor: Tensor, data: bytes | memoryview | None = None) -> Ask:
    return Ask(model, "t", 5_000, heads_of([tensor]), 0, tensor.data if data is None else data)


async def test_many_requests_are_in_flight_on_one_stream(house: House) -> None:
    endpoint = FramesEndpoint("cloud", house.link.open)
    await endpoint.infer("slow", [X], 5.0)
    asked = [asyncio.create_task(endpoint.infer("slow", [X], 5.0)) for _ in range(6)]
    await asyncio.sleep(DELAY_S / 2)
    assert house.executor.running + house.executor.waiting == 6
    answers = await asyncio.gather(*asked)
    assert all(struct.unpack("<4f", bytes(a.outputs[0].data)) == (2, 4, 6, 8) for a in answers)
    await endpoint.close()


async def test_answers_come_in_the_order_they_are_ready(house: House) -> None:
    stream = await opened(house)
    await stream.send(encode(1, ask("slow", X), LAST))
    await stream.send(encode(2, ask("nobody", X), LAST))
    seen = [await told(stream) for _ in range(4)]
    kinds = [(framed.request, type(framed.frame)) for framed in seen]
    assert kinds.index((2, Refuse)) < kinds.index((1, Answer))
    refused = next(framed.frame for framed in seen if isinstance(framed.frame, Refuse))
    assert refused.code == "model_not_found"


async def test_a_cancelled_request_leaves_the_queue_and_never_runs(house: House) -> None:
    endpoint = FramesEndpoint("cloud", house.link.open)
    running = asyncio.create_task(endpoint.infer("slow", [X], 5.0))
    await asyncio.sleep(DELAY_S / 2)
    waiting = asyncio.create_task(endpoint.infer("slow", [X], 5.0))
    await asyncio.sleep(DELAY_S / 4)
    assert house.executor.waiting == 1
    waiting.cancel()
    await running
    await asyncio.sleep(2 * DELAY_S)
    assert house.runs == 1
    await endpoint.close()


async def test_a_deadline_here_takes_the_request_back_there(house: House) -> None:
    endpoint = FramesEndpoint("cloud", house.link.open)
    running = asyncio.create_task(endpoint.infer("slow", [X], 5.0))
    await asyncio.sleep(DELAY_S / 2)
    with pytest.raises(LinkError):
        await endpoint.infer("slow", [X], DELAY_S / 10)
    await running
    await asyncio.sleep(2 * DELAY_S)
    assert house.runs == 1
    await endpoint.close()


async def test_a_stream_that_ends_takes_its_requests_along(house: House) -> None:
    stream = await opened(house)
    for request in range(1, 6):
        await stream.send(encode(request, ask("slow", X), LAST))
    await asyncio.sleep(DELAY_S / 2)
    await stream.close()
    await asyncio.sleep(3 * DELAY_S)
    assert house.runs <= 1
    assert house.executor.waiting == 0


async def test_no_more_answer_data_comes_than_was_granted(house: House) -> None:
    stream = await opened(house, credit_bytes=100_000)
    tensor = large(50_000)
    await stream.send(encode(1, ask("double", tensor), LAST))
    came = 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            while (data := await stream.receive()) is not None:
                frame = decode(data).frame
                came += len(frame.data) if isinstance(frame, Answer | Data) else 0
    assert came == 100_000
    await stream.send(encode(0, Credit(200_000)))
    while not (framed := await told(stream)).flags & LAST:
        assert isinstance(framed.frame, Data)
        came += len(framed.frame.data)
    assert isinstance(framed.frame, Data)
    assert came + len(framed.frame.data) == 200_000
    await stream.close()


async def test_a_reader_that_is_slow_to_use_answers_bounds_what_is_sent(house: House) -> None:
    """Answers that nobody has used yet take the credit away; once they are used, the rest comes."""
    credit_bytes, tensor = 200_000, large(20_000)
    endpoint = FramesEndpoint("cloud", house.link.open, credit_bytes=credit_bytes)
    unused = []
    await endpoint.infer("double", [X], 5.0)  # from here on the executor knows how many may wait

    def keep(answer: TensorAnswer, used: object) -> None:
        unused.append(used)

    asked = [asyncio.create_task(endpoint.infer_then("double", [tensor], 5.0, keep)) for _ in range(8)]
    await asyncio.sleep(0.3)
    held_bytes = 80_000 * len(unused)
    assert 0 < held_bytes <= credit_bytes + 80_000
    for _ in range(50):
        for used in list(unused):
            unused.remove(used)
            used()
        await asyncio.sleep(0.01)
    assert len(await asyncio.gather(*asked)) == 8
    await endpoint.close()


async def test_one_answer_larger_than_the_credit_arrives(house: House) -> None:
    endpoint = FramesEndpoint("cloud", house.link.open, credit_bytes=10_000)
    answer = await endpoint.infer("double", [large(300_000)], 5.0)
    assert answer.outputs[0].size_bytes == 1_200_000
    await endpoint.close()


async def test_the_bounds_of_a_stream_are_told_and_kept(tmp_path: Path) -> None:
    async for house in houses(tmp_path, StreamLimits(requests=2, max_bytes=1_000)):
        stream = await house.link.open(TENSOR_FRAMES_PATH)
        hello = (await told(stream)).frame
        assert isinstance(hello, Hello)
        assert (hello.max_requests, hello.max_bytes) == (2, 1_000)
        for request in (1, 2, 3):
            await stream.send(encode(request, ask("slow", X), LAST))
        refused = [f for f in [await told(stream) for _ in range(3)] if isinstance(f.frame, Refuse)]
        assert [framed.request for framed in refused] == [3]
        assert isinstance(refused[0].frame, Refuse)
        assert refused[0].frame.code == Full.code
        await stream.close()
        await asyncio.sleep(3 * DELAY_S)
        # Who waits for room, as our endpoint does, is never refused.
        endpoint = FramesEndpoint("cloud", house.link.open)
        assert len(await asyncio.gather(*(endpoint.infer("slow", [X], 5.0) for _ in range(5)))) == 5
        await endpoint.close()


async def test_a_wrong_frame_costs_its_own_request_only(house: House) -> None:
    stream = await opened(house)
    await stream.send(encode(1, ask("slow", X), LAST))
    await stream.send(encode(2, ask("double", X), LAST)[:-20])
    await stream.send(encode(3, Ask("double", "", 5_000, (TensorHead("x", "FP32", (1, 5), 16),), 0, X.data), LAST))
    await stream.send(encode(4, Ask("double", "", 5_000, ()), LAST))
    seen: dict[int, TensorFramed] = {}
    while set(seen) != {1, 2, 3, 4} or not isinstance(seen[1].frame, Answer):
        framed = await told(stream)
        seen[framed.request] = framed
    assert all(isinstance(seen[request].frame, Refuse) for request in (2, 3, 4))
    await stream.close()


@pytest.mark.parametrize("frame", [encode(5, Received(1)), b"\x02" + encode(1, Cancel())[1:], b"x"])
async def test_a_broken_stream_is_told_why_and_ended(house: House, frame: bytes) -> None:
    stream = await opened(house)
    await stream.send(frame)
    framed = await told(stream)
    assert framed.request == 0
    assert isinstance(framed.frame, Refuse)
    assert framed.frame.code == ProtocolError.code
    assert await stream.receive() is None


async def test_packed_requests_count_for_what_they_unpack_to(tmp_path: Path) -> None:
    async for house in houses(tmp_path, StreamLimits(max_bytes=1_000)):
        stream = await opened(house)
        await stream.send(encode(1, ask("slow", X), LAST))
        bomb = Ask("double", "", 5_000, (TensorHead("x", "FP32", (1, 1_000), 4_000),), 100)
        await stream.send(encode(2, bomb))
        framed = await told(stream)
        while framed.request != 2:
            framed = await told(stream)
        assert isinstance(framed.frame, Refuse)
        assert framed.frame.code == Full.code
        await stream.close()


@pytest.mark.skipif(not zstd.available(), reason="no Zstandard library")
async def test_an_asker_of_packed_requests_waits_for_its_room(tmp_path: Path) -> None:
    async for house in houses(tmp_path, StreamLimits(max_bytes=100_000)):
        endpoint = FramesEndpoint("cloud", house.link.open)
        await endpoint.infer("slow", [X], 5.0)
        twin = endpoint.compressing()
        assert twin is not None
        asked = [asyncio.create_task(twin.infer("slow", [large(20_000)], 5.0)) for _ in range(3)]
        assert len(await asyncio.gather(*asked)) == 3
        await endpoint.close()


async def test_packed_data_for_no_model_is_not_unpacked(house: House) -> None:
    stream = await opened(house)
    await stream.send(encode(1, Ask("nobody", "", 5_000, heads_of([X]), 4, b"junk"), LAST))
    seen = [(await told(stream)).frame for _ in range(2)]
    assert isinstance(seen[1], Refuse)
    assert seen[1].code == "model_not_found"
    await stream.close()


async def test_a_broken_frame_of_a_running_request_ends_it(house: House) -> None:
    stream = await opened(house)
    await stream.send(encode(1, ask("slow", X), LAST))
    await asyncio.sleep(DELAY_S / 4)
    await stream.send(encode(1, ask("double", X), LAST)[:10])
    await stream.send(encode(2, ask("slow", X), LAST))
    seen = [await told(stream) for _ in range(4)]
    assert [(f.request, type(f.frame)) for f in seen] == [(1, Received), (1, Refuse), (2, Received), (2, Answer)]
    await stream.close()


class LongNames(FakeTensorEndpoint):
    """Its output has a name that no frame can carry."""

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        return TensorAnswer((Tensor("y" * (MAX_TEXT_BYTES + 1), "FP32", (1, 4), X.data),), "")

    async def describe(self, name: str) -> tuple[list[TensorSpec], list[TensorSpec], str]:
        return [], [], ""

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None:
        return None

    def loaded(self, name: str) -> bool:
        return True


async def test_an_answer_that_cannot_be_told_ends_the_stream() -> None:
    executor = BoundedExecutor("frames", 1)
    shown = {"double": Shown("double", "fake")}
    front = FramesFront(Service(LongNames(), executor, time.monotonic, lambda: shown))
    link = MemoryLink("cloud", [], [front.route])
    endpoint = FramesEndpoint("cloud", link.open)
    with pytest.raises(ProtocolError):
        await endpoint.infer("double", [X], 5.0)
    await endpoint.close()
    await link.close()
    executor.close()


async def test_a_peer_that_asks_and_reads_nothing_is_left(house: House) -> None:
    stream = await house.link.open(TENSOR_FRAMES_PATH)
    with pytest.raises(LinkClosed):
        async with asyncio.timeout(20):
            for count in itertools.count():
                await stream.send(encode(0, Hello(credit_bytes=1 << 20)))
                await asyncio.sleep(0.0 if count <= 2 * MAX_SMALL else 0.01)


async def test_a_number_in_flight_twice_ends_the_stream(house: House) -> None:
    stream = await opened(house)
    for _ in range(2):
        await stream.send(encode(1, ask("slow", X), LAST))
    frames = []
    while (data := await stream.receive()) is not None:
        frames.append(decode(data))
    assert isinstance(frames[-1].frame, Refuse)
    assert frames[-1].request == 0


async def test_samples_tell_the_way_up_and_of_large_answers_the_way_down(house: House) -> None:
    samples: list[TransferSample] = []
    endpoint = FramesEndpoint("cloud", house.link.open, sink=samples.append)
    answer = await endpoint.infer("double", [large(100_000)], 5.0)
    assert [sample.direction for sample in answer.transfers] == ["up", "down"]
    assert list(answer.transfers) == samples
    up, down = samples
    assert 400_000 <= up.size_bytes < 401_000
    assert down.size_bytes == 400_000
    assert (answer.up_bytes, answer.down_bytes) == (400_000, 400_000)
    assert endpoint.under_way() is None
    await endpoint.close()


@pytest.mark.skipif(not zstd.available(), reason="no Zstandard library")
async def test_packed_requests_get_packed_answers(house: House) -> None:
    endpoint = FramesEndpoint("cloud", house.link.open)
    assert endpoint.compressing() is None
    plain = await endpoint.infer("double", [large(100_000)], 5.0)
    twin = endpoint.compressing()
    assert twin is not None
    packed = await twin.infer("double", [large(100_000)], 5.0)
    assert bytes(packed.outputs[0].data) == bytes(plain.outputs[0].data)
    assert packed.up_bytes < 1_000
    assert packed.down_bytes < 1_000
    await endpoint.close()


async def test_a_lost_stream_is_opened_again_by_the_next_request(tmp_path: Path) -> None:
    async for house in houses(tmp_path, StreamLimits()):
        server = await _over_http(house)
        link = HttpLink("cloud", f"http://127.0.0.1:{server.port}")
        endpoint = FramesEndpoint("cloud", link.open)
        await endpoint.infer("double", [X], 5.0)
        asked = asyncio.create_task(endpoint.infer("slow", [X], 5.0))
        await asyncio.sleep(DELAY_S / 2)
        await server.close(0.0)
        with pytest.raises(LinkError):
            await asked
        again = await _over_http(house, server.port)
        assert await endpoint.infer("double", [X], 5.0)
        with pytest.raises(BadRequest):
            await endpoint.infer("double", [Tensor("x", "FP32", (1, 1), b"1234")], 5.0)
        await endpoint.close()
        with pytest.raises(LinkClosed):
            await link.close()
            await endpoint.infer("double", [X], 5.0)
        await again.close()


class Dead:
    """A stream whose far end has gone without a word: what is sent is never acknowledged."""

    def __init__(self, inner: FrameStream, taken: int | None) -> None:
        self.inner = inner
        self.taken = taken
        self.gone = False
        self.never = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        if not self.gone:
            await self.inner.send(frame)

    async def receive(self) -> bytes | None:
        if self.gone:
            await self.never.wait()
        return await self.inner.receive()

    async def close(self) -> None:
        await self.inner.close()

    def acknowledged(self) -> int | None:
        return self.taken


@pytest.mark.parametrize(("taken", "streams"), [(7, 2), (None, 1)])
async def test_a_stream_that_fell_silent_is_given_up_where_somebody_counts(
    house: House, taken: int | None, streams: int
) -> None:
    opened: list[Dead] = []

    async def open_stream(path: str) -> FrameStream:
        opened.append(Dead(await house.link.open(path), taken))
        return opened[-1]

    endpoint = FramesEndpoint("cloud", open_stream)
    await endpoint.infer("double", [X], 5.0)
    opened[0].gone = True
    with pytest.raises(LinkTimeout):
        await endpoint.infer("double", [X], 0.05)  # too short to tell
    assert len(opened) == 1
    with pytest.raises(LinkTimeout):
        await endpoint.infer("double", [X], SILENT_S + 0.1)
    with contextlib.suppress(LinkTimeout):
        await endpoint.infer("double", [X], 0.2)
    assert len(opened) == streams
    await endpoint.close()


async def _over_http(house: House, port: int = 0) -> RunningServer:
    return await serve([], [house.route], host="127.0.0.1", port=port)
