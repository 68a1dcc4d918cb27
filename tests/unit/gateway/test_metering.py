"""Limits at work on an event loop: many at once, cancellation, a ledger that fails, headers, bills, alerts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from attrs import define

from gateway.context import Caller
from gateway.ledger import Bill, Change, Dimension, Draw, Drawn, LedgerError, MemoryLedger
from gateway.limits import day_of
from gateway.metering import MeteredLimits, Reserved
from gateway.ports import Estimate, Spent
from gateway.quotas import Quota, Tenant
from protocol.clock import wall_now
from protocol.errors import BudgetExceeded, RateLimited, TooLarge
from protocol.events import BudgetAlert, LimitHit, RecordingEmit

ACME = Caller(tenant="acme")


@define(eq=False)
class SlowLedger(MemoryLedger):
    """A ledger some milliseconds away that may be down."""

    down: bool = False
    asked: int = 0

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        self.asked += 1
        await asyncio.sleep(0.005)
        if self.down:
            raise LedgerError("the ledger is down")
        return await super().draw(draws)

    def draw_now(self, draws: Sequence[Draw]) -> None:
        """It is some milliseconds away."""

    async def change(self, changes: Sequence[Change]) -> None:
        if self.down:
            raise LedgerError("the ledger is down")
        await super().change(changes)

    async def bill(self, bills: Sequence[Bill]) -> None:
        if self.down:
            raise LedgerError("the ledger is down")
        await super().bill(bills)

    async def taken(self, account: str, dimension: Dimension, slot: int) -> int:
        return await super().taken(account, dimension, slot)


@define(eq=False)
class At:
    limits: MeteredLimits
    ledger: SlowLedger
    emit: RecordingEmit
    tenants: dict[str, Tenant]

    async def taken_today(self) -> int:
        return await self.ledger.taken("acme", "day", day_of(time.time()))


@asynccontextmanager
async def metered(tenant: Tenant) -> AsyncIterator[At]:
    ledger, emit, tenants = SlowLedger(time.monotonic), RecordingEmit(), {tenant.name: tenant}
    limits = MeteredLimits(
        lambda name: tenants.get(name) or Tenant("open"), ledger, clock=time.monotonic, wall=wall_now, holder="p",
        emit=emit,
    )  # fmt: skip
    await limits.start()
    try:
        yield At(limits, ledger, emit, tenants)
    finally:
        ledger.down = False
        await limits.stop()


def acme(on_budget: str = "refuse", **quota: float) -> Tenant:
    return Tenant("acme", quota=Quota(**quota), on_budget=on_budget)  # type: ignore[arg-type]


async def tried(at: At, estimate: Estimate) -> Reserved | Exception:
    try:
        return await at.limits.reserve(ACME, estimate)
    except (BudgetExceeded, RateLimited) as err:
        return err


async def test_five_hundred_at_once_get_no_more_than_the_cap_by_few_questions() -> None:
    async with metered(acme(usd_per_day=1.0)) as at:
        found = await asyncio.gather(*(tried(at, Estimate("m", 10, 10, 0.01)) for _ in range(500)))
        held = [one for one in found if isinstance(one, Reserved)]
        assert len(held) == 100
        assert all(isinstance(one, BudgetExceeded) for one in found if not isinstance(one, Reserved))
        assert at.ledger.asked < 20
        for one in held:
            await one.settle(Spent(10, 4, money=0.004))
        assert at.limits.reserved("acme") == {"day": 0, "places": 0}
        await at.limits.stop()
        assert await at.taken_today() == 100 * 4_000_000


async def test_a_ledger_that_needs_no_waiting_admits_in_the_turn_of_asking() -> None:
    tenant, ledger = acme(requests_per_s=100.0), MemoryLedger(time.monotonic)
    limits = MeteredLimits(lambda _: tenant, ledger, clock=time.monotonic, wall=wall_now, holder="p")
    for _ in range(30):  # more than one block of them
        asked = limits.reserve(ACME, Estimate("m", 10, 10))
        with pytest.raises(StopIteration) as ended:
            asked.send(None)
        await ended.value.value.settle(Spent(10, 4))
    assert limits.reserved("acme") == {"requests": 0, "places": 0}


async def test_requests_that_waited_for_the_ledger_go_on_one_by_one() -> None:
    async with metered(acme(usd_per_day=1.0)) as at:
        seen: list[tuple[str, int]] = []

        async def request(number: int) -> None:
            one = await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.0001))
            seen.append(("admitted", number))
            await asyncio.sleep(0)  # what it asked for comes with the next turn
            seen.append(("spoke", number))
            await one.release()

        await asyncio.gather(*(request(number) for number in range(8)))
        assert [number for what, number in seen if what == "admitted"] == list(range(8)), "in the order of coming"
        for number in range(6):
            assert seen.index(("spoke", number)) < seen.index(("admitted", number + 2))


async def test_who_waited_for_the_ledger_holds_its_place_before_those_who_came_later() -> None:
    async with metered(acme(max_concurrent=4)) as at:
        first = [asyncio.create_task(tried(at, Estimate("m", 1, 1, 0.0))) for _ in range(4)]
        while not any(task.done() for task in first):
            await asyncio.sleep(0)
        assert at.limits.reserved("acme")["places"] == 4, "the others hold theirs, and wait for their turn only"
        late = await tried(at, Estimate("m", 1, 1, 0.0))
        assert isinstance(late, RateLimited)
        first[-1].cancel()
        await asyncio.wait(first)
        assert at.limits.reserved("acme")["places"] == 3, "one that left while it waited gave its place back"
        for task in first[:-1]:
            one = task.result()
            assert isinstance(one, Reserved)
            await one.release()


async def test_one_tenants_crowd_at_the_ledger_does_not_stand_before_another_tenant() -> None:
    async with metered(acme(usd_per_day=1.0)) as at:
        at.tenants["other"] = Tenant("other", quota=Quota(usd_per_day=1.0))
        crowd = [asyncio.create_task(tried(at, Estimate("m", 1, 1, 0.0001))) for _ in range(200)]
        other = asyncio.create_task(at.limits.reserve(Caller(tenant="other"), Estimate("m", 1, 1, 0.0001)))
        one = await other
        assert sum(task.done() for task in crowd) < 100
        await one.release()
        for held in await asyncio.gather(*crowd):
            assert isinstance(held, Reserved)
            await held.release()


async def test_settle_and_release_count_once() -> None:
    async with metered(acme(max_concurrent=1, usd_per_day=1.0)) as at:
        one = await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.5))
        await one.settle(Spent(1, 1, money=0.25))
        await one.settle(Spent(1, 1, money=0.25))
        await one.release()
        assert at.limits.reserved("acme") == {"day": 0, "places": 0}
        await at.limits.stop()
        assert await at.taken_today() == 250_000_000


async def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    async with metered(acme(max_concurrent=2, usd_per_day=1.0)) as at:
        tasks = [asyncio.create_task(tried(at, Estimate("m", 1, 1, 0.1))) for _ in range(20)]
        await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert at.limits.reserved("acme") == {"day": 0, "places": 0}
        assert isinstance(await tried(at, Estimate("m", 1, 1, 0.1)), Reserved)


async def test_nobody_is_admitted_against_a_ledger_that_is_down_and_free_tenants_do_not_notice() -> None:
    async with metered(acme(usd_per_day=1.0)) as at:
        at.ledger.down = True
        with pytest.raises(LedgerError):
            await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.1))
        open_ = await at.limits.reserve(Caller(tenant="other"), Estimate("m", 1, 1, 0.1))
        assert open_.headers == {} and not open_.degrade
        await open_.settle(Spent(1, 1))


async def test_what_could_not_be_written_is_written_later() -> None:
    async with metered(acme(usd_per_day=1.0)) as at:
        one = await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.5))
        at.ledger.down = True
        await one.settle(Spent(3, 4, money=0.1))
        with pytest.raises(LedgerError):
            await at.limits.flush()
        at.ledger.down = False
        await at.limits.flush()
        today = day_of(time.time())
        assert list(await at.ledger.bills("acme", today, today)) == [Bill("acme", today, 1, 3, 4, 100_000_000)]
        assert await at.taken_today() == 120_000_000, "what was spent, and one block"


async def test_the_remaining_numbers_fall_with_each_request() -> None:
    async with metered(acme(requests_per_s=100, tokens_per_min=1000)) as at:
        first = await at.limits.reserve(ACME, Estimate("m", 50, 50))
        before = dict(first.headers)
        second = await at.limits.reserve(ACME, Estimate("m", 50, 50))
        after = dict(second.headers)
    assert before["x-ratelimit-limit-tokens"] == "1000" and before["x-ratelimit-limit-requests"] == "100"
    assert (before["x-ratelimit-remaining-tokens"], after["x-ratelimit-remaining-tokens"]) == ("900", "800")
    assert int(after["x-ratelimit-remaining-requests"]) < 100
    assert after["x-ratelimit-reset-tokens"].endswith("s")


async def test_rate_and_budget_are_told_apart_and_counted() -> None:
    async with metered(acme(tokens_per_min=100, usd_per_day=0.001)) as at:
        with pytest.raises(TooLarge) as large:
            await at.limits.reserve(ACME, Estimate("m", 101, 0))
        held = await at.limits.reserve(ACME, Estimate("m", 50, 50))
        with pytest.raises(RateLimited) as rate:
            await at.limits.reserve(ACME, Estimate("m", 1, 1))
        await held.release()
        with pytest.raises(BudgetExceeded) as budget:
            await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.01))
    assert large.value.field == "max_tokens"
    assert (rate.value.http_status, rate.value.code) == (429, "rate_limit_exceeded")
    assert rate.value.headers["x-ratelimit-remaining-tokens"] == "0"
    assert (budget.value.http_status, budget.value.code) == (429, "budget_exceeded")
    hits = [event.dimension for event in at.emit.events if isinstance(event, LimitHit)]
    assert hits == ["tokens", "tokens", "day"]


async def test_a_tenant_that_degrades_is_told_to_stay_on_the_device() -> None:
    async with metered(acme("degrade", usd_per_day=0.1)) as at:
        first = await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.1))
        second = await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.1))
        assert (first.degrade, second.degrade) == (False, True)
        await first.settle(Spent())
        await second.settle(Spent())


async def test_shares_of_a_budget_are_told_once() -> None:
    async with metered(acme(usd_per_day=1.0)) as at:
        for _ in range(9):
            one = await at.limits.reserve(ACME, Estimate("m", 1, 1, 0.1))
            await one.settle(Spent(1, 1, money=0.1))
            await at.limits.flush()
    alerts = [(event.window, event.ratio) for event in at.emit.events if isinstance(event, BudgetAlert)]
    assert alerts == [("day", 0.5), ("day", 0.8)]


async def test_a_raised_limit_counts_for_the_next_request() -> None:
    async with metered(acme(max_concurrent=1)) as at:
        one = await at.limits.reserve(ACME, Estimate("m", 1, 1))
        assert isinstance(await tried(at, Estimate("m", 1, 1)), RateLimited)
        at.tenants["acme"] = acme(max_concurrent=2)
        two = await at.limits.reserve(ACME, Estimate("m", 1, 1))
        for held in (one, two):
            await held.release()
        assert at.limits.reserved("acme")["places"] == 0


async def test_two_processes_share_places() -> None:
    ledger = SlowLedger(time.monotonic)
    tenant = acme(max_concurrent=4)
    two = [
        MeteredLimits(lambda _: tenant, ledger, clock=time.monotonic, wall=wall_now, holder=name) for name in ("a", "b")
    ]
    held: list[Reserved] = []
    for turn in range(12):
        try:
            held.append(await two[turn % 2].reserve(ACME, Estimate("m", 1, 1)))
        except RateLimited:
            await two[turn % 2].flush()
    assert len(held) <= 4 and len(held) >= 3
    for one in held:
        await one.settle(Spent())
    for limits in two:
        await limits.stop()
    assert await ledger.lease("acme", "c", 4, 4, 1.0) == 4


async def test_no_tenant_takes_every_place_of_the_house() -> None:
    """Two that take what they can leave places to a third, and get more when others go."""
    limits = MeteredLimits(Tenant, SlowLedger(time.monotonic), clock=time.monotonic, wall=wall_now, holder="p", room=64)

    async def fill(name: str) -> list[Reserved]:
        held: list[Reserved] = []
        while True:
            try:
                held.append(await limits.reserve(Caller(tenant=name), Estimate("m", 1, 1)))
            except RateLimited:
                return held

    first = await fill("a")
    second = await fill("b")
    third = await fill("c")
    assert 50 <= len(first) <= 58 and len(second) >= 4 and len(third) >= 1
    assert len(first) + len(second) + len(third) <= 64
    for one in first[10:]:
        await one.release()
    assert len(await fill("b")) >= 20


async def test_shares_of_budgets_that_are_left_are_known_once_something_was_charged() -> None:
    async with metered(acme(usd_per_day=1.0, usd_per_month=10.0)) as at:
        assert at.limits.left_ratios(ACME) == {}
        held = await at.limits.reserve(ACME, Estimate("m", 10, 10, 0.6))
        await held.settle(Spent(10, 10, money=0.6))
        await at.limits.flush()
        assert at.limits.left_ratios(ACME) == pytest.approx({"day": 0.4, "month": 0.94})
        assert at.limits.left_ratios(Caller(tenant="another")) == {}
