"""A declared slow-down of a text engine, by real waiting, so that every measured cost includes it.

One machine that plays both a small device and a server uses this, and says the factor wherever it reports.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from statistics import median

from attrs import evolve

from engines.port import Continuation, EngineLoad, TextEngine
from engines.wrapping import WrappedContinuation, WrappedTextEngine
from protocol.clock import Clock
from protocol.text import TextRequest, Token

CLIP_RATIO = 2.0
"""A token counts as at most this many usual ones, so that a pause for credit is not slowed down too."""

REMEMBERED_TOKENS = 16

Sleep = Callable[[float], Awaitable[None]]


class SlowedTextEngine(WrappedTextEngine):
    """Prefill and each token of `engine` take `factor` (at least 1) times as long."""

    def __init__(
        self, engine: TextEngine, factor: float, *, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep
    ) -> None:
        if factor < 1:
            raise ValueError("a slow-down factor is at least 1")
        self.factor = factor
        self.clock = clock
        super().__init__(engine)
        self._sleep = sleep

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        # What loads or probes the model at first use is not prefill.
        await self._inner.capabilities()
        began_s = self.clock()
        inner = await self._inner.prepare(request, deadline_s)
        try:
            await self.linger(self.clock() - began_s)
        except BaseException:
            await inner.close()
            raise
        return SlowedContinuation(self, inner)

    def load(self) -> EngineLoad:
        load = self._inner.load()
        return evolve(load, wait_s=load.wait_s * self.factor)

    async def linger(self, seconds: float) -> None:
        """Wait for what work of `seconds` takes longer here."""
        await self._sleep(max(0.0, seconds) * (self.factor - 1))

    async def wait_until(self, at_s: float) -> None:
        """Wait for a moment of the clock."""
        if (left_s := at_s - self.clock()) > 0:
            await self._sleep(left_s)


class SlowedContinuation(WrappedContinuation):
    """Hands each token out when a machine `factor` times slower would have made it."""

    def __init__(self, engine: SlowedTextEngine, inner: Continuation) -> None:
        super().__init__(inner)
        self._engine = engine

    async def extend(self, tokens: Sequence[Token]) -> None:
        began_s = self._engine.clock()
        await self._inner.extend(tokens)
        await self._engine.linger(self._engine.clock() - began_s)

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        return self._slowed(self._inner.start(at, ahead_tokens))

    async def _slowed(self, tokens: AsyncIterator[Token]) -> AsyncIterator[Token]:
        engine, pace = self._engine, _Pace(self._engine.factor, self._engine.clock())
        try:
            while True:
                wanted_s = engine.clock()
                token = await anext(tokens, None)
                if token is None:
                    return
                made_s = token.at_s or engine.clock()
                # A pure end mark of a full answer is no work.
                await engine.wait_until(pace.due_s(wanted_s, made_s, work=bool(token.data or token.id is not None)))
                yield evolve(token, at_s=engine.clock())
        finally:
            await self._inner.close()


class _Pace:
    """When a machine `factor` times slower would have made each token."""

    def __init__(self, factor: float, began_s: float) -> None:
        self._factor = factor
        self._due_s = self._made_s = began_s
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=REMEMBERED_TOKENS)

    def due_s(self, wanted_s: float, made_s: float, *, work: bool) -> float:
        """The moment for a token that was asked for at `wanted_s` and made at `made_s`."""
        # Made after it was asked for: the engine waited for that, or we are level with it. Made before: it runs ahead.
        waited = made_s >= wanted_s
        seconds = max(0.0, made_s - (wanted_s if waited else self._made_s)) if work else 0.0
        begins_s = max(self._due_s, wanted_s) if waited else self._due_s
        self._made_s = made_s
        self._due_s = begins_s + self._factor * min(seconds, self._most_s(seconds))
        return self._due_s

    def _most_s(self, seconds: float) -> float:
        """A gap much longer than usual was a pause for credit, not work."""
        self._last.append(seconds)
        if len(self._first) < REMEMBERED_TOKENS:
            self._first.append(seconds)
        return CLIP_RATIO * min(median(self._first), median(self._last))
