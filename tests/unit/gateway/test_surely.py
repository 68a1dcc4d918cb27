"""Endings go on when whoever waits for them is cancelled, and happen once."""

from __future__ import annotations

import asyncio
import gc

import pytest

from gateway.surely import Once


class Held:
    """Gives back in several turns of the loop, known to nobody but its ending."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.ending = Once()

    async def aclose(self) -> None:
        await self.ending.run(self._close())

    async def _close(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)
        self._log.append("given back")


async def test_a_handler_that_is_cancelled_again_while_it_tidies_up_gives_everything_back() -> None:
    """A server cancels a handler when its client leaves, and once more when the connection is lost."""
    log: list[str] = []

    async def handler() -> None:
        held = Held(log)
        try:
            await asyncio.Event().wait()
        finally:
            await held.aclose()

    task = asyncio.create_task(handler())
    for _ in range(3):
        await asyncio.sleep(0.002)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and log == []
    del task
    gc.collect()
    async with asyncio.timeout(2):
        while not log:
            await asyncio.sleep(0.002)
    assert log == ["given back"]


async def test_whoever_asks_again_waits_for_the_same_ending() -> None:
    log: list[str] = []
    held = Held(log)
    await asyncio.gather(held.aclose(), held.aclose())
    await held.aclose()
    assert log == ["given back"]


async def test_an_ending_that_waits_for_nothing_is_over_in_the_turn_in_which_it_is_asked_for() -> None:
    log: list[str] = []

    async def give_back() -> None:
        log.append("given back")
        raise OSError("the disk is full")

    ending = Once()
    for _ in range(2):
        run = ending.run(give_back())
        with pytest.raises(OSError, match="full"):
            run.send(None)
    assert log == ["given back"]
