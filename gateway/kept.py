"""An answer out of the cache as the source of a stream: the pieces it was streamed in, at once and at no cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.ports import CachedAnswer
from gateway.stops import Owned
from protocol.text import CallDelta, FinishReason, Token, Usage

SIDE = "cache"


class KeptAnswer:
    """What gateway.answer.Source asks for, over a CachedAnswer."""

    def __init__(self, kept: CachedAnswer) -> None:
        self.finish: FinishReason | None = None
        self.ttft_s: float | None = None
        self.usage: Usage | None = None
        self.prompt_tokens = kept.usage.prompt_tokens
        self.cached_tokens = kept.usage.prompt_tokens
        self._kept = kept
        self._given = 0

    @property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """(`cache`, pieces given)."""
        return ((SIDE, self._given),) if self._given else ()

    @property
    def losers(self) -> tuple[str, ...]:
        """Nobody was asked."""
        return ()

    async def tokens(self) -> AsyncGenerator[Owned, None]:
        """One token per piece, then one per tool call."""
        self.ttft_s = 0.0
        for text in self._kept.pieces:
            yield self._owned(data=text.encode("utf-8"))
        for number, call in enumerate(self._kept.calls):
            function = call["function"]
            yield self._owned(call=CallDelta(number, call["id"], function["name"], function["arguments"]))
        self.finish = self._kept.finish

    def _owned(self, data: bytes = b"", call: CallDelta | None = None) -> Owned:
        self._given += 1
        return Owned(Token(index=self._given - 1, id=None, data=data, call=call), SIDE)

    async def abort(self, reason: str) -> None:
        """It ends by itself."""
