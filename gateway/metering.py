"""Limits at work: accounts in memory, blocks from the ledger, refusals with their reason, bills and alerts.

A request is admitted without waiting while its tenant's blocks last. Where they do not, all requests that wait ask the
ledger together. Once a second a task gives back what is not needed, renews leases of places and writes bills.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from attrs import define, evolve, field, frozen

from gateway.context import Caller
from gateway.ledger import Bill, Change, Draw, Drawn, Ledger, LedgerError
from gateway.limits import MONEY, Account, Held, Moment, Need, Refusal, Shortage, day_of, month_of
from gateway.ports import Estimate, Spent
from gateway.quotas import NANO_PER_USD, Tenant, nano_usd
from links.turns import Turns
from protocol.clock import Clock, WallClock
from protocol.errors import BudgetExceeded, MidstreamError, RateLimited, TooLarge
from protocol.events import BudgetAlert, Emit, LimitHit, ignore

log = logging.getLogger("midstream.gateway.limits")

TICK_S = 1.0
LEASE_TTL_S = 10.0
"""A process that dies holds its places this long at the most."""

FREE_SHARES = 8
"""One tenant may have up to eight times the places that are free: alone 8/9 of all, two of them 8/17 each."""

_RATE_HEADERS = {
    name: (f"x-ratelimit-limit-{name}", f"x-ratelimit-remaining-{name}", f"x-ratelimit-reset-{name}")
    for name in ("requests", "tokens")
}


@lru_cache(maxsize=16)
def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}s"


MAX_ROUNDS = 64
"""Turns at the ledger of one request; each halves what is left, so more means that somebody else is always quicker."""


@define(eq=False)
class _Entry:
    """An account with what its waiting requests want of the ledger."""

    account: Account
    draws: dict[str, Draw] = field(factory=dict)
    places: int = 0
    fetching: asyncio.Task[None] | None = None
    leasing: asyncio.Lock = field(factory=asyncio.Lock)
    turns: Turns = field(factory=Turns)
    alerted: set[tuple[str, int, float]] = field(factory=set)
    spent: dict[str, tuple[int, float]] = field(factory=dict)
    """Window -> its slot, and the share of the budget that was spent in it when bills were last written."""


class MeteredLimits:
    """`gateway.ports.Limits` over a ledger. tenant_of: read at each request, so that changes count at once.

    holder: names this process among those that share the ledger; unique for each start. room: requests that the house
    takes at once; no tenant takes all of it from the others (None: they may).
    """

    def __init__(
        self,
        tenant_of: Callable[[str], Tenant],
        ledger: Ledger,
        *,
        clock: Clock,
        wall: WallClock,
        holder: str,
        emit: Emit = ignore,
        room: int | None = None,
    ) -> None:
        self._tenant_of = tenant_of
        self._ledger = ledger
        self._clock = clock
        self._wall = wall
        self._holder = holder
        self._emit = emit
        self._room = room
        self._running = 0
        self._entries: dict[str, _Entry] = {}
        self._bills: dict[tuple[str, int], Bill] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin the work beside requests."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Give back everything that no request holds. The ledger stays open: it belongs to the house."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        waiting = [entry.fetching for entry in self._entries.values() if entry.fetching is not None]
        await asyncio.gather(*waiting, return_exceptions=True)
        with contextlib.suppress(LedgerError):
            await self._write_bills()
            await self._change([change for entry in self._entries.values() for change in entry.account.close()])
            for name, entry in self._entries.items():
                if entry.account.places:
                    await self._ledger.lease(name, self._holder, 0, 0, LEASE_TTL_S)

    async def reserve(self, caller: Caller, estimate: Estimate) -> Reserved:
        """Raises RateLimited, BudgetExceeded, TooLarge for what never fits, or LedgerError."""
        entry = self._entry(caller.tenant)
        self._check_share(entry.account)
        need = Need(estimate.prompt_tokens + estimate.answer_tokens, nano_usd(estimate.money))
        found, waited = entry.account.reserve(need, self._now()), False
        for _ in range(MAX_ROUNDS):
            if not isinstance(found, Shortage):
                break
            if not self._drawn_now(entry, found):
                await self._fetch(entry, found)
                waited = True
            found = entry.account.reserve(need, self._now())
        if not isinstance(found, Held):
            raise self._refusal(entry.account, found)
        self._running += 1
        reserved = Reserved(self, entry.account, found)
        if waited:
            await self._in_turn(entry, reserved)
        return reserved

    async def _in_turn(self, entry: _Entry, reserved: Reserved) -> None:
        """Those of a tenant that waited together go on one by one, as they came; what they hold is theirs already."""
        try:
            await entry.turns.mine()
        except BaseException:
            await reserved.release()
            raise

    def ended(self) -> None:
        """A request gave its place in the house back."""
        self._running -= 1

    def _check_share(self, account: Account) -> None:
        """What is free stays large enough for others, whoever fills the rest. Raises RateLimited.

        As shared switch buffers have it (Choudhury and Hahne, 1998): a queue may grow to so many times what is free.
        """
        free = self._room - self._running if self._room is not None else None
        if free is not None and account.running and account.running >= FREE_SHARES * (free - 1):
            self._emit(LimitHit(at_s=self._clock(), tenant=account.tenant.name, dimension="share"))
            raise RateLimited(
                f"{account.running} requests of this tenant are under way, its share of what this gateway can take",
                retry_after_s=1.0,
                headers=self.headers(account),
            )

    async def extend(self, account: Account, held: Held, money: float) -> Held | None:
        """More money for a request that is under way; None when the budget has no room. Raises LedgerError."""
        entry, nano = self._entry(account.tenant.name), nano_usd(money)
        for _ in range(MAX_ROUNDS):
            found = account.extend(held, nano, self._now())
            if not isinstance(found, Shortage):
                return found if isinstance(found, Held) else None
            if not self._drawn_now(entry, found):
                await self._fetch(entry, found)
        return None

    def reserved(self, tenant: str) -> Mapping[str, int]:
        """Units that running requests hold, by dimension and `places`."""
        return self._entry(tenant).account.reserved

    def left_ratios(self, caller: Caller) -> Mapping[str, float]:
        """Share of each budget that is left, by `day` and `month`, of those that something was charged to."""
        entry, unix_s = self._entry(caller.tenant), self._wall().unix_s
        meters = {block.meter.dimension: block.meter for block in entry.account.blocks}
        return {
            window: max(0.0, 1.0 - ratio) if meters[window].slot(unix_s) == slot else 1.0
            for window, (slot, ratio) in entry.spent.items()
            if window in meters
        }

    def headers(self, account: Account) -> dict[str, str]:
        """x-ratelimit-*, as OpenAI names them, of the limits that the tenant has."""
        unix_s = self._wall().unix_s
        found: dict[str, str] = {}
        for block in account.blocks:
            meter = block.meter
            names = _RATE_HEADERS.get(meter.dimension)
            if names is not None:
                left = block.left + (block.room or 0) if block.good_at(meter.slot(unix_s)) else meter.cap
                limit, remaining, reset = names
                found[limit], found[remaining] = str(meter.cap), str(max(0, left))
                found[reset] = _seconds(meter.reset_s(unix_s))
        return found

    def charged(self, account: Account, spent: Spent) -> None:
        """Note what a request took, for the tenant's bill."""
        name, day = account.tenant.name, day_of(self._wall().unix_s)
        bill = Bill(name, day, 1, spent.prompt_tokens, spent.completion_tokens, nano_usd(spent.money))
        before = self._bills.get((name, day))
        self._bills[name, day] = bill if before is None else before + bill

    async def flush(self) -> None:
        """What the task does once a second. Raises LedgerError."""
        at = self._now()
        spare = {name: entry.account.surplus(at) for name, entry in self._entries.items()}
        await self._change([change for changes in spare.values() for change in changes])
        for name, changes in spare.items():
            self._entries[name].account.returned(changes)
        for entry in tuple(self._entries.values()):
            if entry.account.places:
                await self._lease(entry, 0)
        await self._write_bills()

    def _now(self) -> Moment:
        return Moment(self._clock(), self._wall().unix_s)

    def _entry(self, name: str) -> _Entry:
        tenant = self._tenant_of(name)
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(Account(tenant))
        elif entry.account.tenant is not tenant:
            entry.account.change(tenant)
        return entry

    def _drawn_now(self, entry: _Entry, shortage: Shortage) -> bool:
        """Have what is missing at once, where the ledger can: the first request of a burst then waits for no turn."""
        if shortage.places or entry.fetching is not None:
            return False
        drawn = self._ledger.draw_now(shortage.draws)
        if drawn is None:
            return False
        self._put(entry, shortage.draws, drawn)
        return True

    async def _fetch(self, entry: _Entry, shortage: Shortage) -> None:
        """One question at a time per tenant; whoever comes before it is sent is part of it."""
        for draw in shortage.draws:
            held = entry.draws.get(draw.dimension)
            if held is None or held.slot != draw.slot:
                entry.draws[draw.dimension] = draw
            else:
                wanted = max(held.wanted, min(draw.cap, held.wanted + draw.least))
                entry.draws[draw.dimension] = evolve(held, wanted=wanted, least=min(held.least, draw.least))
        entry.places += shortage.places
        if entry.fetching is None:
            entry.fetching = asyncio.get_running_loop().create_task(self._ask(entry))
        await asyncio.shield(entry.fetching)

    async def _ask(self, entry: _Entry) -> None:
        draws, entry.draws = tuple(entry.draws.values()), {}
        places, entry.places = entry.places, 0
        try:
            if draws:
                self._put(entry, draws, await self._ledger.draw(draws))
            if places:
                await self._lease(entry, places)
        finally:
            entry.fetching = None

    def _put(self, entry: _Entry, draws: Sequence[Draw], drawn: Sequence[Drawn]) -> None:
        at = self._now()
        for draw, got in zip(draws, drawn, strict=True):
            entry.account.drawn(draw, got, at)

    async def _lease(self, entry: _Entry, more: int) -> None:
        async with entry.leasing:
            account, at = entry.account, self._now()
            cap = account.tenant.quota.max_concurrent or 0
            wanted = account.places_wanted(more, at)
            # Fewer than before: admission must keep to the new number before another process can have the rest.
            account.places = min(account.places, wanted)
            places = await self._ledger.lease(account.tenant.name, self._holder, cap, wanted, LEASE_TTL_S)
            account.leased(places, at.clock_s + LEASE_TTL_S, min(wanted, account.running + max(more, 1)), self._now())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.flush()
            except LedgerError as err:
                log.warning("limits are not written: %s", err)

    async def _change(self, changes: list[Change]) -> None:
        if not changes:
            return
        try:
            await self._ledger.change(changes)
        except LedgerError:
            for change in changes:  # kept for the next turn
                self._entries[change.account].account.returns.append(change)
            raise

    async def _write_bills(self) -> None:
        bills, self._bills = self._bills, {}
        if not bills:
            return
        try:
            await self._ledger.bill(tuple(bills.values()))
        except LedgerError:
            for key, bill in bills.items():
                self._bills[key] = self._bills[key] + bill if key in self._bills else bill
            raise
        for name in {bill.tenant for bill in bills.values()}:
            await self._alert(self._entry(name))

    async def _alert(self, entry: _Entry) -> None:
        """Say once per window that a share of a budget is spent."""
        tenant, unix_s = entry.account.tenant, self._wall().unix_s
        if not any(block.meter.dimension in MONEY for block in entry.account.blocks):
            return
        today, month = day_of(unix_s), month_of(unix_s)
        bills = await self._ledger.bills(tenant.name, today - 31, today)
        spent = {
            "day": sum(bill.nano_usd for bill in bills if bill.day == today),
            "month": sum(bill.nano_usd for bill in bills if month_of(bill.day * 86_400.0) == month),
        }
        for block in entry.account.blocks:
            window = block.meter.dimension
            if window in MONEY:
                entry.spent[window] = block.meter.slot(unix_s), spent[window] / max(1, block.meter.cap)
            for ratio in tenant.alert_ratios if window in MONEY else ():
                key = window, block.meter.slot(unix_s), ratio
                if key not in entry.alerted and spent[window] >= ratio * block.meter.cap:
                    entry.alerted.add(key)
                    self._tell(tenant, window, ratio, spent[window], block.meter.cap)
        entry.alerted = {key for key in entry.alerted if key[1] >= (today if key[0] == "day" else month)}

    def _tell(self, tenant: Tenant, window: str, ratio: float, spent: int, cap: int) -> None:
        spent_usd, budget_usd = spent / NANO_PER_USD, cap / NANO_PER_USD
        log.warning("tenant %s has spent %.4f of %.4f dollars of this %s", tenant.name, spent_usd, budget_usd, window)
        self._emit(
            BudgetAlert(
                at_s=self._clock(), tenant=tenant.name, window=window, ratio=ratio, spent_usd=spent_usd,
                budget_usd=budget_usd,
            )
        )  # fmt: skip

    def _refusal(self, account: Account, found: Refusal | Shortage) -> MidstreamError:
        if isinstance(found, Shortage):
            return RateLimited("too many requests ask at once", retry_after_s=1.0)
        self._emit(LimitHit(at_s=self._clock(), tenant=account.tenant.name, dimension=found.dimension))
        return refusal_error(found, self.headers(account))


