"""The bounded executor: who may do what, cancelling, closing, and many threads at once."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engines.executor import BoundedExecutor, OnDone
from engines.thread_priority import LAST_NICENESS, SWITCH_S, hand_over_soon
from protocol.errors import BadRequest, EngineError, Full
from protocol.events import QueueSampled, RecordingEmit


class Gate:
    """Work that waits until it is let go; counts what runs."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.started: list[int] = []
        self.threads: set[str] = set()
        self.lock = threading.Lock()

    def work(self, number: int) -> int:
        with self.lock:
            self.started.append(number)
            self.threads.add(threading.current_thread().name)
        assert self.open.wait(10)
        return number

    def until_started(self, count: int) -> None:
        end_s = time.monotonic() + 5
        while len(self.started) < count and time.monotonic() < end_s:
            time.sleep(0.002)
        assert len(self.started) == count


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open.set()


@pytest.fixture
def executor(gate: Gate) -> Iterator[BoundedExecutor]:
    """Two workers, room for exactly two."""
    found = BoundedExecutor("test", 2, 0.1, max_waiting=2)
    yield found
    gate.open.set()
    found.close()


async def fill(executor: BoundedExecutor, gate: Gate) -> list[asyncio.Task[int]]:
    """Two run, two wait."""
    tasks = [asyncio.create_task(executor.run(gate.work, n)) for n in range(2)]
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.until_started, 2)
    tasks += [asyncio.create_task(executor.run(gate.work, n)) for n in (2, 3)]
    await asyncio.sleep(0)
    assert (executor.running, executor.waiting) == (2, 2)
    return tasks


async def test_the_event_loop_is_refused_at_once_when_full(executor: BoundedExecutor, gate: Gate) -> None:
    tasks = await fill(executor, gate)
    with pytest.raises(Full) as refused:
        await executor.run(gate.work, 4)
    assert refused.value.retry_after_s >= 0
    gate.open.set()
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3]


@pytest.fixture
def single(gate: Gate) -> Iterator[BoundedExecutor]:
    """One worker, room for exactly one."""
    found = BoundedExecutor("test", 1, 0.1, max_waiting=1)
    yield found
    gate.open.set()
    found.close()


def fill_single(executor: BoundedExecutor, gate: Gate) -> None:
    """One runs, one waits."""
    for number in range(2):
        executor.submit(gate.work, number, on_done=lambda result, error: None, when_full="refuse")
    gate.until_started(1)
    assert (executor.running, executor.waiting) == (1, 1)


async def test_a_foreign_thread_takes_the_workers_place_when_full_and_works_off_what_came_first(
    single: BoundedExecutor, gate: Gate
) -> None:
    fill_single(single, gate)
    calling = asyncio.create_task(asyncio.to_thread(single.call, lambda: threading.current_thread().name))
    await asyncio.sleep(0.05)
    assert not calling.done(), "no more runs at once than there are workers"
    gate.open.set()
    assert not (await calling).startswith("test-")
    assert gate.started == [0, 1]
    assert gate.threads - {"test-0"}, "what came first was run by the caller as well"
    ran_in = await asyncio.to_thread(single.call, lambda: threading.current_thread().name)
    assert ran_in.startswith("test-")


async def test_what_waits_goes_on_when_a_caller_has_given_its_place_back(single: BoundedExecutor, gate: Gate) -> None:
    fill_single(single, gate)
    calls = [asyncio.create_task(asyncio.to_thread(single.call, gate.work, number)) for number in range(2, 6)]
    gate.open.set()
    assert await asyncio.gather(*calls) == [2, 3, 4, 5]
    assert sorted(gate.started) == list(range(6))
    assert (single.running, single.waiting) == (0, 0)


