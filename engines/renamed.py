"""An engine that is asked for one model under another's name, so that a fallback keeps the request as it is."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from engines.port import Continuation, EngineLoad, TextEngine
from protocol.text import TextCapabilities, TextRequest


class RenamedTextEngine:
    """TextEngine over `inner`, which gets every request with `model` in it. Its owner closes the inner one."""

    def __init__(self, inner: TextEngine, model: str) -> None:
        self._inner = inner
        self._model = model

    async def capabilities(self) -> TextCapabilities:
        """The inner engine's."""
        return await self._inner.capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        """See TextEngine."""
        return await self._inner.prepare(evolve(request, model=self._model), deadline_s)

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        """The inner engine's."""
        return await self._inner.tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """The inner engine's."""
        return await self._inner.embed(texts)

    def load(self) -> EngineLoad:
        """The inner engine's."""
        return self._inner.load()

    async def close(self) -> None:
        """Nothing: the inner engine is another target's."""
