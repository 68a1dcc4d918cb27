"""Work that is left and gone on with: the same as a task of its own, without its turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from links.patience import Patience
from links.resumable import Resumable


async def test_it_begins_and_ends_in_the_turns_of_who_waits() -> None:
    seen: list[str] = []
    come: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        seen.append("asked")
        value = await come
        seen.append("came")
        return value

    async def waits() -> int:
        held = Resumable(work())
        assert await held.within(5.0)
        return held.result

    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    assert seen == ["asked"]
    come.set_result(7)
    await asyncio.sleep(0)
    assert seen == ["asked", "came"] and waiting.done() and await waiting == 7


async def test_who_is_out_of_time_goes_and_may_come_back() -> None:
    come, steps = asyncio.Event(), []

    async def work() -> str:
        for step in range(3):
            await asyncio.sleep(0)
            steps.append(step)
        await come.wait()
        return "here"

    held, began_s = Resumable(work()), time.monotonic()
    assert not await held.within(0.02)
    assert time.monotonic() - began_s >= 0.019 and steps == [0, 1, 2]
    assert not await held.within(0.01)
    come.set()
    await asyncio.sleep(0)  # it ended meanwhile, as far as it goes without a waiter
    assert await asyncio.create_task(held.within(5.0)), "from another task too"
    assert await held.within(0.0) and held.result == "here"


async def test_what_it_raises_is_raised_where_it_is_waited_for() -> None:
    come = asyncio.Event()

    async def work() -> None:
        await come.wait()
        raise ValueError("no")

    held = Resumable(work())
    assert not await held.within(0.001)
    come.set()
    with pytest.raises(ValueError, match="no"):
        await held.within(5.0)


async def test_a_failed_future_is_the_works_own_matter() -> None:
    come: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        try:
            await come
        except OSError:
            return "mended"
        return "whole"

    held = Resumable(work())
    assert not await held.within(0.001)
    asyncio.get_running_loop().call_later(0.005, come.set_exception, OSError("broken"))
    assert await held.within(5.0) and held.result == "mended"


async def test_who_waits_is_cancelled_and_the_work_with_them() -> None:
    tidied: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    waiting = asyncio.create_task(Resumable(work()).within(5.0))
    await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert tidied == [True]


async def test_what_was_raised_is_raised_again() -> None:
    async def work() -> None:
        raise ValueError("no")

    held = Resumable(work())
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await held.within(5.0)
    await held.drop()


async def test_work_that_waits_for_nothing_is_left_in_time_too() -> None:
    steps = 0

    async def work() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    held = Resumable(work())
    assert not await asyncio.wait_for(held.within(0.02), 1.0)
    seen = steps
    assert seen > 1 and not await held.within(0.0) and steps == seen + 1
    waiting = asyncio.create_task(held.within(5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_who_is_cancelled_waits_until_the_work_has_tidied_up() -> None:
    tidied: list[bool] = []

    async def child() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.3)
            tidied.append(True)

    async def work() -> None:
        await asyncio.create_task(child())

    waiting = asyncio.create_task(Resumable(work()).within(0.2))
    await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert tidied == [True], "and is not told that the time is over"


@pytest.mark.parametrize("begun", [True, False])
async def test_what_is_dropped_tidies_up(begun: bool) -> None:
    tidied: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.001)
            tidied.append(True)

    held = Resumable(work())
    if begun:
        assert not await held.within(0.001)
    await held.drop()
    await held.drop()
    assert tidied == [True] * begun


async def test_time_limits_inside_of_it_hold() -> None:
    patience = Patience()

    async def work() -> str:
        try:
            await patience.wait(asyncio.sleep(30), 0.02)
        except TimeoutError:
            return "too late"
        return "in time"

    held = Resumable(work())
    assert await held.within(0.005) or await held.within(5.0)
    assert held.result == "too late"
    current = asyncio.current_task()
    assert current is not None and current.cancelling() == 0
    patience.close()


@asynccontextmanager
async def _patient(seconds: float) -> AsyncIterator[None]:
    """As asyncio.timeout, by Patience."""
    patience = Patience()
    forever = asyncio.create_task(asyncio.sleep(30))
    try:
        yield await patience.wait(forever, seconds)
    finally:
        patience.close()
        forever.cancel()


@pytest.mark.parametrize("limit", [asyncio.timeout, _patient])
async def test_a_limit_that_ends_while_nobody_waits_is_the_works_and_nobody_elses(limit: Any) -> None:
    async def work() -> str:
        try:
            async with limit(0.1):
                await asyncio.sleep(30)
        except TimeoutError:
            return "too late"
        return "in time"

    held = Resumable(work())
    assert not await held.within(0.001)
    await asyncio.sleep(0.15)  # a write to a client that is slow
    current = asyncio.current_task()
    assert current is not None and current.cancelling() == 0
    assert await held.within(5.0) and held.result == "too late"


async def test_a_cancelled_waiter_is_told_from_a_limit_that_ends_with_it() -> None:
    patience = Patience()

    async def work() -> None:
        await patience.wait(asyncio.sleep(30))

    waiting = asyncio.create_task(Resumable(work()).within(5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    patience.end()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("raises", [False, True])
async def test_to_the_work_it_is_a_task_and_who_waits_stays_their_own(raises: bool) -> None:
    seen: list[object] = []

    async def work() -> None:
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        seen.append(asyncio.current_task())
        if raises:
            raise ValueError

    held, before = Resumable(work()), asyncio.current_task()
    expected: Any = pytest.raises(ValueError) if raises else nullcontext()
    with expected:
        await held.within(5.0)
    assert seen == [held, held] and asyncio.current_task() is before


async def test_what_is_dropped_cancels_what_it_waits_for() -> None:
    child = asyncio.create_task(asyncio.sleep(30))

    async def work() -> None:
        await child

    held = Resumable(work())
    assert not await held.within(0.001)
    await held.drop()
    assert child.cancelled()


async def test_who_drops_it_may_be_cancelled() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.Event().wait()

    held = Resumable(work())
    assert not await held.within(0.001)
    dropping = asyncio.create_task(held.drop())
    await asyncio.sleep(0.001)
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    await held.drop()