async def test_a_caller_in_a_workers_place_has_a_pulse_of_its_own(single: BoundedExecutor, gate: Gate) -> None:
    """What hangs in its hands is seen, also when it was another's work."""
    fill_single(single, gate)
    stuck, entered = threading.Event(), threading.Event()

    def hang() -> bool:
        entered.set()
        return stuck.wait(10)

    calling = asyncio.create_task(asyncio.to_thread(single.call, hang))
    await asyncio.sleep(0.05)
    assert [pulse.name for pulse in single.pulses()] == ["test-0"]
    gate.open.set()
    assert await asyncio.to_thread(entered.wait, 5)
    (place,) = [pulse for pulse in single.pulses() if pulse.name != "test-0"]
    assert place.busy and place.beats == 2, "the work that came first, then its own"
    stuck.set()
    assert await calling
    assert [pulse.name for pulse in single.pulses()] == ["test-0"]


async def test_a_caller_whose_events_nobody_takes_gives_its_place_back(gate: Gate) -> None:
    def emit(event: object) -> None:
        if isinstance(event, QueueSampled) and event.outcome == "ran_here":
            raise ValueError("a sink with a bug")

    executor = BoundedExecutor("test", 1, 0.1, emit=emit, max_waiting=1)
    try:
        fill_single(executor, gate)
        calling = asyncio.create_task(asyncio.to_thread(executor.call, gate.work, 2))
        await asyncio.sleep(0.05)
        gate.open.set()
        with pytest.raises(ValueError, match="a sink"):
            await calling
        await asyncio.to_thread(executor.wait_until_idle, 10.0)
        assert await executor.run(gate.work, 3) == 3
        assert executor.metrics().peak_waiting == 2, "a caller's own work waits with what came before it"
    finally:
        executor.close()


async def test_closing_ends_callers_that_wait_for_a_place(single: BoundedExecutor, gate: Gate) -> None:
    fill_single(single, gate)
    calling = asyncio.create_task(asyncio.to_thread(single.call, gate.work, 2))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(asyncio.to_thread(single.close))
    with pytest.raises(EngineError, match="closed"):
        await calling
    gate.open.set()
    await closing
    assert gate.started == [0]


async def test_a_foreign_thread_may_be_refused_or_wait(executor: BoundedExecutor, gate: Gate) -> None:
    tasks = await fill(executor, gate)
    with pytest.raises(Full):
        await asyncio.to_thread(lambda: executor.call(gate.work, 9, when_full="refuse"))
    waiting = asyncio.create_task(asyncio.to_thread(lambda: executor.call(gate.work, 9, when_full="wait")))
    await asyncio.sleep(0.05)
    assert executor.waiting == 2
    gate.open.set()
    assert await waiting == 9
    await asyncio.gather(*tasks)


async def test_a_blocking_call_on_the_event_loop_is_a_bug(executor: BoundedExecutor) -> None:
    with pytest.raises(RuntimeError, match="event loop"):
        executor.call(int)
    with pytest.raises(RuntimeError, match="event loop"):
        executor.submit(int, on_done=lambda result, error: None)
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell() -> None:
        loop.call_soon_threadsafe(done.set)

    executor.submit(int, on_done=lambda *_: tell(), when_full="refuse")
    await asyncio.wait_for(done.wait(), 5)


async def test_a_lane_may_block_its_own_loop_but_not_one_that_awaits_runs(single: BoundedExecutor, gate: Gate) -> None:
    fill_single(single, gate)

    async def lane() -> str:
        return single.call(lambda: threading.current_thread().name, lane=True)

    running = asyncio.create_task(asyncio.to_thread(asyncio.run, lane()))
    await asyncio.sleep(0.05)
    gate.open.set()
    assert not (await running).startswith("test-")
    assert await single.run(int, "7") == 7
    with pytest.raises(RuntimeError, match="event loop"):
        await lane()


async def test_work_that_hands_in_work_and_waits_is_a_bug(executor: BoundedExecutor) -> None:
    with pytest.raises(RuntimeError, match="lock up"):
        await executor.run(executor.call, int)


