"""Reserve, settle, release: laws over random schedules of several processes, and what each refusal says."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger import MemoryLedger
from gateway.limits import Account, Held, Meter, Moment, Need, Refusal, Shortage, day_of, meters_of, month_of
from gateway.quotas import NANO_PER_USD, Quota, Tenant
from protocol.clock import FakeClock

UNIX_S = 1_790_000_000.0


@define
class Process:
    """One process's account over a shared ledger, driven without an event loop of its own."""

    ledger: MemoryLedger
    clock: FakeClock
    account: Account
    name: str = "p"
    held: list[Held] = field(factory=list)

    def at(self) -> Moment:
        return Moment(self.clock(), UNIX_S + self.clock())

    def reserve(self, need: Need) -> Held | Refusal:
        for _ in range(64):
            found = self.account.reserve(need, self.at())
            if not isinstance(found, Shortage):
                if isinstance(found, Held):
                    self.held.append(found)
                return found
            self.fetch(found)
        raise AssertionError("the ledger never said no")

    def fetch(self, shortage: Shortage) -> None:
        for draw, got in zip(shortage.draws, asyncio.run(self.ledger.draw(shortage.draws)), strict=True):
            self.account.drawn(draw, got, self.at())
        if shortage.places:
            cap = self.account.tenant.quota.max_concurrent or 0
            wanted = self.account.places_wanted(1, self.at())
            places = asyncio.run(self.ledger.lease("acme", self.name, cap, wanted, 10.0))
            self.account.leased(places, self.clock() + 10.0, self.account.running + 1, self.at())

    def tell(self) -> None:
        asyncio.run(self.ledger.change(self.account.surplus(self.at())))

    def close(self) -> None:
        asyncio.run(self.ledger.change(self.account.close()))


def processes(count: int, on_budget: str = "refuse", **quota: float) -> list[Process]:
    clock = FakeClock(100.0)
    ledger = MemoryLedger(clock)
    tenant = Tenant("acme", quota=Quota(**quota), on_budget=on_budget)  # type: ignore[arg-type]
    return [Process(ledger, clock, Account(tenant), f"p{at}") for at in range(count)]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 3), cap=st.integers(1, 2000))
