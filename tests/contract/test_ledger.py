"""One suite over every Ledger: memory, SQLite (two openings of one folder), Redis (two clients of a real server)."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import frozen

from gateway.ledger import Bill, Change, Draw, Ledger, LedgerError, MemoryLedger
from gateway.redis_ledger import RedisLedger
from gateway.sqlite_ledger import SqliteLedger
from protocol.clock import wall_now
from tests.conftest import RedisServer


@frozen
class Two:
    """Two views of one ledger, as two processes have them."""

    one: Ledger
    other: Ledger


@pytest.fixture(params=("memory", "sqlite", "redis"))
async def two(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Two]:
    if request.param == "memory":
        ledger = MemoryLedger(time.monotonic)
        found = Two(ledger, ledger)
    elif request.param == "sqlite":
        found = Two(SqliteLedger(tmp_path, wall_now), SqliteLedger(tmp_path, wall_now))
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        found = Two(RedisLedger(server.url), RedisLedger(server.url))
    yield found
    await found.one.close()
    await found.other.close()


def draw(wanted: int, least: int = 1, *, cap: int = 100, slot: int = 20, span: int = 1, dimension: str = "day") -> Draw:
    return Draw("acme", dimension, slot, span, cap, wanted, least)  # type: ignore[arg-type]


async def test_two_processes_together_never_draw_more_than_the_cap(two: Two) -> None:
    async def take(ledger: Ledger) -> int:
        taken = 0
        for _ in range(40):
            (drawn,) = await ledger.draw([draw(9, 3)])
            assert drawn.granted == 0 or 3 <= drawn.granted <= 9
            taken += drawn.granted
        return taken

    first, second = await asyncio.gather(take(two.one), take(two.other))
    taken = await two.one.taken("acme", "day", 20)
    assert first + second == taken
    assert 98 <= taken <= 100, "less than `least` may stay over, nothing may go beyond"


async def test_a_draw_says_how_much_is_left_for_all(two: Two) -> None:
    assert [(d.granted, d.room) for d in await two.one.draw([draw(10)])] == [(10, 90)]
    assert [(d.granted, d.room) for d in await two.other.draw([draw(10)])] == [(10, 80)]
    assert [(d.granted, d.room) for d in await two.other.draw([draw(200, 90)])] == [(0, 80)], "not even the least"


async def test_near_the_cap_no_process_hoards_the_rest(two: Two) -> None:
    await two.one.change([Change("acme", "day", 20, 80)])
    assert (await two.one.draw([draw(20, 2)]))[0].granted == 10
    assert (await two.other.draw([draw(20, 8)]))[0].granted == 8


async def test_a_sliding_window_counts_all_its_slots_and_forgets_older_ones(two: Two) -> None:
    for slot in (10, 11, 12):
        assert (await two.one.draw([draw(30, 30, slot=slot, span=3, dimension="tokens")]))[0].granted == 30
    assert (await two.other.draw([draw(30, 30, slot=12, span=3, dimension="tokens")]))[0].granted == 0
    assert (await two.other.draw([draw(30, 30, slot=13, span=3, dimension="tokens")]))[0].granted == 30


async def test_slots_of_a_clock_that_was_set_back_do_not_block_for_ever(two: Two) -> None:
    far = 10_000
    assert (await two.one.draw([draw(100, 100, slot=far, span=3, dimension="tokens")]))[0].granted == 100
    assert (await two.one.draw([draw(100, 100, slot=10, span=3, dimension="tokens")]))[0].granted == 100


async def test_days_and_tenants_are_counted_apart(two: Two) -> None:
    assert (await two.one.draw([draw(100, 100)]))[0].granted == 100
    assert (await two.one.draw([draw(100, 100, slot=21)]))[0].granted == 100
    assert (await two.one.draw([draw(100, 100, dimension="month")]))[0].granted == 100
    other = Draw("globex", "day", 20, 1, 100, 100, 100)
    assert (await two.other.draw([other]))[0].granted == 100


async def test_what_is_given_back_can_be_drawn_again_and_no_count_falls_below_zero(two: Two) -> None:
    await two.one.draw([draw(100, 100)])
    await two.other.change([Change("acme", "day", 20, -40), Change("acme", "tokens", 3, -5)])
    assert await two.one.taken("acme", "day", 20) == 60
    await two.one.change([Change("acme", "day", 20, -1000)])
    assert await two.other.taken("acme", "day", 20) == 0
    assert await two.other.taken("acme", "tokens", 3) == 0


async def test_what_was_used_beyond_a_block_counts_even_over_the_cap(two: Two) -> None:
    await two.one.draw([draw(100, 100)])
    await two.one.change([Change("acme", "day", 20, 7)])
    assert await two.other.taken("acme", "day", 20) == 107
    assert (await two.other.draw([draw(1)]))[0].granted == 0


async def test_money_is_counted_exactly_up_to_the_largest_budget(two: Two) -> None:
    cap = 1_000_000 * 10**9
    assert (await two.one.draw([draw(cap // 2 - 1, 1, cap=cap)]))[0].granted == cap // 2 - 1
    await two.one.change([Change("acme", "day", 20, 1)])
    assert await two.other.taken("acme", "day", 20) == cap // 2
    assert (await two.other.draw([draw(cap // 2, cap // 2, cap=cap)]))[0].room == 0


async def test_places_are_shared_and_come_back_when_their_holder_dies(two: Two) -> None:
    assert await two.one.lease("acme", "a", 10, 8, 0.4) == 8
    assert await two.other.lease("acme", "b", 10, 8, 30.0) == 2
    assert await two.one.lease("acme", "a", 10, 3, 0.4) == 3, "a lease replaces the holder's earlier one"
    assert await two.other.lease("acme", "b", 10, 8, 30.0) == 7
    await asyncio.sleep(0.5)
    assert await two.other.lease("acme", "b", 10, 12, 30.0) == 10, "the dead holder's places are free, the cap holds"
    assert await two.other.lease("acme", "b", 10, 0, 30.0) == 0
    assert await two.one.lease("acme", "c", 10, 10, 30.0) == 10


async def test_asking_again_does_not_prolong_the_places_of_others(two: Two) -> None:
    """One expiry for all, refreshed by each increment, made a leak eternal."""
    await two.one.lease("acme", "dead", 4, 4, 0.4)
    end_s = time.monotonic() + 0.6
    while time.monotonic() < end_s:
        await two.other.lease("acme", "b", 4, 1, 30.0)
        await asyncio.sleep(0.05)
    assert await two.other.lease("acme", "b", 4, 4, 30.0) == 4


async def test_bills_add_up_over_processes_by_day(two: Two) -> None:
    await two.one.bill([Bill("acme", 20, 1, 10, 5, 1000), Bill("acme", 22, 1, 1, 1, 1), Bill("globex", 20, 9)])
    await two.other.bill([Bill("acme", 20, 2, 20, 10, 2000)])
    assert list(await two.one.bills("acme", 19, 21)) == [Bill("acme", 20, 3, 30, 15, 3000)]
    assert [bill.day for bill in await two.other.bills("acme", 0, 30)] == [20, 22]


async def test_bills_are_kept_for_a_year_and_a_little(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path, wall_now)
    for day in (10, 20, 415):
        await ledger.bill([Bill("acme", day, 1)])
    assert [bill.day for bill in await ledger.bills("acme", 0, 500)] == [20, 415]
    await ledger.bill([])
    await ledger.close()


async def test_budgets_survive_a_restart_of_the_process(tmp_path: Path) -> None:
    before = SqliteLedger(tmp_path, wall_now)
    await before.draw([draw(60, 60)])
    await before.close()
    after = SqliteLedger(tmp_path, wall_now)
    assert (await after.draw([draw(60, 60)]))[0].granted == 0
    assert (await after.draw([draw(40, 40)]))[0].granted == 40
    await after.close()


async def test_what_is_drawn_at_once_counts_like_any_other_and_may_be_refused(two: Two) -> None:
    drawn = two.one.draw_now([draw(60, 60, dimension="requests")])
    if drawn is None:
        assert await two.other.taken("acme", "requests", 20) == 0, "nothing was drawn"
        return
    assert [(one.granted, one.room) for one in drawn] == [(60, 40)]
    other = two.other.draw_now([draw(60, 60, dimension="requests"), draw(10, dimension="tokens")])
    assert other is not None and [one.granted for one in other] == [0, 10]


async def test_money_on_a_synced_disk_is_never_drawn_at_once(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path, wall_now)
    assert ledger.draw_now([draw(5, dimension="requests"), draw(5)]) is None
    assert await ledger.taken("acme", "requests", 20) == 0
    await ledger.close()


async def test_what_requests_wait_for_is_drawn_without_a_thread(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path, wall_now)
    asked = ledger.draw([draw(5, dimension="requests"), draw(7, dimension="tokens")])
    with pytest.raises(StopIteration) as ended:  # it ends without having waited for anything
        asked.send(None)
    assert [drawn.granted for drawn in ended.value.value] == [5, 7]
    assert await ledger.taken("acme", "tokens", 20) == 7
    await ledger.close()


async def test_a_file_that_another_process_holds_is_waited_for_in_a_thread(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path, wall_now)
    other = sqlite3.connect(tmp_path / "windows.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert ledger.draw_now([draw(5, dimension="requests")]) is None
    asked = asyncio.create_task(ledger.draw([draw(5, dimension="requests")]))  # type: ignore[arg-type]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asked.done()
    other.execute("ROLLBACK")
    assert (await asked)[0].granted == 5
    other.close()
    await ledger.close()


async def test_a_redis_that_went_away_is_an_error_with_its_next_step(redis_server: RedisServer) -> None:
    ledger = RedisLedger(redis_server.url)
    await ledger.draw([draw(1)])
    redis_server.kill()
    with pytest.raises(LedgerError, match="check that the server is up"):
        await ledger.draw([draw(1)])
    await ledger.close()
