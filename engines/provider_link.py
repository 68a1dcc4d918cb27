"""A Link to one provider that stands for the plain one: keys in turn, retries under a budget, a breaker, phase limits.

A request is sent again only while nothing of its answer was given on. What a client gave up says nothing of the server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing

from attrs import define, field, frozen

from engines.breaker import Breaker, BreakerRules
from engines.key_pool import CoolDown, KeyPool
from engines.retrying import FAILING_STATUSES, RETRIED_STATUSES, RetryBudget, RetryRules, wait_s
from links.patience import Patience
from links.port import FrameStream, Link, RejectedStatus, Reply
from protocol.clock import Clock
from protocol.errors import Full, LinkError, LinkTimeout, NotAllowed
from protocol.upstream import retry_after_s

MAX_TENANTS = 1024
"""Tenants whose keys are remembered at once; the least recently seen is forgotten first, with its cool-downs."""

LIMITED, UNKNOWN_KEY = frozenset({429}), frozenset({401, 402, 403})

Keys = Callable[[str], Sequence[str]]
"""The keys of a tenant, as they are now; empty: none."""

Authorize = Callable[[str], Mapping[str, str]]


@frozen
class Phases:
    """Seconds. first_byte_s: until the first byte of a stream. between_s: between its chunks. total_s: of a request.

    The time to connect belongs to the link underneath.
    """

    first_byte_s: float = 60.0
    between_s: float = 30.0
    total_s: float = 600.0


@define
class _Pass:
    """Leave for one attempt."""

    pool: KeyPool
    key: str | None
    headers: Mapping[str, str]


@define
class ProviderLink:
    """A Link; `for_tenant` gives the same server with that tenant's keys.

    Args:
        link: the way to the server.
        keys: read at each request, so that rotated keys count at once; None for a server that asks for none.
        authorize: the headers that carry a key.
        draw: a random number in [0, 1).
    """

    link: Link
    authorize: Authorize
    keys: Keys | None
    phases: Phases = field(factory=Phases)
    retrying: RetryRules = field(factory=RetryRules)
    cool_down: CoolDown = field(factory=CoolDown)
    breaker: Breaker = field(factory=lambda: Breaker(BreakerRules()))
    clock: Clock = time.monotonic
    draw: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    retries: int = field(default=0, init=False)
    """Attempts after the first ones, since the start."""
    _budget: RetryBudget = field(init=False)
    _tenants: OrderedDict[str, _TenantLink] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self._budget = RetryBudget(self.retrying)

    @property
    def name(self) -> str:
        return self.link.name

    def for_tenant(self, tenant: str) -> _TenantLink:
        """The same server, asked with the tenant's own keys where it has some."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _TenantLink(self, tenant, KeyPool(self.cool_down))
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return found

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        """As Link says, with the house's own keys."""
        return await self.for_tenant("").exchange(path, headers, body, deadline_s, method)

    def lines(self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float) -> AsyncIterator[bytes]:
        """As Link says, with the house's own keys."""
        return self.for_tenant("").lines(path, headers, body, deadline_s)

    async def open(self, path: str) -> FrameStream:
        """Providers have no frame streams of ours."""
        raise LinkError(f"{self.name} is a provider and takes no frame streams")

    async def close(self) -> None:
        """Close the way to the server."""
        await self.link.close()

    # What an attempt needs and what it tells.

    def admit(self, tenant: str, pool: KeyPool) -> _Pass:
        """Leave for one attempt. Raises Full while the server or all keys rest, NotAllowed without a key."""
        now_s = self.clock()
        rest_s = self.breaker.wait_s(now_s)
        if rest_s > 0:
            raise Full(f"{self.name} failed lately and is left alone", retry_after_s=rest_s)
        if self.keys is None:
            self.breaker.began(now_s)
            return _Pass(pool, None, {})
        pool.replace(self.keys(tenant))  # mostly the same ones, which costs nothing
        key = pool.choose(now_s)
        if key is None:
            raise self._no_key(pool, now_s)
        self.breaker.began(now_s)
        return _Pass(pool, key, self.authorize(key))

    def _no_key(self, pool: KeyPool, now_s: float) -> Full | NotAllowed:
        if not len(pool):
            return NotAllowed(
                f"there is no key for {self.name}", next_step="add one with `midstream providers add-key`"
            )
        return Full(f"all keys for {self.name} rest after refusals", retry_after_s=pool.wait_s(now_s))

    def answered(self, leave: _Pass, status: int, headers: Mapping[str, str]) -> float | None:
        """A reply's head is here: what it says of the key and of the server. Gives the wait it asks for."""
        now_s = self.clock()
        asked_s = retry_after_s(headers) if status >= 400 else None
        if status in FAILING_STATUSES:
            self.breaker.failed(now_s)
        elif status in LIMITED:
            self.breaker.dropped(now_s)
        else:
            self.breaker.succeeded(now_s)
        if leave.key is not None:
            if status in LIMITED:
                leave.pool.limited(leave.key, now_s, asked_s)
            elif status in UNKNOWN_KEY:
                leave.pool.refused(leave.key, now_s)
            else:
                leave.pool.succeeded(leave.key)
        return asked_s

    def first(self) -> None:
        """A request begins: it earns its part of a retry."""
        self._budget.earned()

    def refused(self, leave: _Pass, err: LinkError) -> tuple[int | None, float | None]:
        """What a stream that did not begin was answered, and the seconds that the server asks to wait."""
        if isinstance(err, RejectedStatus):
            return err.status, self.answered(leave, err.status, err.headers)
        self.breaker.failed(self.clock())
        return None, None

    def again_in_s(self, leave: _Pass, failed: int, status: int | None, asked_s: float | None, end_s: float) -> float:
        """Seconds until the next attempt, or -1 for none. status: None when no reply came."""
        now_s = self.clock()
        other_key = status in LIMITED | UNKNOWN_KEY and leave.key is not None and leave.pool.wait_s(now_s) == 0
        if other_key:
            wait = 0.0 if failed < max(self.retrying.attempts, len(leave.pool)) else None
        elif status is None or status in RETRIED_STATUSES:
            wait = wait_s(self.retrying, failed, asked_s, end_s - now_s, self.draw())
        else:
            wait = None
        if wait is None or self.breaker.wait_s(now_s + wait) > 0 or not self._budget.spend():
            return -1.0
        self.retries += 1
        return wait