@define(eq=False)
class Reserved:
    """One request's place under all limits; `gateway.ports.Reservation`."""

    _limits: MeteredLimits
    _account: Account
    _held: Held
    _open: bool = True

    @property
    def degrade(self) -> bool:
        """Only what costs nothing may answer."""
        return self._held.degrade

    @property
    def headers(self) -> Mapping[str, str]:
        return self._limits.headers(self._account)

    async def extend(self, money: float) -> bool:
        """Hold this much more money; False when the budget has no room for it, or may not be used at all."""
        if self.degrade or not self._open:
            return False
        held = await self._limits.extend(self._account, self._held, money)
        if held is not None:
            self._held = held
        return held is not None

    async def settle(self, spent: Spent) -> None:
        """Charge what it took; what was reserved beyond is free from here on."""
        if self._open:
            self._open = False
            money = max(spent.money, spent.held)
            took = Need(spent.prompt_tokens + spent.completion_tokens, nano_usd(money))
            self._account.settle(self._held, took)
            self._limits.ended()
            self._limits.charged(self._account, spent)

    async def release(self) -> None:
        """Charge nothing."""
        if self._open:
            self._open = False
            self._account.release(self._held)
            self._limits.ended()


@frozen
class _Words:
    what: str
    unit: str
    next_step: str


