"""Admission under a tenant's limits: reserve, settle, release in four dimensions; pure, time is an argument.

A request reserves the most it may take of every limit at once, or of none. It is charged what it did take when it ends.
Units come from blocks that were drawn from the ledger ahead of need; what is missing is said, not fetched here.
A block of a stretch of time is good for that stretch and the next; what is left of it then goes back.

    requests a second   slots of 0.25 s, 4 of them          tokens a minute   slots of 2 s, 32 of them: any 60 s
    requests at once    places leased for some seconds       money             the day and the month, UTC
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, NamedTuple

from attrs import define, field, frozen

from gateway.ledger import Change, Dimension, Draw, Drawn
from gateway.quotas import Quota, Tenant, nano_usd

MONEY: frozenset[str] = frozenset({"day", "month"})
REQUEST_SLOT_S = 0.25
TOKEN_SLOT_S = 2.0
TOKEN_SPAN = 32

BLOCK_PARTS = {"requests": 8, "tokens": 8, "day": 50, "month": 200}
"""A block is this part of its limit: the most that a crash forfeits, beside what running requests hold."""

DRY_S = 0.5
"""After the ledger had too little, it is not asked again this long: a flood of refusals costs no round trips."""


IDLE_S = 5.0
"""A tenant that did not ask for so long holds no block of requests or tokens here, and no places ahead."""

IDLE_MONEY_S = 60.0
"""The same of money, which is drawn through a synced disk: who asks now and then does not wait for that each time."""

PLACE_PARTS = 8
"""Places are leased ahead by this part of the limit."""


class Moment(NamedTuple):
    """One instant on both clocks: monotonic for waits, wall (unix) for windows that processes share."""

    clock_s: float
    unix_s: float


@frozen
class Need:
    """The most that a request may take. nano_usd: 0 for what this machine answers itself."""

    tokens: int
    nano_usd: int = 0


@frozen
class Meter:
    """One counted limit: at most `cap` units in the last `span` slots. slot_s 0: a calendar day or month."""

    dimension: Dimension
    cap: int
    slot_s: float = 0.0
    span: int = 1

    def slot(self, unix_s: float) -> int:
        """The slot that a time is in."""
        if self.slot_s:
            return int(unix_s // self.slot_s)
        return day_of(unix_s) if self.dimension == "day" else month_of(unix_s)

    def reset_s(self, unix_s: float) -> float:
        """Seconds until everything that counts now has ceased to count."""
        if self.slot_s:
            return self.slot_s * self.span
        begin = datetime.fromtimestamp(unix_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self.dimension == "day":
            return (begin + timedelta(days=1)).timestamp() - unix_s
        return (begin.replace(day=1) + timedelta(days=32)).replace(day=1).timestamp() - unix_s


def day_of(unix_s: float) -> int:
    """Days since 1970-01-01, UTC."""
    return int(unix_s // 86_400)


def month_of(unix_s: float) -> int:
    """Months since year 0, UTC."""
    return _month_of_day(day_of(unix_s))


@lru_cache(maxsize=4)
def _month_of_day(day: int) -> int:
    date = datetime.fromtimestamp(day * 86_400.0, UTC)
    return date.year * 12 + date.month - 1


def meters_of(quota: Quota) -> tuple[Meter, ...]:
    """The counted limits that a quota has."""
    found = []
    if quota.requests_per_s is not None:
        found.append(_requests(quota.requests_per_s))
    if quota.tokens_per_min is not None:
        found.append(Meter("tokens", quota.tokens_per_min, TOKEN_SLOT_S, TOKEN_SPAN))
    if quota.usd_per_day is not None:
        found.append(Meter("day", nano_usd(quota.usd_per_day)))
    if quota.usd_per_month is not None:
        found.append(Meter("month", nano_usd(quota.usd_per_month)))
    return tuple(found)


def _requests(per_s: float) -> Meter:
    """Whole requests in whole stretches: a limit that is no whole number is counted over 10 s, or over 1 request."""
    stretch_s = 1.0 if per_s == int(per_s) else 10.0 if per_s >= 0.1 else 1.0 / per_s
    return Meter("requests", int(per_s * stretch_s + 1e-9), REQUEST_SLOT_S * stretch_s, round(1.0 / REQUEST_SLOT_S))


@define(eq=False)
class Block:
    """Units of one meter that this process drew for `slot`. room: what the ledger had left for all at the last draw.

    dry_until_s: monotonic; until then the ledger is known to have no more than `room`.
    """

    meter: Meter
    slot: int = -1
    left: int = 0
    room: int | None = None
    dry_until_s: float = 0.0
    held: int = 0

    def good_at(self, slot: int) -> bool:
        """Whether what is left may be used in `slot`: a block of a stretch of time also in the one after it."""
        return slot == self.slot or (bool(self.meter.slot_s) and slot == self.slot + 1)

    def amount(self, need: Need) -> int:
        dimension = self.meter.dimension
        return 1 if dimension == "requests" else need.tokens if dimension == "tokens" else need.nano_usd


@frozen(eq=False)
class Held:
    """What one request reserved: units of blocks at the slots they then had."""

    parts: tuple[tuple[Block, int, int], ...]
    degrade: bool = False


@frozen
class Shortage:
    """What must be had from the ledger before a request can be admitted. places: more places are needed."""

    draws: tuple[Draw, ...]
    places: bool = False


@frozen
class Refusal:
    """Not now. dimension: which limit said so. retry_s: when it may be otherwise; None: this request never fits."""

    dimension: Literal["requests", "tokens", "places", "day", "month"]
    limit: int
    wanted: int
    retry_s: float | None


@define
class Account:
    """One tenant's limits in this process. Not for several threads."""

    tenant: Tenant
    blocks: tuple[Block, ...] = field(init=False)
    places: int = field(default=0, init=False)
    places_until_s: float = field(default=0.0, init=False)
    places_dry_until_s: float = field(default=0.0, init=False)
    running: int = field(default=0, init=False)
    used_s: float = field(default=0.0, init=False)
    returns: list[Change] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.blocks = tuple(Block(meter) for meter in meters_of(self.tenant.quota))

    def change(self, tenant: Tenant) -> None:
        """Other limits from now on. What is held stays held; blocks of limits that still exist go on."""
        before = {block.meter.dimension: block for block in self.blocks}
        blocks = []
        for meter in meters_of(tenant.quota):
            block = before.pop(meter.dimension, None)
            if block is None or (block.meter.slot_s, block.meter.span) != (meter.slot_s, meter.span):
                block = Block(meter)
            block.meter, block.dry_until_s, block.room = meter, 0.0, None
            blocks.append(block)
        self.tenant, self.blocks = tenant, tuple(blocks)
        self.places_until_s = 0.0

    def reserve(self, need: Need, at: Moment) -> Held | Shortage | Refusal:
        """Take from every block and one place, or nothing at all."""
        self.used_s = at.clock_s
        degrade = False
        draws: list[Draw] = []
        for block in self.blocks:
            amount = block.amount(need)
            if amount == 0 and block.meter.dimension in MONEY:
                continue
            found = self._short(block, amount, at)
            if isinstance(found, Refusal):
                if block.meter.dimension not in MONEY or self.tenant.on_budget == "refuse":
                    return found
                degrade = True
            elif found is not None:
                draws.append(found)
        if degrade:
            return self._degraded(need, at)
        places = self._short_of_places(at)
        if isinstance(places, Refusal):
            return places
        if draws or places:
            return Shortage(tuple(draws), places)
        return self._take(need)

    def extend(self, held: Held, nano_usd: int, at: Moment) -> Held | Shortage | Refusal:
        """The same request with more money, for another attempt of it; what it holds already stays held."""
        draws: list[Draw] = []
        money = [block for block in self.blocks if block.meter.dimension in MONEY] if nano_usd else []
        for block in money:
            found = self._short(block, nano_usd, at)
            if isinstance(found, Refusal):
                return found
            if found is not None:
                draws.append(found)
        if draws:
            return Shortage(tuple(draws))
        for block in money:
            block.left -= nano_usd
            block.held += nano_usd
        return Held((*held.parts, *((block, block.slot, nano_usd) for block in money)), held.degrade)

    def _degraded(self, need: Need, at: Moment) -> Held | Shortage | Refusal:
        """The same request without money: only what costs nothing may answer it."""
        found = self.reserve(Need(need.tokens, 0), at)
        return Held(found.parts, degrade=True) if isinstance(found, Held) else found

    def _take(self, need: Need) -> Held:
        parts = []
        for block in self.blocks:
            amount = block.amount(need)
            block.left -= amount
            block.held += amount
            parts.append((block, block.slot, amount))
        self.running += 1
        return Held(tuple(parts))

    def _short(self, block: Block, amount: int, at: Moment) -> Draw | Refusal | None:
        meter, slot = block.meter, block.meter.slot(at.unix_s)
        if block.left >= amount and block.good_at(slot):
            return None
        self._turn(block, slot)
        if block.left >= amount:
            return None
        if amount > meter.cap:
            return Refusal(meter.dimension, meter.cap, amount, None)
        least = amount - block.left
        if at.clock_s < block.dry_until_s and least > (block.room or 0):
            return self._refused(block, amount, at)
        wanted = max(least, meter.cap // BLOCK_PARTS[meter.dimension])
        return Draw(self.tenant.name, meter.dimension, block.slot, meter.span, meter.cap, wanted, least)

    def _refused(self, block: Block, amount: int, at: Moment) -> Refusal:
        meter = block.meter
        if meter.slot_s:
            wait_s = meter.slot_s - at.unix_s % meter.slot_s
            return Refusal(meter.dimension, meter.cap, amount, max(wait_s, min(1.0, meter.slot_s)))
        # What running requests hold may come back in a moment; what is spent comes back with the calendar.
        wait_s = 1.0 if block.left + block.held >= amount else meter.reset_s(at.unix_s)
        return Refusal(meter.dimension, meter.cap, amount, wait_s)

    def _turn(self, block: Block, slot: int) -> None:
        """What is left of a block whose time is over goes back to the ledger."""
        if block.slot == slot:
            return
        if block.left > 0:
            self.returns.append(Change(self.tenant.name, block.meter.dimension, block.slot, -block.left))
        block.slot, block.left, block.room, block.dry_until_s = slot, 0, None, 0.0

    def _short_of_places(self, at: Moment) -> Refusal | bool:
        most = self.tenant.quota.max_concurrent
        if most is None:
            return False
        if at.clock_s >= self.places_until_s:
            self.places = 0
        if self.running < self.places:
            return False
        if self.running >= most or at.clock_s < self.places_dry_until_s:
            return Refusal("places", most, self.running + 1, 1.0)
        return True

    def drawn(self, draw: Draw, got: Drawn, at: Moment) -> None:
        """Put what the ledger gave into its block; a block that went on meanwhile gives it back."""
        block = next((block for block in self.blocks if block.meter.dimension == draw.dimension), None)
        if block is None or block.slot != draw.slot:
            if got.granted:
                self.returns.append(Change(draw.account, draw.dimension, draw.slot, -got.granted))
            return
        block.left += got.granted
        block.room = got.room
        if got.granted < draw.least:
            block.dry_until_s = at.clock_s + DRY_S

    def leased(self, places: int, until_s: float, wanted: int, at: Moment) -> None:
        """This process holds `places` until the monotonic time `until_s`."""
        self.places, self.places_until_s = places, until_s
        self.places_dry_until_s = at.clock_s + DRY_S if places < wanted else 0.0

    def places_wanted(self, more: int, at: Moment) -> int:
        """Places to lease: for what runs, `more` requests, and some ahead while there is traffic."""
        most = self.tenant.quota.max_concurrent or 0
        ahead = max(1, most // PLACE_PARTS) if at.clock_s - self.used_s <= IDLE_S else 0
        return min(most, self.running + more + ahead)

    def settle(self, held: Held, took: Need) -> None:
        """The request ended and took `took`: the rest is free again, what went beyond is charged as well."""
        self.running -= 1
        charged: set[int] = set()
        for block, slot, amount in held.parts:
            block.held -= amount
            # Of a block that was taken from twice, the second part is given back whole.
            actual = 0 if id(block) in charged else block.amount(took)
            charged.add(id(block))
            self._correct(block, slot, amount - actual)

    def release(self, held: Held) -> None:
        """The request never began."""
        self.running -= 1
        for block, slot, amount in held.parts:
            block.held -= amount
            self._correct(block, slot, amount)

    def _correct(self, block: Block, slot: int, spare: int) -> None:
        if spare == 0:
            return
        if block.slot == slot and block.left + spare >= 0:
            block.left += spare
        else:
            self.returns.append(Change(self.tenant.name, block.meter.dimension, slot, -spare))

    def surplus(self, at: Moment) -> list[Change]:
        """What the ledger is to be told: corrections, and units above a block that are not needed here."""
        for block in self.blocks:
            slot = block.meter.slot(at.unix_s)
            if not block.good_at(slot):
                self._turn(block, slot)
            rest_s = IDLE_MONEY_S if block.meter.dimension in MONEY else IDLE_S
            idle = at.clock_s - self.used_s > rest_s
            keep = 0 if idle else block.meter.cap // BLOCK_PARTS[block.meter.dimension]
            if block.left > keep:
                self.returns.append(Change(self.tenant.name, block.meter.dimension, block.slot, keep - block.left))
                block.left = keep
        changes, self.returns = merged(self.returns), []
        return changes

    def returned(self, changes: Sequence[Change]) -> None:
        """The ledger has these back: there may be something to be had again, for this process too."""
        dimensions = {change.dimension for change in changes if change.units < 0}
        for block in self.blocks:
            if block.meter.dimension in dimensions:
                block.dry_until_s = 0.0

    def close(self) -> list[Change]:
        """Everything that is not held goes back."""
        for block in self.blocks:
            self._turn(block, -1)
        changes, self.returns = merged(self.returns), []
        return changes

    @property
    def reserved(self) -> dict[str, int]:
        """Units that running requests hold, by dimension."""
        return {block.meter.dimension: block.held for block in self.blocks} | {"places": self.running}


def merged(changes: Sequence[Change]) -> list[Change]:
    """One change per account, dimension and slot, in order of first mention."""
    sums: dict[tuple[str, Dimension, int], int] = {}
    for change in changes:
        key = change.account, change.dimension, change.slot
        sums[key] = sums.get(key, 0) + change.units
    return [Change(*key, units) for key, units in sums.items() if units]
