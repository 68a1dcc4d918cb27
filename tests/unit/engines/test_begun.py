"""Work that is begun at once and gone on with by another task: no cancel but that task's reaches it."""

from __future__ import annotations

import asyncio

import pytest

from engines.begun import Begun


class Work:
    """Waits for `room`, then for a turn of the loop."""

    def __init__(self) -> None:
        self.room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.seen: list[str] = []

    async def run(self) -> None:
        self.seen.append("begun")
        try:
            await self.room
            self.seen.append("room")
            await asyncio.sleep(0)
        except BaseException as err:
            self.seen.append(type(err).__name__)
            raise
        self.seen.append("ended")


async def _rest(begun: Begun) -> None:
    await begun


async def test_work_that_does_not_wait_is_done_at_once() -> None:
    work = Work()
    begun = Begun(_nothing(work))
    assert begun.done and work.seen == ["nothing"]
    await begun


async def _nothing(work: Work) -> None:
    work.seen.append("nothing")


@pytest.mark.parametrize("early", [False, True])
async def test_another_task_goes_on_where_it_stands(early: bool) -> None:
    work = Work()
    begun = Begun(work.run())
    assert not begun.done and work.seen == ["begun"]
    rest = asyncio.create_task(_rest(begun))
    if not early:
        await asyncio.sleep(0)
    work.room.set_result(None)
    async with asyncio.timeout(1):
        await rest
    assert begun.done and work.seen == ["begun", "room", "ended"]


async def test_a_future_that_others_wait_for_too_may_be_handed_on() -> None:
    """As the drain of a connection is: every waiter takes the same future."""
    work = Work()
    begun = Begun(work.run())
    other = asyncio.create_task(_waits(work.room))
    await asyncio.sleep(0)
    rest = asyncio.create_task(_rest(begun))
    await asyncio.sleep(0)
    work.room.set_result(None)
    async with asyncio.timeout(1):
        await asyncio.gather(other, rest)
    assert work.seen[-1] == "ended"


async def _waits(future: asyncio.Future[None]) -> None:
    await future


async def test_who_began_it_may_be_cancelled() -> None:
    work, made = Work(), []

    async def makes() -> None:
        made.append(Begun(work.run()))
        await asyncio.Event().wait()

    maker = asyncio.create_task(makes())
    await asyncio.sleep(0)
    maker.cancel()
    await asyncio.gather(maker, return_exceptions=True)
    work.room.set_result(None)
    await made[0]
    assert work.seen == ["begun", "room", "ended"]


async def test_a_cancel_of_the_task_that_goes_on_reaches_it() -> None:
    work = Work()
    rest = asyncio.create_task(_rest(Begun(work.run())))
    await asyncio.sleep(0)
    rest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rest
    assert work.seen == ["begun", "CancelledError"]


async def test_what_it_raises_is_heard_by_who_awaits_it() -> None:
    async def fails() -> None:
        raise ValueError("at once")

    begun = Begun(fails())
    assert not begun.done
    with pytest.raises(ValueError, match="at once"):
        await begun
    work = Work()
    begun = Begun(work.run())
    work.room.set_exception(ValueError("later"))
    with pytest.raises(ValueError, match="later"):
        await begun
    assert not work.room.cancelled() and work.seen == ["begun", "ValueError"]


async def test_dropped_work_lets_go_at_once() -> None:
    work = Work()
    begun = Begun(work.run())
    begun.drop()
    assert work.seen == ["begun", "CancelledError"]
    begun.drop()


async def test_dropped_work_that_would_go_on_waiting_is_closed() -> None:
    seen: list[str] = []

    async def stays() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("closed")

    Begun(stays()).drop()
    assert seen == ["closed"]