_WORDS = {
    "requests": _Words("requests a second", "", "send fewer at once"),
    "tokens": _Words("tokens a minute", " tokens", "send less, or lower max_tokens"),
    "places": _Words("requests at once", "", "wait for one to end"),
}


def refusal_error(refusal: Refusal, headers: Mapping[str, str]) -> MidstreamError:
    """429 that tells rate from budget; 413 for a request that the rate never admits."""
    if refusal.dimension in MONEY:
        wanted, limit = refusal.wanted / NANO_PER_USD, refusal.limit / NANO_PER_USD
        words = "may cost more than is left of" if refusal.retry_s is not None else "may cost more than all of"
        return BudgetExceeded(
            f"the request {words} this {refusal.dimension}'s budget: up to {wanted:.6f} of {limit:.6f} dollars",
            reset_s=refusal.retry_s,
            next_step="lower max_tokens, ask for a model of this machine, or have the budget raised",
            headers=headers,
        )
    words_ = _WORDS[refusal.dimension]
    if refusal.limit == 0:
        return BudgetExceeded(f"this tenant's limit of {words_.what} is 0", next_step="have it raised", headers=headers)
    if refusal.retry_s is None:
        return TooLarge(
            f"the request may take {refusal.wanted}{words_.unit}, the limit of {words_.what} is {refusal.limit}",
            next_step=words_.next_step,
            field="max_tokens",
        )
    return RateLimited(
        f"the limit of {refusal.limit} {words_.what} is reached",
        retry_after_s=refusal.retry_s,
        next_step=words_.next_step,
        headers=headers,
    )
