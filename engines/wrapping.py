"""Engines and continuations around others: everything goes to the inner one but what a wrapper does itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from engines.port import Continuation, EngineLoad, SpokenContinuation, TextEngine
from protocol.text import TextCapabilities, TextRequest, Token


class WrappedTextEngine:
    """TextEngine over `inner`. `close` closes it; a wrapper whose inner engine has another owner says otherwise."""

    def __init__(self, inner: TextEngine) -> None:
        self._inner = inner

    async def capabilities(self) -> TextCapabilities:
        return await self._inner.capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        return await self._inner.prepare(request, deadline_s)

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._inner.tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return await self._inner.embed(texts)

    def load(self) -> EngineLoad:
        return self._inner.load()

    async def close(self) -> None:
        await self._inner.close()


class WrappedContinuation:
    """Continuation over `inner`."""

    def __init__(self, inner: Continuation) -> None:
        self._inner = inner

    @property
    def prompt_tokens(self) -> int:
        return self._inner.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._inner.cached_tokens

    def spoken(self) -> Token | None:
        """The first token, if the engine has it: see SpokenContinuation."""
        return self._inner.spoken() if isinstance(self._inner, SpokenContinuation) else None

    async def extend(self, tokens: Sequence[Token]) -> None:
        await self._inner.extend(tokens)

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        return self._inner.start(at, ahead_tokens)

    def acknowledge(self, index: int) -> None:
        self._inner.acknowledge(index)

    async def close(self) -> None:
        await self._inner.close()