async def test_work_that_a_caller_runs_may_not_hand_in_work_and_wait_either(
    single: BoundedExecutor, gate: Gate
) -> None:
    fill_single(single, gate)
    calling = asyncio.create_task(asyncio.to_thread(single.call, single.call, int))
    await asyncio.sleep(0.05)
    gate.open.set()
    with pytest.raises(RuntimeError, match="lock up"):
        await calling


async def test_cancelled_waiting_work_never_runs(executor: BoundedExecutor, gate: Gate) -> None:
    tasks = await fill(executor, gate)
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    assert tasks[2].cancelled()
    assert executor.waiting == 1
    gate.open.set()
    assert await asyncio.gather(*tasks[:2], tasks[3]) == [0, 1, 3]
    assert 2 not in gate.started


async def test_cancelling_running_work_frees_the_asker_and_the_worker_goes_on(
    executor: BoundedExecutor, gate: Gate
) -> None:
    tasks = await fill(executor, gate)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    gate.open.set()
    assert await asyncio.gather(*tasks[1:]) == [1, 2, 3]
    assert await executor.run(int, "7") == 7


@pytest.mark.parametrize("error", [BadRequest("no"), ValueError("bug"), StopIteration(), SystemExit(3)])
async def test_errors_reach_the_asker_and_the_worker_survives(executor: BoundedExecutor, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises((type(error), RuntimeError)):
        await executor.run(fail)
    assert await executor.run(int, "7") == 7


async def test_closing_fails_waiting_work_joins_the_workers_and_refuses_more(
    executor: BoundedExecutor, gate: Gate
) -> None:
    tasks = await fill(executor, gate)
    closing = asyncio.create_task(asyncio.to_thread(executor.close))
    with pytest.raises(EngineError, match="closed"):
        await tasks[2]
    gate.open.set()
    await closing
    assert [await t for t in tasks[:2]] == [0, 1]
    assert isinstance(tasks[3].exception(), EngineError)
    assert not [t for t in threading.enumerate() if t.name.startswith("test-")]
    with pytest.raises(EngineError, match="closed"):
        await executor.run(int)
    executor.close()


def test_a_result_for_a_loop_that_is_gone_harms_nobody(executor: BoundedExecutor, gate: Gate) -> None:
    async def leave() -> None:
        asyncio.create_task(executor.run(gate.work, 1))  # noqa: RUF006 - abandoned on purpose
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    gate.open.set()
    assert executor.call(int, "7") == 7


def test_a_failing_callback_does_not_end_the_worker(
    executor: BoundedExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(result: Any, error: BaseException | None) -> None:
        raise KeyError("bug")

    executor.submit(int, on_done=bug)
    assert executor.call(int, "7") == 7
    assert executor.call(int, "8") == 8
    end_s = time.monotonic() + 5  # another worker answered; the first may still be writing its log line
    while "a callback failed" not in caplog.text and time.monotonic() < end_s:
        time.sleep(0.01)
    assert "a callback failed" in caplog.text


def test_events_and_metrics_tell_the_same(gate: Gate) -> None:
    emit = RecordingEmit()
    executor = BoundedExecutor("seen", 1, 0.1, emit=emit, max_waiting=1)
    try:
        done = [threading.Event() for _ in range(2)]
        for n, event in enumerate(done):
            executor.submit(gate.work, n, on_done=setter(event))
            gate.until_started(1)
        with pytest.raises(Full):
            executor.call(int, when_full="refuse")
        metrics = executor.metrics()
        assert (metrics.running, metrics.waiting, metrics.capacity, metrics.peak_waiting) == (1, 1, 1, 1)
        assert metrics.service_s is None
        gate.open.set()
        assert all(event.wait(5) for event in done)
    finally:
        executor.close()
    outcomes = [e.outcome for e in emit.events if isinstance(e, QueueSampled)]
    assert sorted(outcomes) == ["done", "done", "queued", "queued", "refused"]
    assert executor.metrics().service_s is not None


def test_many_threads_lose_and_double_nothing() -> None:
    """8 threads, 4 workers, 2,000 pieces of work with every policy; the queue never passes its bound."""
    executor = BoundedExecutor("crowd", 4, 0.001, max_waiting=5, cores=2)
    counted: list[int] = []
    refused: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> int:
        with lock:
            counted.append(number)
        return number

    def caller(first: int) -> None:
        rng = random.Random(first)
        for number in range(first, first + 250):
            when_full: Any = rng.choice(["caller_runs", "refuse", "wait"])
            try:
                assert executor.call(work, number, when_full=when_full) == number
            except Full:
                with lock:
                    refused.append(number)

    threads = [threading.Thread(target=caller, args=(250 * n,)) for n in range(8)]
    run_all(threads)
    executor.close()
    assert sorted(counted + refused) == list(range(2000))
    assert executor.metrics().peak_waiting <= 5 + 4, "in each place a caller may have work of its own"
    assert (executor.running, executor.waiting) == (0, 0)


async def test_cancelling_at_any_moment_loses_no_worker() -> None:
    executor = BoundedExecutor("churn", 2, 1.0, max_waiting=50)
    rng = random.Random(1)
    for _ in range(200):
        task = asyncio.create_task(executor.run(time.sleep, 0.0005))
        await asyncio.sleep(rng.choice([0, 0.0002, 0.0006, 0.001]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await asyncio.gather(*(executor.run(int, str(n)) for n in range(20))) == list(range(20))
    executor.close()
    assert (executor.running, executor.waiting) == (0, 0)


def setter(event: threading.Event) -> OnDone:
    def done(result: Any, error: BaseException | None) -> None:
        event.set()

    return done


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_threads_start_with_the_first_work_only() -> None:
    before = threading.active_count()
    executor = BoundedExecutor("lazy", 4)
    assert threading.active_count() == before
    assert executor.call(int, "3") == 3
    assert threading.active_count() == before + 1
    executor.close()


async def test_a_new_wait_target_holds_at_once() -> None:
    emit = RecordingEmit()
    executor = BoundedExecutor("test", 1, 0.1, emit=emit, cores=1)
    try:
        for _ in range(3):
            await executor.run(time.sleep, 0.02)
        small = executor.capacity
        executor.set_wait_target(1.0)
        assert executor.capacity >= 5 * small
        executor.set_wait_target(0.001)
        assert executor.capacity == 1
        with pytest.raises(ValueError, match="above 0"):
            executor.set_wait_target(0.0)
    finally:
        executor.close()


def test_who_waits_for_room_gets_it_from_a_longer_wait_target(gate: Gate) -> None:
    executor = BoundedExecutor("test", 1, 0.02, cores=1)
    try:
        executor.call(time.sleep, 0.02)
        threads = [
            threading.Thread(target=executor.call, args=(gate.work, n), kwargs={"when_full": "wait"}) for n in range(3)
        ]
        for thread in threads:
            thread.start()
        gate.until_started(1)
        assert executor.waiting == 1
        executor.set_wait_target(5.0)
        end_s = time.monotonic() + 5
        while executor.waiting < 2 and time.monotonic() < end_s:
            time.sleep(0.002)
        assert executor.waiting == 2
        gate.open.set()
        for thread in threads:
            thread.join()
    finally:
        executor.close()


def test_threads_of_a_process_of_ours_hand_over_soon() -> None:
    before_s = sys.getswitchinterval()
    try:
        hand_over_soon()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(before_s)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of single threads are Linux's")
async def test_workers_stand_back_behind_what_the_process_was_started_with() -> None:
    executor = BoundedExecutor("later", 1, niceness=3)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    try:
        assert await executor.run(priority) == min(LAST_NICENESS, priority() + 3)
    finally:
        executor.close()