def test_money_never_goes_beyond_the_cap_and_nothing_stays_reserved(seed: int, count: int, cap: int) -> None:
    """Whatever order requests begin, end, are cancelled, and processes die in."""
    chance = random.Random(seed)
    houses = processes(count, usd_per_day=cap / NANO_PER_USD)
    spent, forfeited, day = 0, 0, day_of(UNIX_S)
    for _ in range(200):
        house = chance.choice(houses)
        step = chance.random()
        if step < 0.5:
            house.reserve(Need(1, chance.randint(1, max(1, cap // 3))))
        elif step < 0.8 and house.held:
            held = house.held.pop(chance.randrange(len(house.held)))
            took = chance.randint(0, held.parts[0][2])
            spent += took
            house.account.settle(held, Need(1, took))
        elif step < 0.9 and house.held:
            house.account.release(house.held.pop())
        elif step < 0.95:
            house.tell()
            house.clock.advance(0.3)
        elif step < 0.97 and len(houses) > 1:  # killed: what ran there is lost with its block
            spent += sum(held.parts[0][2] for held in house.held)
            forfeited += house.account.blocks[0].left + sum(-change.units for change in house.account.returns)
            house.account, house.held = Account(house.account.tenant), []
        running = sum(held.parts[0][2] for other in houses for held in other.held)
        assert spent + running <= cap
    for house in houses:
        for held in house.held:
            house.account.release(held)
        assert set(house.account.reserved.values()) == {0}
        house.close()
    assert asyncio.run(houses[0].ledger.taken("acme", "day", day)) == spent + forfeited


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), cap=st.integers(20, 400))
def test_no_sixty_seconds_hold_more_tokens_than_the_limit(seed: int, cap: int) -> None:
    chance = random.Random(seed)
    houses = processes(2, tokens_per_min=cap)
    log: list[tuple[float, int]] = []
    for _ in range(300):
        house = chance.choice(houses)
        need = Need(chance.randint(1, max(1, cap // 5)))
        found = house.reserve(need)
        if isinstance(found, Held):
            log.append((house.clock(), need.tokens))
            house.account.settle(found, need)
        if chance.random() < 0.6:
            house.clock.advance(chance.choice((0.01, 0.4, 3.0, 20.0)))
    for until_s, _ in log:
        assert sum(tokens for at_s, tokens in log if until_s - 60.0 < at_s <= until_s) <= cap
    assert log


def test_five_at_once_do_not_pass_a_limit_of_hundred_tokens() -> None:
    (house,) = processes(1, tokens_per_min=100)
    found = [house.reserve(Need(40)) for _ in range(5)]
    assert [isinstance(one, Held) for one in found] == [True, True, False, False, False]
    refused = found[2]
    assert isinstance(refused, Refusal) and refused.dimension == "tokens" and refused.retry_s is not None


def test_what_was_not_used_is_free_for_the_next_at_once() -> None:
    (house,) = processes(1, tokens_per_min=100)
    held = house.reserve(Need(90))
    assert isinstance(held, Held)
    assert isinstance(house.reserve(Need(20)), Refusal)
    house.account.settle(held, Need(30))
    assert isinstance(house.reserve(Need(70)), Held)


def test_what_goes_beyond_the_estimate_is_charged_too() -> None:
    (house,) = processes(1, usd_per_day=100 / NANO_PER_USD)
    held = house.reserve(Need(1, 10))
    assert isinstance(held, Held)
    house.account.settle(held, Need(1, 95))
    house.tell()
    assert asyncio.run(house.ledger.taken("acme", "day", day_of(UNIX_S))) >= 95
    assert isinstance(house.reserve(Need(1, 10)), Refusal)


def test_requests_a_second_are_refused_and_admitted_again_when_the_second_is_over() -> None:
    (house,) = processes(1, requests_per_s=4)
    assert [isinstance(house.reserve(Need(1)), Held) for _ in range(6)] == [True] * 4 + [False] * 2
    house.clock.advance(1.01)
    assert isinstance(house.reserve(Need(1)), Held)


@pytest.mark.parametrize(("per_s", "seconds", "most"), [(0.1, 100.0, 10), (2.5, 20.0, 50), (50, 4.0, 200)])
def test_over_a_longer_time_the_rate_is_the_limit(per_s: float, seconds: float, most: int) -> None:
    (house,) = processes(1, requests_per_s=per_s)
    admitted, end_s = 0, house.clock() + seconds
    while house.clock() < end_s:
        admitted += isinstance(house.reserve(Need(1)), Held)
        house.clock.advance(0.005 if per_s > 10 else 0.05)
    assert most * 0.9 <= admitted <= most + max(1, per_s)


def test_places_are_taken_one_by_one_over_processes_and_come_back() -> None:
    one, other = processes(2, max_concurrent=8)
    held = [found for found in (one.reserve(Need(1)) for _ in range(5)) if isinstance(found, Held)]
    more = [found for found in (other.reserve(Need(1)) for _ in range(8)) if isinstance(found, Held)]
    assert len(held) == 5 and 2 <= len(more) <= 3
    refused = other.reserve(Need(1))
    assert isinstance(refused, Refusal) and refused.dimension == "places"
    other.account.release(more[0])
    assert isinstance(other.reserve(Need(1)), Held)


def test_a_request_that_takes_from_four_limits_takes_from_none_when_one_refuses() -> None:
    (house,) = processes(1, tokens_per_min=100, usd_per_day=10 / NANO_PER_USD, requests_per_s=5, max_concurrent=9)
    assert isinstance(house.reserve(Need(50, 20)), Refusal)
    assert house.account.reserved == {"requests": 0, "tokens": 0, "day": 0, "places": 0}
    assert isinstance(house.reserve(Need(100, 10)), Held)


def test_at_the_cap_a_tenant_that_degrades_gets_an_answer_that_costs_nothing() -> None:
    (house,) = processes(1, "degrade", usd_per_day=10 / NANO_PER_USD)
    first = house.reserve(Need(1, 10))
    second = house.reserve(Need(1, 10))
    assert isinstance(first, Held) and not first.degrade
    assert isinstance(second, Held) and second.degrade and second.parts[0][2] == 0


def test_a_free_request_is_admitted_when_the_budget_is_used_up_or_zero() -> None:
    (house,) = processes(1, usd_per_day=0.0)
    assert isinstance(house.reserve(Need(1, 1)), Refusal)
    assert isinstance(house.reserve(Need(1, 0)), Held)


def test_without_a_budget_nothing_is_blocked_whatever_it_costs() -> None:
    """A limit that was not set must not be taken for one of 0."""
    (house,) = processes(1)
    assert isinstance(house.reserve(Need(10**9, 10**15)), Held)


def test_a_request_larger_than_the_limit_itself_is_never_told_to_come_back() -> None:
    (house,) = processes(1, tokens_per_min=100)
    found = house.reserve(Need(101))
    assert found == Refusal("tokens", 100, 101, None)


def test_a_spent_day_comes_back_at_midnight_and_a_reserved_one_in_a_moment() -> None:
    (house,) = processes(1, usd_per_day=100 / NANO_PER_USD)
    held = house.reserve(Need(1, 100))
    assert isinstance(held, Held)
    waits = house.reserve(Need(1, 50))
    assert isinstance(waits, Refusal) and waits.retry_s == 1.0
    house.account.settle(held, Need(1, 100))
    spent = house.reserve(Need(1, 50))
    assert isinstance(spent, Refusal) and spent.retry_s is not None
    assert (UNIX_S + house.clock() + spent.retry_s) % 86_400 == pytest.approx(0.0, abs=1e-3)
    house.clock.advance(spent.retry_s + 1)
    assert isinstance(house.reserve(Need(1, 50)), Held)


def test_after_a_no_the_ledger_is_left_alone_for_a_while() -> None:
    (house,) = processes(1, usd_per_day=100 / NANO_PER_USD)
    house.reserve(Need(1, 100))
    house.reserve(Need(1, 50))
    assert isinstance(house.account.reserve(Need(1, 50), house.at()), Refusal), "no Shortage: no round trip"
    house.clock.advance(0.6)
    assert isinstance(house.account.reserve(Need(1, 50), house.at()), Shortage)


def test_other_limits_count_at_once_and_what_runs_stays_held() -> None:
    (house,) = processes(1, usd_per_day=100 / NANO_PER_USD, max_concurrent=1)
    held = house.reserve(Need(1, 100))
    assert isinstance(held, Held)
    house.account.change(Tenant("acme", quota=Quota(usd_per_day=300 / NANO_PER_USD, max_concurrent=2)))
    assert isinstance(house.reserve(Need(1, 200)), Held)
    assert isinstance(house.reserve(Need(1, 1)), Refusal)
    house.account.settle(held, Need(1, 0))
    assert house.account.reserved["day"] == 200


def test_an_idle_tenant_holds_no_block() -> None:
    (house,) = processes(1, usd_per_day=1000 / NANO_PER_USD)
    held = house.reserve(Need(1, 5))
    assert isinstance(held, Held)
    house.account.settle(held, Need(1, 5))
    house.tell()
    assert asyncio.run(house.ledger.taken("acme", "day", day_of(UNIX_S))) == 20
    house.clock.advance(6.0)
    house.tell()
    assert asyncio.run(house.ledger.taken("acme", "day", day_of(UNIX_S))) == 20, "who asks now and then keeps a block"
    house.clock.advance(60.0)
    house.tell()
    assert asyncio.run(house.ledger.taken("acme", "day", day_of(UNIX_S))) == 5


def test_an_idle_tenant_holds_no_tokens_after_seconds() -> None:
    (house,) = processes(1, tokens_per_min=800)
    held = house.reserve(Need(5, 0))
    assert isinstance(held, Held)
    slot = house.account.blocks[0].slot
    house.account.settle(held, Need(5, 0))
    house.clock.advance(1.0)
    house.tell()
    assert asyncio.run(house.ledger.taken("acme", "tokens", slot)) == 100
    house.clock.advance(6.0)
    house.tell()
    assert asyncio.run(house.ledger.taken("acme", "tokens", slot)) == 5


def test_slots_of_days_and_months_follow_the_calendar() -> None:
    at_s = datetime(2026, 12, 31, 23, 59, 30, tzinfo=UTC).timestamp()
    assert day_of(at_s + 60) == day_of(at_s) + 1
    assert month_of(at_s + 60) == month_of(at_s) + 1
    assert Meter("day", 1).reset_s(at_s) == pytest.approx(30.0)
    assert Meter("month", 1).reset_s(at_s) == pytest.approx(30.0)
    february = datetime(2027, 2, 1, tzinfo=UTC).timestamp()
    assert Meter("month", 1).reset_s(february) == pytest.approx(28 * 86_400)


def test_a_quota_without_limits_has_no_meters() -> None:
    assert meters_of(Quota()) == ()
    assert [meter.dimension for meter in meters_of(Quota(1, 1, 1, 1, 1))] == ["requests", "tokens", "day", "month"]
