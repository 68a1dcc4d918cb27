"""A caller that keeps a worker's place: what waits is its to work off, and no place is ever lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from attrs import Factory, define

from engines.executor import BoundedExecutor
from protocol.events import Event, QueueSampled


@define
class Crowd:
    """One worker, whose place is taken until `gate` opens, and one that waits: whoever hands in more runs it."""

    executor: BoundedExecutor
    outcomes: list[str]
    gate: threading.Event = Factory(threading.Event)
    ran_in: list[str] = Factory(list)
    deaf: bool = False

    def note(self) -> None:
        """Work that says who did it."""
        self.ran_in.append(threading.current_thread().name)

    def hand_in(self) -> None:
        """From a caller's thread."""
        self.executor.submit(self.note, on_done=lambda result, error: None, keep_place=True)

    async def open_for(self, callers: int) -> None:
        """Let the worker go on once so many callers wait for its place."""
        while self.executor._callers_waiting < callers:
            await asyncio.sleep(0.002)
        self.gate.set()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    outcomes: list[str] = []

    def emit(event: Event) -> None:
        assert isinstance(event, QueueSampled)
        outcomes.append(event.outcome)
        if event.outcome == "ran_here" and found.deaf:
            raise ValueError("a sink with a bug")

    executor = BoundedExecutor("test", 1, 0.1, max_waiting=1, emit=emit)
    found = Crowd(executor, outcomes)
    executor.submit(found.gate.wait, 10, on_done=lambda result, error: None, when_full="refuse")
    while not executor.running:
        time.sleep(0.002)
    executor.submit(found.note, on_done=lambda result, error: None, when_full="refuse")
    yield found
    found.gate.set()
    executor.close()


async def test_a_caller_that_keeps_its_place_works_off_what_waits(crowd: Crowd) -> None:
    def burst() -> tuple[bool, int, bool, bool]:
        crowd.hand_in()
        kept = crowd.executor.has_place
        crowd.hand_in()  # a worker would take it up, if there were a place
        return kept, crowd.executor.waiting, crowd.executor.go_on(), crowd.executor.go_on()

    running = asyncio.create_task(asyncio.to_thread(burst))
    await crowd.open_for(1)
    assert await running == (True, 1, True, False)
    assert len(crowd.ran_in) == 3 and "test-0" not in crowd.ran_in
    assert crowd.executor.running == 0
    assert crowd.outcomes.count("ran_here") == 1, "the second was let in to wait"
    assert await crowd.executor.run(lambda: threading.current_thread().name) == "test-0"


async def test_a_place_is_not_kept_from_a_caller_that_waits_for_one(crowd: Crowd) -> None:
    def keep() -> bool:
        crowd.hand_in()
        kept = crowd.executor.has_place
        crowd.executor.leave()
        return kept

    both = [asyncio.create_task(asyncio.to_thread(keep)) for _ in range(2)]
    await crowd.open_for(2)
    assert sorted(await asyncio.wait_for(asyncio.gather(*both), 5)) == [False, True]
    assert crowd.executor.running == 0


async def test_a_call_does_not_wait_for_the_place_that_its_own_thread_keeps(crowd: Crowd) -> None:
    def keep_then_call() -> str:
        crowd.hand_in()
        return crowd.executor.call(lambda: threading.current_thread().name)

    running = asyncio.create_task(asyncio.to_thread(keep_then_call))
    await crowd.open_for(1)
    assert await asyncio.wait_for(running, 5) == "test-0"


async def test_what_a_keeper_runs_may_be_refused_and_takes_no_place_from_it(crowd: Crowd) -> None:
    seen: list[bool] = []

    def more() -> None:
        crowd.executor.submit(crowd.note, on_done=lambda result, error: None, when_full="refuse")
        seen.append(threading.current_thread() in crowd.executor._running)

    def burst() -> None:
        crowd.hand_in()
        crowd.executor.submit(more, on_done=lambda result, error: None, keep_place=True)
        while crowd.executor.go_on():
            pass

    running = asyncio.create_task(asyncio.to_thread(burst))
    await crowd.open_for(1)
    await asyncio.wait_for(running, 5)
    assert seen == [True]
    assert "test-0" not in crowd.ran_in


async def test_a_keeper_whose_events_nobody_takes_gives_its_place_back(crowd: Crowd) -> None:
    def burst() -> bool:
        with pytest.raises(ValueError, match="a sink"):
            crowd.hand_in()
        return crowd.executor.has_place

    crowd.deaf = True
    running = asyncio.create_task(asyncio.to_thread(burst))
    await crowd.open_for(1)
    assert not await asyncio.wait_for(running, 5)
    await asyncio.to_thread(crowd.executor.wait_until_idle, 5.0)
    assert await crowd.executor.run(lambda: threading.current_thread().name) == "test-0"
