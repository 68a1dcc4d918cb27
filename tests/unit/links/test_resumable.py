"""Work that is left and gone on with: the same as a task of its own, without its turns."""

from __future__ import annotations

import asyncio
import time

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
