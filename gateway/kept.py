"""An answer out of the cache as the source of a stream: the pieces it was streamed in, at once and at no cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.ports import CachedAnswer
from gateway.stops import Owned
from protocol.text import FinishReason, Token

SIDE = "cache"


class KeptAnswer:
    """What gateway.answer.Source asks for, over a CachedAnswer."""

    def __init__(self, kept: CachedAnswer) -> None:
        self.finish: FinishReason | None = None
        self.ttft_s: float | None = None
        self.prompt_tokens = kept.usage.prompt_tokens
        self.cached_tokens = kept.usage.prompt_tokens
        self._kept = kept
        self._given = 0

    @property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """(`cache`, pieces given)."""
        return ((SIDE, self._given),) if self._given else ()

    async def tokens(self) -> AsyncGenerator[Owned, None]:
        """One token per piece."""
        self.ttft_s = 0.0
        for index, text in enumerate(self._kept.pieces):
            self._given += 1
            yield Owned(Token(index=index, id=None, data=text.encode("utf-8")), SIDE)
        self.finish = self._kept.finish

    async def abort(self, reason: str) -> None:
        """It ends by itself."""