@define
class _TenantLink:
    """One tenant's view of a provider."""

    owner: ProviderLink
    tenant: str
    pool: KeyPool

    @property
    def name(self) -> str:
        return self.owner.name

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        """As Link says; the reply is that of the last attempt."""
        owner = self.owner
        end_s = owner.clock() + min(deadline_s, owner.phases.total_s)
        owner.first()
        failed = 0
        while True:
            leave = owner.admit(self.tenant, self.pool)
            reply, error, asked_s = None, None, None
            try:
                left_s = max(0.0, end_s - owner.clock())
                reply = await owner.link.exchange(path, {**headers, **leave.headers}, body, left_s, method)
            except LinkError as err:
                owner.breaker.failed(owner.clock())
                error = err
            except BaseException:
                owner.breaker.dropped(owner.clock())
                raise
            if reply is not None:
                asked_s = owner.answered(leave, reply.status, reply.headers)
                if reply.status < 400:
                    return reply
            failed += 1
            wait = owner.again_in_s(leave, failed, reply.status if reply else None, asked_s, end_s)
            if wait < 0:
                if reply is not None:
                    return reply
                assert error is not None
                raise error
            await owner.sleep(wait)

    async def lines(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float
    ) -> AsyncIterator[bytes]:
        """As Link says. Raises LinkTimeout naming the phase that took too long."""
        owner = self.owner
        end_s = owner.clock() + owner.phases.total_s
        owner.first()
        failed = 0
        while True:
            leave = owner.admit(self.tenant, self.pool)
            wait = -1.0
            first_byte_s = min(owner.phases.first_byte_s, end_s - owner.clock())
            opened = owner.link.lines(path, {**headers, **leave.headers}, body, max(first_byte_s, deadline_s))
            async with aclosing(opened) as chunks:  # type: ignore[type-var]
                with closing(Patience()) as patience:
                    try:
                        first = await self._first(patience, chunks, first_byte_s)
                    except LinkError as err:
                        failed += 1
                        wait = owner.again_in_s(leave, failed, *owner.refused(leave, err), end_s)
                        if wait < 0:
                            raise
                    except BaseException:
                        owner.breaker.dropped(owner.clock())
                        raise
                    else:
                        owner.answered(leave, 200, {})
                        chunk, between_s = first, min(deadline_s, owner.phases.between_s)
                        while chunk is not None:
                            yield chunk
                            chunk = await self._next(patience, chunks, between_s, end_s)
                        return
            await owner.sleep(wait)

    async def _first(self, patience: Patience, chunks: AsyncIterator[bytes], seconds: float) -> bytes | None:
        """The first chunk, or None for an answer without any."""
        try:
            return await patience.wait(anext(chunks, None), seconds)
        except TimeoutError as err:
            raise LinkTimeout(f"{self.name} sent no first byte within {seconds:.1f} s") from err

    async def _next(
        self, patience: Patience, chunks: AsyncIterator[bytes], between_s: float, end_s: float
    ) -> bytes | None:
        """A further chunk, or None at the end."""
        owner = self.owner
        try:
            left_s = end_s - owner.clock()
            if left_s <= 0:
                raise LinkTimeout(f"{owner.name} took longer than the {owner.phases.total_s:g} s of a request")
            limit_s = min(between_s, left_s)
            try:
                return await patience.wait(anext(chunks, None), limit_s)
            except TimeoutError as err:
                raise LinkTimeout(f"{owner.name} was silent for {limit_s:.1f} s in its answer") from err
        except LinkError:
            owner.breaker.failed(owner.clock())
            raise

    async def open(self, path: str) -> FrameStream:
        """As the provider says."""
        return await self.owner.open(path)

    async def close(self) -> None:
        """The way belongs to the provider."""
