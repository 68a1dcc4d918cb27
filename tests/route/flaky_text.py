"""A text engine that dies in a chosen phase, whatever real engine is inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

from engines.port import Continuation, TextEngine
from engines.wrapping import WrappedContinuation, WrappedTextEngine
from protocol.errors import LinkClosed
from protocol.text import TextRequest, Token

Phase = Literal["prepare", "extend", "start", "token"]


class FlakyTextEngine(WrappedTextEngine):
    """Strikes once when `phase` is entered (`token`: at the third token after a start): dies, or does what it was told.

    token_s: each token takes at least so long. A dead engine raises LinkClosed at every call until `revive()`.
    """

    def __init__(self, inner: TextEngine, token_s: float = 0.0) -> None:
        super().__init__(inner)
        self.inner = inner
        self.token_s = token_s
        self.struck = False
        self._dead = False
        self._phase: Phase | None = None
        self._act: Callable[[], None] = self.die

    def arm(self, phase: Phase, act: Callable[[], None] | None = None) -> None:
        """Strike in `phase`; without `act` this engine dies."""
        self._phase, self._act, self.struck = phase, act or self.die, False

    def die(self) -> None:
        """Fail from now on."""
        self._dead = True

    def revive(self) -> None:
        """Work again, unarmed."""
        self._dead, self._phase, self.struck = False, None, False

    def passing(self, phase: Phase, tokens_since_start: int = 0) -> None:
        """Strike if it is time; raise when dead."""
        if self._phase == phase and (phase != "token" or tokens_since_start >= 3):
            self._phase, self.struck = None, True
            self._act()
        if self._dead:
            raise LinkClosed(f"killed in phase {phase}")

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        self.passing("prepare")
        return FlakyContinuation(self, await self.inner.prepare(request, deadline_s))


class FlakyContinuation(WrappedContinuation):
    """Continuation of a FlakyTextEngine."""

    def __init__(self, engine: FlakyTextEngine, inner: Continuation) -> None:
        super().__init__(inner)
        self._engine = engine

    async def extend(self, tokens: Sequence[Token]) -> None:
        self._engine.passing("extend")
        await self._inner.extend(tokens)

    async def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:  # type: ignore[override, misc]
        self._engine.passing("start")
        async for token in self._inner.start(at, ahead_tokens):
            await asyncio.sleep(self._engine.token_s)
            self._engine.passing("token", token.index - at)
            yield token
