"""The ledger of what tenants have taken: the port that processes share, and its form in memory.

A process takes a block ahead of its need by one atomic operation and admits requests from it in memory; what it dies
with stays counted. Counts stand per account, dimension and slot. A slot is a stretch of wall time (a part of a second,
two seconds, a day, a month): a limit holds over the last `span` slots together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from attrs import define, field, frozen

from protocol.clock import Clock
from protocol.errors import MidstreamError

Dimension = Literal["requests", "tokens", "day", "month"]

DURABLE: frozenset[str] = frozenset({"day", "month"})
"""Budgets of money outlive a power cut; windows of a minute need not."""

MAX_SLOT_AHEAD = 64
"""Slots so far ahead were written before a clock was set back; they do not count."""


class LedgerError(MidstreamError):
    """The ledger cannot be asked: nobody is admitted against a limit that cannot be counted."""

    http_status = 503
    code = "ledger_unavailable"


@frozen
class Draw:
    """Wants `wanted` units, `least` at the least, of an account in `slot`, under `cap` over the last `span` slots."""

    account: str
    dimension: Dimension
    slot: int
    span: int
    cap: int
    wanted: int
    least: int


@frozen
class Drawn:
    """granted: 0, or from `least` to `wanted`. room: what is left for everybody under the cap afterwards."""

    granted: int
    room: int


@frozen
class Change:
    """Corrects a count: negative gives back what was not used, positive charges what was used beyond the block."""

    account: str
    dimension: Dimension
    slot: int
    units: int


@frozen
class Bill:
    """What a tenant took on one day (days since 1970-01-01, UTC), as upstreams counted it."""

    tenant: str
    day: int
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    nano_usd: int = 0

    def __add__(self, other: Bill) -> Bill:
        return Bill(
            self.tenant,
            self.day,
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.nano_usd + other.nano_usd,
        )


class Ledger(Protocol):
    """Shared by processes. Every method raises LedgerError when the store cannot be reached."""

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        """Each draw atomic, in order. Never lets a count exceed its cap."""
        ...

    def draw_now(self, draws: Sequence[Draw]) -> Sequence[Drawn] | None:
        """As `draw`, where that needs no waiting; None where it does, and then nothing was drawn."""
        ...

    async def change(self, changes: Sequence[Change]) -> None:
        """Correct counts; none falls below 0. Old slots that are gone already stay gone."""
        ...

    async def lease(self, account: str, holder: str, cap: int, wanted: int, ttl_s: float) -> int:
        """Hold `wanted` of `cap` places for `ttl_s` seconds instead of what was held before; returns what is held.

        Places of holders that did not come back in time are free again. 0 wanted gives all back.
        """
        ...

    async def taken(self, account: str, dimension: Dimension, slot: int) -> int:
        """The count of one slot: blocks that were taken, whether spent or not."""
        ...

    async def bill(self, bills: Sequence[Bill]) -> None:
        """Add to what tenants took."""
        ...

    async def bills(self, tenant: str, first_day: int, last_day: int) -> Sequence[Bill]:
        """Days with entries, in order."""
        ...

    async def close(self) -> None: ...


def grant(room: int, wanted: int, least: int) -> int:
    """How much of `room` a draw gets: near the cap less than wanted, so that one process does not hoard the rest.

    >>> grant(1000, 100, 10), grant(100, 100, 10), grant(12, 100, 10), grant(9, 100, 10)
    (100, 50, 10, 0)
    """
    if room < least:
        return 0
    return min(wanted, max(least, room // 2))


def counts(slot: int, at: int, span: int) -> bool:
    """Whether units of `slot` count against a limit at slot `at`."""
    return at - span < slot <= at + (MAX_SLOT_AHEAD if span > 1 else 0)


@define
class _Lease:
    places: int
    until_s: float


@define
class MemoryLedger:
    """For one process that keeps nothing; also the fake of the port. `clock`: monotonic seconds, for leases."""

    clock: Clock
    _slots: dict[tuple[str, str], dict[int, int]] = field(factory=lambda: defaultdict(dict), init=False)
    _leases: dict[str, dict[str, _Lease]] = field(factory=lambda: defaultdict(dict), init=False)
    _bills: dict[tuple[str, int], Bill] = field(factory=dict, init=False)

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        return [self._draw(draw) for draw in draws]

    def draw_now(self, draws: Sequence[Draw]) -> Sequence[Drawn] | None:
        return [self._draw(draw) for draw in draws]

    def _draw(self, draw: Draw) -> Drawn:
        slots = self._slots[draw.account, draw.dimension]
        for old in [slot for slot in slots if slot <= draw.slot - draw.span - _kept(draw.dimension)]:
            del slots[old]
        room = draw.cap - sum(units for slot, units in slots.items() if counts(slot, draw.slot, draw.span))
        granted = grant(room, draw.wanted, draw.least)
        if granted:
            slots[draw.slot] = slots.get(draw.slot, 0) + granted
        return Drawn(granted, max(0, room - granted))

    async def change(self, changes: Sequence[Change]) -> None:
        for change in changes:
            slots = self._slots[change.account, change.dimension]
            if change.slot in slots or change.units > 0:
                slots[change.slot] = max(0, slots.get(change.slot, 0) + change.units)

    async def lease(self, account: str, holder: str, cap: int, wanted: int, ttl_s: float) -> int:
        now_s, leases = self.clock(), self._leases[account]
        for name in [name for name, lease in leases.items() if lease.until_s <= now_s or name == holder]:
            del leases[name]
        held = max(0, min(wanted, cap - sum(lease.places for lease in leases.values())))
        if held:
            leases[holder] = _Lease(held, now_s + ttl_s)
        return held

    async def taken(self, account: str, dimension: Dimension, slot: int) -> int:
        return self._slots[account, dimension].get(slot, 0)

    async def bill(self, bills: Sequence[Bill]) -> None:
        for bill in bills:
            key = bill.tenant, bill.day
            self._bills[key] = self._bills[key] + bill if key in self._bills else bill

    async def bills(self, tenant: str, first_day: int, last_day: int) -> Sequence[Bill]:
        found = [b for (name, day), b in self._bills.items() if name == tenant and first_day <= day <= last_day]
        return sorted(found, key=lambda bill: bill.day)

    async def close(self) -> None:
        """Nothing to close."""


KEPT_SLOTS: Mapping[str, int] = {"requests": 0, "tokens": 0, "day": 62, "month": 13}
"""Slots that stay readable after they stopped to count."""


def _kept(dimension: str) -> int:
    return KEPT_SLOTS[dimension]
