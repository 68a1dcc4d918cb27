"""One timer for many waits: each has its own limit, and cancellation from outside stays cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from links.patience import Patience


async def _coming(seconds: float, value: int = 7) -> int:
    await asyncio.sleep(seconds)
    return value


async def test_what_comes_in_time_is_given() -> None:
    patience = Patience()
    assert await patience.wait(_coming(0.0), 5.0) == 7
    assert await patience.wait(_coming(0.0, 8)) == 8
    patience.close()


@pytest.mark.parametrize("limits", [(0.02,), (5.0, 0.02), (0.01, 0.03), (0.02, 5.0, 0.02)])
async def test_each_wait_has_its_own_limit(limits: tuple[float, ...]) -> None:
    patience = Patience()
    for seconds in limits[:-1]:
        assert await patience.wait(_coming(0.0), seconds) == 7
    await asyncio.sleep(0.02)
    async with asyncio.timeout(3):
        with pytest.raises(TimeoutError):
            await patience.wait(_coming(30.0), limits[-1])
    assert await patience.wait(_coming(0.0), 5.0) == 7
    patience.close()


async def test_an_earlier_limit_does_not_end_a_later_wait() -> None:
    patience = Patience()
    assert await patience.wait(_coming(0.0), 0.02) == 7
    assert await patience.wait(_coming(0.08), 5.0) == 7
    assert await patience.wait(_coming(0.0), 0.02) == 7
    assert await patience.wait(_coming(0.08)) == 7
    patience.close()


async def test_it_can_be_ended_from_outside_and_only_a_wait_under_way_is() -> None:
    patience = Patience()
    patience.end()
    waiting = asyncio.create_task(patience.wait(_coming(30.0)))
    await asyncio.sleep(0)
    patience.end()
    patience.end()
    with pytest.raises(TimeoutError):
        await waiting
    assert waiting.cancelling() == 0


async def test_who_is_cancelled_is_cancelled() -> None:
    patience = Patience()

    async def waits(coming: Awaitable[int]) -> int:
        return await patience.wait(coming, 5.0)

    waiting = asyncio.create_task(waits(_coming(30.0)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    patience.close()


async def test_waits_may_come_from_one_task_after_the_other() -> None:
    patience = Patience()
    for number in range(3):
        assert await asyncio.create_task(patience.wait(_coming(0.0, number), 0.5)) == number
    patience.close()
