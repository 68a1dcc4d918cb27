"""Requests that come together begin one by one; what they have begun moves on in between."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from links.turns import MOST_GIVEN_WAY, Arrivals, Turns


async def test_who_comes_alone_does_not_wait() -> None:
    turns = Turns()
    for _ in range(3):
        mine = turns.mine()
        try:
            mine.send(None)
        except StopIteration:
            await asyncio.sleep(0.001)
            continue
        raise AssertionError("it waited")


async def test_the_first_of_many_have_their_next_step_before_the_last_begin() -> None:
    turns, seen = Turns(), []

    async def request(number: int) -> None:
        await turns.mine()
        seen.append(("begun", number))
        await asyncio.sleep(0)  # what it asked for comes with the next turn
        seen.append(("spoke", number))

    await asyncio.gather(*(request(number) for number in range(8)))
    assert [number for what, number in seen if what == "begun"] == list(range(8)), "in the order of coming"
    for number in range(6):
        assert seen.index(("spoke", number)) < seen.index(("begun", number + 2))


async def test_what_has_come_for_those_before_goes_before_the_next_begin() -> None:
    turns, loop, seen = Turns(), asyncio.get_running_loop(), []

    async def request(number: int) -> None:
        await turns.mine()
        seen.append(("begun", number))
        came: asyncio.Future[None] = loop.create_future()
        loop.call_soon(arrive, came)  # in the turn in which the next one is woken
        await came
        seen.append(("spoke", number))

    def arrive(came: asyncio.Future[None]) -> None:
        Arrivals.count += 1
        came.set_result(None)

    await asyncio.gather(*(request(number) for number in range(6)))
    for number in range(5):
        assert seen.index(("spoke", number)) < seen.index(("begun", number + 1))


async def test_a_constant_stream_of_arrivals_keeps_nobody_waiting_for_long() -> None:
    turns, loop, begun = Turns(), asyncio.get_running_loop(), []
    turn = 0

    def arrive() -> None:
        nonlocal turn
        turn += 1
        Arrivals.count += 1
        if len(begun) < 4:
            loop.call_soon(arrive)

    async def request() -> None:
        await turns.mine()
        begun.append(turn)

    arrive()
    await asyncio.gather(*(request() for _ in range(4)))
    assert max(after - before for before, after in pairwise(begun)) <= 2 + MOST_GIVEN_WAY + 1


async def test_a_request_that_was_cancelled_takes_no_turn() -> None:
    turns, seen = Turns(), []

    async def request(number: int) -> None:
        await turns.mine()
        seen.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.wait(tasks)
    assert seen == [0, 4]
    await asyncio.wait_for(turns.mine(), 5.0)


async def test_who_leaves_without_being_cancelled_takes_no_turn_along() -> None:
    turns = Turns()
    await turns.mine()
    gone = turns.mine()
    gone.send(None)
    gone.close()
    done, left = await asyncio.wait([asyncio.create_task(turns.mine()) for _ in range(2)], timeout=5.0)
    assert len(done) == 2 and not left, "who comes after it has its turn"
