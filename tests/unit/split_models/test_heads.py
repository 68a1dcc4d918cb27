"""Heads are ready before they are used, and left out while they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attrs import define, field

from engines.executor import BoundedExecutor
from engines.fakes_tensor import MAGIC, FakeTensorRuntime
from engines.local import LocalEndpoint
from engines.pool import ModelPool, estimate_bytes
from protocol.clock import FakeClock
from protocol.errors import EngineError, NotFound
from split_models.heads import FIRST_PAUSE_S, LONGEST_PAUSE_S, NOT_HERE_S, Heads


@define(eq=False)
class House:
    """Heads over a real endpoint and pool, with room for two."""

    folder: Path
    runtime: FakeTensorRuntime = field(factory=lambda: FakeTensorRuntime(rows=1))
    clock: FakeClock = field(factory=lambda: FakeClock(100.0))
    warm: dict[str, float] = field(factory=dict)
    tails: list[str] = field(factory=list)
    tasks: list[asyncio.Task[None]] = field(factory=list)
    executor: BoundedExecutor = field(factory=lambda: BoundedExecutor("heads", 1, 1.0))
    pool: ModelPool = field(init=False)
    local: LocalEndpoint = field(init=False)
    heads: Heads = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pool = ModelPool(2 * estimate_bytes(self.file("a")) + 1)
        self.local = LocalEndpoint(None, self.pool, self.executor, {"fake": self.runtime})
        self.heads = Heads(self.local, self.clock, self.spawn, self.warm.__setitem__)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))

    def file(self, name: str, data: bytes = MAGIC) -> Path:
        file = self.folder / f"{name}.fake"
        file.write_bytes(data)
        return file

    async def want(self, name: str) -> bool:
        """Ask for a head; whether it is ready once the work is done."""

        async def load_tail() -> None:
            self.tails.append(name)

        self.heads.want(name, load_tail)
        await asyncio.gather(*self.tasks)
        return self.heads.ready(name)


@pytest_asyncio.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    for name in "abc":
        made.local.register(name, made.file(name))
    yield made
    await made.local.close()
    made.executor.close()
    made.pool.close()


async def test_a_head_is_ready_once_it_has_run_and_its_tail_was_asked_for(house: House) -> None:
    assert not house.heads.ready("a")
    assert await house.want("a")
    assert house.runtime.loaded[0].runs > 0
    assert house.tails == ["a"]
    assert set(house.warm) == {"a"}
    assert await house.want("a")
    assert len(house.runtime.loaded) == 1


async def test_a_head_that_is_wanted_by_many_requests_is_loaded_once(house: House) -> None:
    await asyncio.gather(*(house.want("a") for _ in range(5)))
    assert len(house.runtime.loaded) == 1


async def test_the_least_recently_used_head_goes_and_comes_back(house: House) -> None:
    """The whole model is pinned, there is room for one head."""
    await house.heads.keep("c")
    assert await house.want("a")
    assert await house.want("b")
    assert [house.local.loaded(name) for name in "abc"] == [False, True, True]
    assert not house.heads.ready("a"), "a request would wait for a load"
    assert await house.want("a")
    assert house.local.loaded("c")


async def test_a_head_that_cannot_be_loaded_is_left_out_and_tried_again(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "midstream.split")
    house.file("a", b"damaged")
    pauses = []
    for _ in range(9):
        assert not await house.want("a")
        tried = len(house.tasks)
        began_s = house.clock()
        while len(house.tasks) == tried:
            house.clock.advance(1.0)
            await house.want("a")
        pauses.append(house.clock() - began_s)
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    house.file("a")
    house.clock.advance(LONGEST_PAUSE_S)
    assert await house.want("a")
    house.heads.ran("a", None)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert "left out" in told[0]
    assert "works again" in told[1]


async def test_a_head_that_fails_in_a_request_is_left_out(house: House) -> None:
    assert await house.want("a")
    house.heads.ran("a", EngineError("broken"))
    assert not house.heads.ready("a")
    house.clock.advance(FIRST_PAUSE_S)
    assert house.heads.ready("a")


async def test_without_memory_other_arms_go_on(house: House) -> None:
    """Both places are taken by models that stay; the head is tried again later."""
    await house.heads.keep("b")
    await house.heads.keep("c")
    assert not await house.want("a")
    house.local.unregister("b")
    house.clock.advance(FIRST_PAUSE_S)
    assert await house.want("a")


async def test_a_head_whose_file_is_on_the_way_is_no_failure(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream.split")
    assert not await house.want("d")
    house.local.register("d", house.file("d"))
    house.clock.advance(1.0)
    assert await house.want("d")
    assert not caplog.records


async def test_a_tail_for_late_links_takes_only_room_that_is_free(house: House) -> None:
    """Two have room: a third that is only a spare puts nothing out, and is put out itself by a head."""
    fetched: list[str] = []

    async def fetch() -> None:
        fetched.append("c")

    async def want_rest() -> bool:
        house.heads.want_rest("c", fetch)
        await asyncio.gather(*house.tasks)
        return house.heads.ready("c")

    assert await house.want("a")
    assert await house.want("b")
    assert not await want_rest()
    assert house.heads.ready("a")
    assert house.heads.ready("b")
    house.pool.drop("b")
    house.clock.advance(FIRST_PAUSE_S)
    assert await want_rest()
    assert house.runtime.loaded[-1].runs > 0, "it is warm before it is used"
    with house.pool.try_acquire("a") or pytest.fail("a is here"):
        assert await house.want("b")
    assert not house.heads.ready("c")
    assert fetched == ["c", "c"]


async def test_a_tail_whose_file_is_not_here_is_asked_for_again_soon(house: House) -> None:
    async def fetch() -> None:
        raise NotFound("no link")

    house.heads.want_rest("c", fetch)
    await asyncio.gather(*house.tasks)
    assert not house.heads.ready("c")
    house.clock.advance(NOT_HERE_S)
    house.heads.want_rest("c", _here)
    await asyncio.gather(*house.tasks)
    assert house.heads.ready("c")


async def _here() -> None:
    """The file is here."""
