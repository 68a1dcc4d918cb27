"""A lane under a burst: nothing is lost, no queue grows, the house's loop goes on, and what ends it is told."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import AsyncIterator

import pytest
from attrs import define

from engines.executor import BoundedExecutor
from engines.fakes_tensor import FakeTensorEndpoint
from engines.laned import LanedEndpoint
from engines.port import TensorAnswer, Worked
from links.http import HttpLink
from links.http_server import serve
from protocol.errors import EngineError, LinkClosed, LinkError, LinkTimeout, NotFound
from protocol.events import TransferSample
from protocol.tensors import Tensor, TensorSpec
from split_models.frames_front import FramesFront
from split_models.service import Service, Shown

X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))
WORK_S = 0.004
ANSWERS = 120


class Fake(FakeTensorEndpoint):
    async def describe(self, name: str) -> tuple[list[TensorSpec], list[TensorSpec], str]:
        return [], [], ""

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None:
        return None

    def loaded(self, name: str) -> bool:
        return True


@define
class House:
    lane: LanedEndpoint
    executor: BoundedExecutor
    samples: list[TransferSample]
    threads: list[str]

    def work(self, answer: TensorAnswer) -> float:
        """Takes WORK_S and notes who did it."""
        time.sleep(WORK_S)
        self.threads.append(threading.current_thread().name)
        return struct.unpack("<4f", bytes(answer.outputs[0].data))[0]  # type: ignore[no-any-return]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    local = Fake(("double",))
    executor = BoundedExecutor("work", 1, 5 * WORK_S)
    shown = {"double": Shown("double", "fake")}
    route = FramesFront(Service(local, executor, time.monotonic, lambda: shown, side="server")).route
    server = await serve([], [route], host="127.0.0.1", port=0)
    samples: list[TransferSample] = []
    url = f"http://127.0.0.1:{server.port}"
    lane = LanedEndpoint("cloud", lambda: HttpLink("cloud", url), executor, sink=samples.append)
    await lane.start()
    yield House(lane, executor, samples, [])
    await lane.close()
    await server.close()
    executor.close()


async def test_a_burst_slows_the_reader_and_fills_no_queue(house: House) -> None:
    asked = [asyncio.create_task(house.lane.infer_then("double", [X], 30.0, house.work)) for _ in range(ANSWERS)]
    turns = 0
    while not all(task.done() for task in asked):
        await asyncio.sleep(WORK_S)
        turns += 1
    done = [task.result() for task in asked]
    assert [worked.result for worked in done] == [2.0] * ANSWERS
    assert len(house.threads) == ANSWERS
    assert "cloud-lane" in house.threads
    assert house.executor.metrics().peak_waiting < 10
    assert turns > ANSWERS // 8  # the house's loop was never held up
    assert all(worked.run_s >= WORK_S for worked in done)


async def test_a_lane_gives_the_workers_place_back_after_a_burst(house: House) -> None:
    asked = [asyncio.create_task(house.lane.infer_then("double", [X], 30.0, house.work)) for _ in range(ANSWERS)]
    await asyncio.gather(*asked)
    await asyncio.to_thread(house.executor.wait_until_idle, 5.0)
    assert not house.executor.busy
    house.threads.clear()
    await house.lane.infer_then("double", [X], 30.0, house.work)
    assert house.threads == ["work-0"]


async def test_a_lane_that_ends_in_the_workers_place_gives_it_back(house: House) -> None:
    ran_here = asyncio.Event()
    home = asyncio.get_running_loop()

    def work(answer: TensorAnswer) -> None:
        time.sleep(WORK_S)
        if threading.current_thread().name == "cloud-lane":
            home.call_soon_threadsafe(ran_here.set)

    asked = [asyncio.create_task(house.lane.infer_then("double", [X], 30.0, work)) for _ in range(ANSWERS)]
    await ran_here.wait()
    await house.lane.close()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, Worked | LinkClosed) for one in ended)
    assert await house.executor.run(lambda: threading.current_thread().name) == "work-0"


async def test_a_sample_is_told_before_the_result_that_it_belongs_to(house: House) -> None:
    told: list[int] = []
    for _ in range(3):
        await house.lane.infer_then("double", [X], 30.0, house.work)
        told.append(len(house.samples))
    assert told == [1, 2, 3]


async def test_samples_come_on_the_loop_of_the_house(house: House) -> None:
    worked = await house.lane.infer_then("double", [X], 30.0, house.work)
    await asyncio.sleep(0.01)
    assert [sample.direction for sample in house.samples] == ["up"]
    assert list(worked.answer.transfers) == house.samples
    assert house.lane.wait_s() >= 0
    assert house.lane.under_way() is None
    assert (await house.lane.infer("double", [X], 30.0)).outputs


async def test_errors_of_the_server_and_of_the_work_are_raised_where_it_was_asked(house: House) -> None:
    with pytest.raises(NotFound):
        await house.lane.infer_then("nobody", [X], 30.0, house.work)

    def fail(answer: TensorAnswer) -> None:
        raise EngineError("the map is upside down")

    with pytest.raises(EngineError, match="upside down"):
        await house.lane.infer_then("double", [X], 30.0, fail)
    house.executor.close()
    with pytest.raises(EngineError, match="closed"):
        await house.lane.infer_then("double", [X], 30.0, house.work)


async def test_the_deadline_covers_the_work_too(house: House) -> None:
    release = threading.Event()
    try:
        with pytest.raises(LinkTimeout):
            await house.lane.infer_then("double", [X], 0.2, lambda answer: release.wait(5))
    finally:
        release.set()


async def test_a_closed_lane_says_so_and_ends_what_was_asked(house: House) -> None:
    release = threading.Event()
    waiting = asyncio.create_task(house.lane.infer_then("double", [X], 30.0, house.work))
    await waiting
    release.set()
    await house.lane.close()
    with pytest.raises(LinkClosed):
        await house.lane.infer_then("double", [X], 30.0, house.work)


async def test_a_lane_whose_link_cannot_be_made_says_why() -> None:
    executor = BoundedExecutor("work", 1)

    def broken() -> HttpLink:
        raise LinkError("no network card")

    lane = LanedEndpoint("cloud", broken, executor)
    with pytest.raises(LinkError, match="no network card"):
        await lane.infer("double", [X], 5.0)
    await lane.close()
    with pytest.raises(LinkClosed):
        await lane.infer("double", [X], 5.0)
    executor.close()


async def test_a_first_request_that_is_cancelled_leaves_the_lane_to_others(house: House) -> None:
    url_of = house.lane._open_link
    for _ in range(5):
        lane = LanedEndpoint("cloud", url_of, house.executor)
        first = asyncio.create_task(lane.infer("double", [X], 5.0))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await lane.infer("double", [X], 5.0)).outputs
        await lane.close()


async def test_a_lane_whose_thread_ended_gets_another(house: House) -> None:
    before = house.lane._thread
    assert before is not None and house.lane._loop is not None and house.lane._stop is not None
    house.lane._loop.call_soon_threadsafe(house.lane._stop.set)
    await asyncio.to_thread(before.join, 5)
    assert (await house.lane.infer("double", [X], 5.0)).outputs
    assert house.lane._thread is not before


async def test_a_lane_that_is_closed_while_it_starts_ends(house: House) -> None:
    lane = LanedEndpoint("cloud", house.lane._open_link, house.executor)
    first = asyncio.create_task(lane.infer("double", [X], 5.0))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(5):
        await lane.close()
    assert lane._thread is not None and not lane._thread.is_alive()


async def test_each_stream_goes_over_a_link_of_its_own(house: House) -> None:
    """The coordinator may have moved since the last one."""
    await house.lane.infer("double", [X], 5.0)
    first = house.lane._link
    assert house.lane._frames is not None
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(house.lane._frames.close(), house.lane._loop))  # type: ignore[arg-type]
    await house.lane.infer("double", [X], 5.0)
    assert house.lane._link is not first
