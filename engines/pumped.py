"""What generations that a server streams have in common: a task, the pump, reads ahead; the consumer takes on credit.

Each server's own continuation adds how its stream begins and what its chunks say.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from engines.credit import Credit, credit_from
from protocol.errors import LinkTimeout, MidstreamError
from protocol.text import Token


class PumpedContinuation(ABC):
    """Continuation over such a stream; `prefill()` comes first.

    Args:
        prefix: the answer so far.
    """

    extend_s: ClassVar[float]
    """Longest time that reading an extended prefix may take."""

    def __init__(self, prefix: Sequence[Token]) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._prefix = list(prefix)
        self._next = len(self._prefix)
        self._ready: deque[Token] = deque()
        self._news = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._failure: MidstreamError | None = None
        self._ended = False
        self._closed = False
        self._credit: Credit | None = None

    @abstractmethod
    async def _open(self) -> None:
        """Begin the stream behind prompt and prefix; the caller bounds the time."""

    @abstractmethod
    def _left(self) -> None:
        """It was closed; whoever counts it forgets it."""

    def _go_on(self) -> None:
        """Nothing is there and nothing has ended: begin the stream again if it was paused."""
        return

    def _taken(self) -> None:
        """One token less is there."""
        return

    async def prefill(self, deadline_s: float) -> None:
        """Return when the first token is there. Raises LinkTimeout, or what the server refused with."""
        self._next = len(self._prefix)
        try:
            async with asyncio.timeout(deadline_s):
                await self._open()
                await self._wait()
        except TimeoutError as err:
            raise LinkTimeout(f"no first token within {deadline_s:.1f} s") from err
        if self._failure is not None and not self._ready:
            raise self._failure

    async def extend(self, tokens: Sequence[Token]) -> None:
        if self._credit is not None:
            raise RuntimeError("extend() after start()")
        await self._halt()
        # What was made while nobody had asked is forgotten: the foreign tokens stand in its place.
        self._ready.clear()
        self._failure, self._ended = None, False
        self._prefix.extend(tokens)
        await self.prefill(self.extend_s)

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        self._credit = credit_from(self._credit, at, len(self._prefix), ahead_tokens)
        return self._tokens(self._credit)

    def acknowledge(self, index: int) -> None:
        if self._credit is not None:
            self._credit.acknowledge(index)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        if self._credit is not None:
            self._credit.close()
        await self._halt()
        self._ready.clear()
        self._news.set()
        self._left()

    async def _tokens(self, credit: Credit) -> AsyncIterator[Token]:
        try:
            while not self._closed:
                if not (self._ready or self._ended or self._failure):
                    self._go_on()
                    await self._wait()
                if not self._ready:
                    if self._failure is not None:
                        raise self._failure
                    return
                await credit.wait(self._ready[0].index)
                if not self._ready:
                    return
                token = self._ready.popleft()
                self._taken()
                yield token
                if token.finish is not None:
                    return
        finally:
            await self.close()

    async def _wait(self) -> None:
        while not (self._ready or self._ended or self._failure or self._closed):
            self._news.clear()
            await self._news.wait()

    def _put(self, token: Token) -> None:
        self._ready.append(token)
        self._ended = self._ended or token.finish is not None
        self._news.set()

    async def _halt(self) -> None:
        pump, self._pump = self._pump, None
        if pump is not None and not pump.done():
            pump.cancel()
            await asyncio.wait([pump])
