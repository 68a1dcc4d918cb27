"""A text engine that is made anew with fewer threads while other programs keep the cores busy, and with more later."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from statistics import median

from engines.port import Continuation, EngineLoad, TextEngine
from engines.thread_choice import ThreadChoice
from engines.wrapping import WrappedContinuation
from protocol.clock import Clock
from protocol.errors import EngineError, MidstreamError
from protocol.text import TextCapabilities, TextRequest, Token

LEAST_TOKENS = 12
MOST_TOKENS = 48
"""Tokens of an answer that are looked at: later ones may have waited for the reader."""

_log = logging.getLogger("midstream.engines.threads")


class RethreadedTextEngine:
    """Passes everything on to an engine that `make(threads)` made. Between answers it may be replaced by another one.

    A replacement reads the model again, so `choice` asks for one seldom; requests that come meanwhile wait for it.
    """

    def __init__(
        self, make: Callable[[int], TextEngine], choice: ThreadChoice, *, clock: Clock = time.monotonic
    ) -> None:
        self._make = make
        self._choice = choice
        self._clock = clock
        self.threads = choice.choice.threads
        self._inner = make(self.threads)
        self._open = 0
        self._shared = 0
        self._gate = asyncio.Lock()
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False

    def expect(self, token_s: Mapping[int, float]) -> None:
        """Seconds a token by thread count on an idle machine."""
        self._choice.expect(token_s)

    async def capabilities(self) -> TextCapabilities:
        return await (await self._entered()).capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        await self._replaced()
        async with self._gate:
            self._check_open()
            self._open += 1
            # Answers that share the cores with each other say nothing about other programs.
            self._shared += self._open > 1
            inner, shared = self._inner, self._shared - (self._open > 1)
        try:
            continuation = await inner.prepare(request, deadline_s)
        except BaseException:
            self._ended(())
            raise

        def ended(times_s: Sequence[float]) -> None:
            self._ended(times_s if shared == self._shared else ())

        return RethreadedContinuation(continuation, ended)

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await (await self._entered()).tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return await (await self._entered()).embed(texts)

    def load(self) -> EngineLoad:
        return self._inner.load()

    async def close(self) -> None:
        self._closed = True
        if self._replacing is not None:
            await asyncio.wait([self._replacing])
        await self._inner.close()

    async def _replaced(self) -> None:
        """A replacement that was begun comes before whoever asks now."""
        if self._replacing is not None and not self._replacing.done():
            await asyncio.wait([self._replacing])

    async def _entered(self) -> TextEngine:
        await self._replaced()
        async with self._gate:
            self._check_open()
            return self._inner

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _ended(self, times_s: Sequence[float]) -> None:
        """An answer is over; `times_s` says when its first tokens were made."""
        self._open -= 1
        if len(times_s) >= LEAST_TOKENS:
            token_s = median(later - sooner for sooner, later in pairwise(times_s))
            self._choice.answered(token_s, self._clock())
        idle = self._open == 0 and not self._closed and (self._replacing is None or self._replacing.done())
        if idle and self._choice.choice.threads != self.threads:
            self._replacing = asyncio.create_task(self._replace(), name="rethread")

    async def _replace(self) -> None:
        async with self._gate:
            choice = self._choice.choice
            if self._open or self._closed or choice.threads == self.threads:
                return
            _log.info("decoding goes on with %d threads: %s", choice.threads, choice.reason)
            # Two engines at once would need the memory twice.
            await self._inner.close()
            self.threads, self._inner = choice.threads, self._make(choice.threads)
            try:
                await self._inner.capabilities()
            except MidstreamError as err:
                # Whoever asks next is told; the engine tries again by itself.
                _log.warning("the engine with %d threads does not start: %s", choice.threads, err)


class RethreadedContinuation(WrappedContinuation):
    """Notes when tokens were made."""

    def __init__(self, inner: Continuation, ended: Callable[[Sequence[float]], None]) -> None:
        super().__init__(inner)
        self._ended = ended
        self._times_s: list[float] = []
        self._over = False

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        return self._tokens(self._inner.start(at, ahead_tokens), min(MOST_TOKENS, ahead_tokens))

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            if not self._over:
                self._over = True
                self._ended(self._times_s)

    async def _tokens(self, tokens: AsyncIterator[Token], most: int) -> AsyncIterator[Token]:
        try:
            async with aclosing(tokens) as inner:  # type: ignore[type-var]
                async for token in inner:
                    if token.data and token.at_s and len(self._times_s) < most:
                        self._times_s.append(token.at_s)
                    yield token
        finally:
            await self.close()
