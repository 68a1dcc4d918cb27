"""An engine that is asked for one model under another's name, so that a fallback keeps the request as it is."""

from __future__ import annotations

from attrs import evolve

from engines.port import Continuation, TextEngine
from engines.wrapping import WrappedTextEngine
from protocol.text import TextRequest


class RenamedTextEngine(WrappedTextEngine):
    """TextEngine over `inner`, which gets every request with `model` in it. Its owner closes the inner one."""

    def __init__(self, inner: TextEngine, model: str) -> None:
        super().__init__(inner)
        self._model = model

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        """See TextEngine."""
        return await self._inner.prepare(evolve(request, model=self._model), deadline_s)

    async def close(self) -> None:
        """Nothing: the inner engine is another target's."""
