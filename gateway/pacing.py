"""Delivery at the reader's pace, and what a reader notices: due times, delayed tokens, time between tokens.

Token i is due at t_first + i / r_c, where r_c is how fast the reader takes tokens; one that came later than that is
delayed (the metric of DiSCo, arXiv 2502.11417). Paced, a token leaves at its due time or when it comes, if that is
later; raw, it leaves as it comes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from math import ceil
from typing import Generic, TypeVar

from attrs import define, field

from protocol.clock import Clock
from protocol.events import TBT_BOUNDS_S, Gaps
from protocol.policy import Policy

AHEAD_TOKENS = 32
"""Tokens that may wait for their reader; then the engine is held back."""

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]


def reader_tokens_per_s(policy: Policy) -> float:
    """r_c: how fast the reader of this policy takes tokens.

    >>> reader_tokens_per_s(Policy())
    5.0
    """
    if policy.delivery.mode == "listening":
        return policy.delivery.listening_tokens_per_s
    if policy.delivery.mode == "reading":
        return policy.delivery.reading_tokens_per_s
    return policy.migration.consume_tokens_per_s


@define
class DeliveryMeter:
    """Counts one answer as its reader sees it. Times are monotonic seconds, in order.

    raw_s, paced_s: seconds between tokens as they came and as they left; one less than tokens.
    """

    tokens_per_s: float
    tokens: int = 0
    delayed_tokens: int = 0
    raw_s: list[float] = field(factory=list)
    paced_s: list[float] = field(factory=list)
    _first_s: float = 0.0
    _came_s: float = 0.0
    _left_s: float = 0.0
    _given: int = 0

    def came(self, tokens: int, at_s: float) -> float:
        """`tokens` tokens are here; returns when the first of them is due."""
        due_s = at_s
        for number in range(tokens):
            if self.tokens == 0:
                self._first_s = at_s
            else:
                self.raw_s.append(at_s - self._came_s)
            token_due_s = self._first_s + self.tokens / self.tokens_per_s
            due_s = token_due_s if number == 0 else due_s
            self.delayed_tokens += at_s > token_due_s
            self._came_s = at_s
            self.tokens += 1
        return due_s

    def left(self, tokens: int, at_s: float) -> None:
        """`tokens` tokens were given to the reader."""
        for _ in range(tokens):
            if self._given:
                self.paced_s.append(at_s - self._left_s)
            self._left_s = at_s
            self._given += 1


def gaps(seconds: Sequence[float]) -> Gaps:
    """Counted in buckets; the 99th percentile by nearest rank."""
    counts = [0] * (len(TBT_BOUNDS_S) + 1)
    for one in seconds:
        counts[bisect_left(TBT_BOUNDS_S, one)] += 1
    ordered = sorted(seconds)
    p99_s = ordered[ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
    return Gaps(tuple(counts), sum(seconds), p99_s)


@define(eq=False)
class _Buffer(Generic[T]):
    """What came and is not due yet; `most` tokens at once, so that a slow reader holds the engine back."""

    most: int
    waiting: deque[tuple[T, int, float]] = field(factory=deque)
    tokens: int = 0
    ended: bool = False
    error: BaseException | None = None
    changed: asyncio.Event = field(factory=asyncio.Event)
    room: asyncio.Event = field(factory=asyncio.Event)

    async def put(self, item: T, tokens: int, due_s: float) -> None:
        """Waits for room."""
        self.waiting.append((item, tokens, due_s))
        self.tokens += tokens
        self.changed.set()
        while self.tokens >= self.most:
            self.room.clear()
            await self.room.wait()

    def end(self, error: BaseException | None) -> None:
        """Nothing comes after what waits."""
        self.ended, self.error = True, error
        self.changed.set()

    async def take(self) -> tuple[T, int, float] | None:
        """The next item; None at the end. Raises what ended the source, after all that came before."""
        while not self.waiting:
            if self.error is not None:
                raise self.error
            if self.ended:
                return None
            self.changed.clear()
            await self.changed.wait()
        return self.waiting[0]

    def took(self) -> None:
        """The item of `take` was given."""
        _, tokens, _ = self.waiting.popleft()
        self.tokens -= tokens
        self.room.set()


async def metered(
    source: AsyncGenerator[T, None], meter: DeliveryMeter, tokens_of: Callable[[T], int], clock: Clock
) -> AsyncGenerator[T, None]:
    """Raw delivery: everything as it comes, counted. Closing it closes `source`."""
    try:
        async for item in source:
            tokens, now_s = tokens_of(item), clock()
            meter.came(tokens, now_s)
            meter.left(tokens, now_s)
            yield item
    finally:
        await source.aclose()


async def paced(
    source: AsyncGenerator[T, None],
    meter: DeliveryMeter,
    tokens_of: Callable[[T], int],
    clock: Clock,
    *,
    ahead_tokens: int = AHEAD_TOKENS,
    sleep: Sleep = asyncio.sleep,
) -> AsyncGenerator[T, None]:
    """Delivery at `meter.tokens_per_s`. Closing it ends the reading of `source`, which is closed too.

    ahead_tokens: so many may wait here; then `source` is not read on.
    """
    buffer: _Buffer[T] = _Buffer(max(1, ahead_tokens))

    async def fill() -> None:
        try:
            async for item in source:
                tokens = tokens_of(item)
                await buffer.put(item, tokens, meter.came(tokens, clock()))
        except Exception as err:  # noqa: BLE001 - it is raised to the reader, after what came before it
            buffer.end(err)
        else:
            buffer.end(None)

    filling = asyncio.create_task(fill(), name="paced-delivery")
    try:
        while (head := await buffer.take()) is not None:
            item, tokens, due_s = head
            if (wait_s := due_s - clock()) > 0:
                await sleep(wait_s)
            buffer.took()
            meter.left(tokens, clock())
            yield item
    finally:
        filling.cancel()
        await asyncio.wait({filling})
        await source.aclose()
