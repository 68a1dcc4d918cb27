"""A target that prefills ahead, while the source goes on: prepared with the answer so far, extended with what comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from engines.port import Continuation
from gateway.targets import Target
from protocol.clock import Clock
from protocol.errors import MidstreamError
from protocol.text import Token

Prepare = Callable[[Target, int], Awaitable[Continuation]]
"""Prepares a target with the first `count` tokens of the answer."""


class Ahead:
    """One preparation. All of its work runs in a task of its own, so the running stream never waits for it.

    Args:
        made: gives tokens [first, end) of the answer as the target may see them (ids only for an equal vocabulary).
        generated: how many tokens of the answer stand fast now.
        batch_tokens: so many wait before they are sent: fewer frames and fewer tiny prefills.
    """

    def __init__(
        self,
        target: Target,
        prepare: Prepare,
        made: Callable[[Target, int, int], Sequence[Token]],
        generated: Callable[[], int],
        batch_tokens: Callable[[], int] = lambda: 4,
        clock: Clock = time.monotonic,
    ) -> None:
        self.target = target
        self.error: MidstreamError | None = None
        self.sent = self._prepared_tokens = generated()
        self._prepare = prepare
        self._made = made
        self._generated = generated
        self._batch_tokens = batch_tokens
        self._clock = clock
        self._prepare_s = 0.0
        self._continuation: Continuation | None = None
        self._final: int | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def ready(self) -> bool:
        """The prefix is prefilled; `lag_tokens` says what is still to be read."""
        return self._continuation is not None and self.error is None

    def read_s(self, rtt_s: float) -> float:
        """Seconds for each token that it had to read when it was prepared, the round trip taken out; 0: unknown."""
        continuation = self._continuation
        if continuation is None:
            return 0.0
        tokens = max(0, continuation.prompt_tokens - continuation.cached_tokens) + self._prepared_tokens
        return max(0.0, self._prepare_s - rtt_s) / tokens if tokens else 0.0

    @property
    def lag_tokens(self) -> int:
        """Tokens made since the target was last extended."""
        return self._generated() - self.sent

    def news(self) -> None:
        """The answer grew."""
        self._news.set()

    async def finish(self, at: int) -> Continuation:
        """Extend to exactly `at` tokens and hand the continuation over; the caller closes it from then on."""
        self._final = at
        self._news.set()
        await asyncio.wait({self._task})
        if self.error is not None:
            raise self.error
        self._task.result()
        continuation, self._continuation = self._continuation, None
        if continuation is None:
            raise RuntimeError("finish() is called once")
        return continuation

    async def close(self) -> None:
        """Give the preparation up; idempotent."""
        self._task.cancel()
        await asyncio.wait({self._task})
        continuation, self._continuation = self._continuation, None
        if continuation is not None:
            await continuation.close()

    async def _run(self) -> None:
        try:
            begun_s = self._clock()
            self._continuation = await self._prepare(self.target, self.sent)
            self._prepare_s = self._clock() - begun_s
            while self._final is None or self.sent < self._final:
                await self._extend()
        except MidstreamError as err:
            self.error = err

    async def _extend(self) -> None:
        end = self._generated() if self._final is None else self._final
        if self._final is None and end - self.sent < self._batch_tokens():
            self._news.clear()
            await self._news.wait()
            return
        continuation = self._continuation
        if continuation is None:
            raise RuntimeError("closed while it extends")
        await continuation.extend(self._made(self.target, self.sent, end))
        self.sent = end
