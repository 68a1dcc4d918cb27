"""Starts in time, first to speak wins, losers are cancelled and closed."""

from __future__ import annotations

import asyncio

import pytest

from engines.fakes_text import FakeTextEngine
from gateway.race import AllFailed, Cleanup, Live, race
from gateway.targets import Target
from protocol.errors import LinkClosed, MidstreamError
from tests.unit.gateway.streams import target

TARGETS = {name: target(name, FakeTextEngine(name=name)) for name in ("device", "cloud", "peer")}


class Script:
    """Begins by name: seconds until it speaks, or the error it raises."""

    def __init__(self, **plays: float | Exception) -> None:
        self.plays = plays
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.failures: list[str] = []

    async def begin(self, one: Target) -> Live:
        self.begun.append(one.name)
        play = self.plays[one.name]
        try:
            if isinstance(play, Exception):
                raise play
            await asyncio.sleep(play)
        except BaseException:
            self.ended.append(one.name)
            raise
        return Live(one, self, self, None, 0.0)  # type: ignore[arg-type]

    async def close(self) -> None:
        self.ended.append("closed")

    def failed(self, one: Target, err: MidstreamError) -> None:
        self.failures.append(one.name)

    async def run(self, *starts: tuple[str, float]) -> Live:
        cleanup = Cleanup()
        try:
            return await race([(TARGETS[name], after_s) for name, after_s in starts], self.begin, cleanup, self.failed)
        finally:
            await cleanup.drain()


async def test_the_second_starts_only_when_the_first_has_not_spoken() -> None:
    script = Script(device=0.01, cloud=0.0)
    assert (await script.run(("device", 0.0), ("cloud", 5.0))).target.name == "device"
    assert script.begun == ["device"]


async def test_the_first_to_speak_wins_and_the_loser_is_cancelled() -> None:
    script = Script(device=30.0, cloud=0.0)
    assert (await script.run(("device", 0.0), ("cloud", 0.02))).target.name == "cloud"
    assert script.ended == ["device"]


async def test_an_error_starts_the_next_at_once() -> None:
    script = Script(device=LinkClosed("gone"), cloud=0.0)
    assert (await script.run(("device", 0.0), ("cloud", 60.0))).target.name == "cloud"
    assert script.failures == ["device"]


async def test_when_all_fail_all_errors_are_told_in_order() -> None:
    script = Script(device=LinkClosed("one"), cloud=LinkClosed("two"))
    with pytest.raises(AllFailed) as caught:
        await script.run(("device", 0.0), ("cloud", 60.0))
    assert [(name, err.message) for name, err in caught.value.errors] == [("device", "one"), ("cloud", "two")]


async def test_nothing_to_start_is_a_failure_of_all() -> None:
    with pytest.raises(AllFailed):
        await Script().run()


async def test_two_that_speak_in_the_same_moment_leave_one() -> None:
    script = Script(device=0.0, cloud=0.0)
    winner = await script.run(("device", 0.0), ("cloud", 0.0))
    assert winner.target.name == "device"
    assert script.ended in (["closed"], ["cloud"])


async def test_a_bug_is_not_taken_for_a_failed_engine() -> None:
    script = Script(device=RuntimeError("bug"), cloud=0.0)
    with pytest.raises(RuntimeError, match="bug"):
        await script.run(("device", 0.0), ("cloud", 60.0))


async def test_cancelling_the_race_cancels_all_runners() -> None:
    script = Script(device=30.0, cloud=30.0)
    running = asyncio.create_task(script.run(("device", 0.0), ("cloud", 0.0)))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(script.ended) == ["cloud", "device"]
