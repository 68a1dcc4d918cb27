"""Room of one stream: whoever leaves the queue, room is neither lost nor given twice."""

from __future__ import annotations

import asyncio

import pytest

from engines.frame_connection import Room


async def test_a_waiter_that_is_cancelled_as_its_turn_comes_passes_it_on() -> None:
    room = Room(1, 100)
    await room.take(10)
    waiter, next_one = asyncio.create_task(room.take(10)), asyncio.create_task(room.take(10))
    await asyncio.sleep(0)
    waiter.cancel()
    room.give(10)
    with pytest.raises(asyncio.CancelledError):
        await waiter
    async with asyncio.timeout(1):
        await next_one
    room.give(10)
    async with asyncio.timeout(1):
        await room.take(100)


async def test_a_waiter_that_is_cancelled_after_its_turn_came_gives_it_back() -> None:
    room = Room(1, 100)
    await room.take(10)
    waiter = asyncio.create_task(room.take(10))
    await asyncio.sleep(0)
    room.give(10)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    async with asyncio.timeout(1):
        await room.take(100)
