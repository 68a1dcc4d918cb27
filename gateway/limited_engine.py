"""A text engine behind a tenant's limits: for those who come below the front door, by the handoff wire.

Each generation is reserved before its prompt is read, charged by the tokens that were made, and given back however it
ends. Money is no part of it: what is lent here are this house's own engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from engines.port import Continuation, TextEngine
from engines.wrapping import WrappedContinuation, WrappedTextEngine
from gateway.context import Caller
from gateway.ports import Estimate, Limits, Reservation, Spent
from gateway.spending import prompt_size
from protocol.chat import ChatRequest
from protocol.text import TextRequest, Token

Whose = Callable[[], Caller]
"""Who asks; raises NotAllowed when they may not any more."""


class LimitedEngine(WrappedTextEngine):
    """Everything but `prepare` goes to the engine as it is."""

    def __init__(self, inner: TextEngine, limits: Limits, whose: Whose) -> None:
        super().__init__(inner)
        self._limits = limits
        self._whose = whose

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        """Raises RateLimited, BudgetExceeded or TooLarge beside what the engine raises."""
        likely = prompt_size(ChatRequest(request.model, request.prompt, tools=request.tools)).likely_tokens
        left = max(0, request.sampling.max_tokens - len(request.prefix))
        estimate = Estimate(request.model, likely + len(request.prefix), left)
        reservation = await self._limits.reserve(self._whose(), estimate)
        try:
            inner = await self._inner.prepare(request, deadline_s)
        except BaseException:
            await reservation.release()
            raise
        return _Limited(inner, reservation, len(request.prefix))

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Vectors are reserved and charged by the size of their texts."""
        chat = ChatRequest("", "\n".join(texts), endpoint="embedding")
        likely = prompt_size(chat).likely_tokens
        reservation = await self._limits.reserve(self._whose(), Estimate("", likely, 0))
        try:
            return await self._inner.embed(texts)
        finally:
            await reservation.settle(Spent(prompt_tokens=likely))

    async def close(self) -> None:
        """The engine is the house's; nothing is closed here."""


class _Limited(WrappedContinuation):
    """A continuation that settles its reservation when it is closed."""

    def __init__(self, inner: Continuation, reservation: Reservation, prefix_tokens: int) -> None:
        super().__init__(inner)
        self._reservation = reservation
        self._prefix_tokens = prefix_tokens
        self._made = 0

    async def extend(self, tokens: Sequence[Token]) -> None:
        self._prefix_tokens += len(tokens)
        await self._inner.extend(tokens)

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        return self._counted(self._inner.start(at, ahead_tokens))

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            read = self._inner.prompt_tokens + self._prefix_tokens
            await self._reservation.settle(Spent(read, self._made, self._inner.cached_tokens))

    async def _counted(self, tokens: AsyncIterator[Token]) -> AsyncIterator[Token]:
        try:
            async for token in tokens:
                self._made += bool(token.data)
                yield token
        finally:
            aclose: Any = getattr(tokens, "aclose", None)
            if aclose is not None:
                await aclose()
