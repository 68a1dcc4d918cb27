"""Bounded admission in front of a text engine: a short queue by Little's law, and an honest refusal beyond it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Literal

from engines.admission import Admission, Load
from engines.port import Continuation, EngineLoad, SpokenContinuation, TextEngine
from protocol.clock import Clock
from protocol.errors import EngineError, Full, LinkTimeout
from protocol.events import Emit, QueueSampled, ignore
from protocol.text import TextCapabilities, TextRequest, Token

Outcome = Literal["queued", "refused", "done"]


class QueuedTextEngine:
    """Runs at most `slots` generations of `engine`, lets others wait in order of arrival, refuses the rest with Full.

    A request that is cancelled or whose deadline passes while it waits leaves the queue and never runs. How many may
    wait follows from the measured time that a generation holds its slot and from `wait_target_s`.
    """

    def __init__(
        self,
        engine: TextEngine,
        *,
        slots: int,
        wait_target_s: float,
        name: str = "text",
        clock: Clock = time.monotonic,
        emit: Emit = ignore,
    ) -> None:
        self._engine = engine
        self._slots = slots
        self._name = name
        self._clock = clock
        self._emit = emit
        self._admission = Admission(slots, wait_target_s, parallel=float(slots))
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running = 0
        self._closed = False

    async def capabilities(self) -> TextCapabilities:
        return await self._engine.capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        began_s = self._clock()
        await self._enter(deadline_s)
        entered_s = self._clock()
        try:
            inner = await self._engine.prepare(request, max(0.001, deadline_s - (entered_s - began_s)))
        except BaseException:
            self._leave(None)
            raise
        return QueuedContinuation(inner, lambda: self._leave(self._clock() - entered_s))

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._engine.tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        await self._enter(30.0)
        began_s = self._clock()
        try:
            return await self._engine.embed(texts)
        finally:
            self._leave(self._clock() - began_s)

    def load(self) -> EngineLoad:
        return EngineLoad(self._running, len(self._waiting), self._admission.wait_s(self._load()))

    def set_wait_target(self, seconds: float) -> None:
        """Let requests wait up to `seconds` from now on; who waits already stays. ValueError unless above 0."""
        self._admission.set_wait_target(seconds)

    async def close(self) -> None:
        """Refuse who waits, then close the engine."""
        self._closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(EngineError(f"the engine {self._name} was closed"))
        self._waiting.clear()
        await self._engine.close()

    async def _enter(self, deadline_s: float) -> None:
        if self._closed:
            raise EngineError(f"the engine {self._name} was closed")
        decision = self._admission.decide(self._load(), "refuse")
        if decision.act == "refuse":
            self._sample("refused")
            raise Full(f"{self._name}: {decision.reason}", retry_after_s=max(0.1, decision.retry_after_s))
        if self._running < self._slots and not self._waiting:
            self._running += 1
            self._sample("queued")
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._sample("queued")
        try:
            async with asyncio.timeout(deadline_s):
                await turn
        except BaseException as err:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                # The place came in the same moment: hand it on.
                self._leave(None)
            if isinstance(err, TimeoutError):
                raise LinkTimeout(f"{self._name}: no slot became free within {deadline_s:.1f} s") from err
            raise

    def _leave(self, service_s: float | None) -> None:
        if service_s is not None:
            self._admission.add(service_s, float(self._running))
        self._running -= 1
        while self._waiting and self._running < self._slots:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)
        self._sample("done", service_s or 0.0)

    def _load(self) -> Load:
        return Load(waiting=len(self._waiting), running=self._running, workers=self._slots)

    def _sample(self, outcome: Outcome, service_s: float = 0.0) -> None:
        self._emit(
            QueueSampled(
                at_s=self._clock(),
                name=self._name,
                waiting=len(self._waiting),
                running=self._running,
                capacity=self._admission.capacity,
                outcome=outcome,
                wait_s=self._admission.wait_s(self._load()),
                service_s=service_s,
            )
        )


class QueuedContinuation:
    """Gives its slot back when it is closed or its answer has ended. Tokens pass through as they are."""

    def __init__(self, inner: Continuation, leave: Callable[[], None]) -> None:
        self._inner = inner
        self._leave = leave
        self._left = False

    @property
    def prompt_tokens(self) -> int:
        return self._inner.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._inner.cached_tokens

    async def extend(self, tokens: Sequence[Token]) -> None:
        await self._inner.extend(tokens)

    def spoken(self) -> Token | None:
        """The first token, if the engine has it."""
        return self._inner.spoken() if isinstance(self._inner, SpokenContinuation) else None

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        return self._tokens(self._inner.start(at, ahead_tokens))

    def acknowledge(self, index: int) -> None:
        self._inner.acknowledge(index)

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            self._free()

    async def _tokens(self, tokens: AsyncIterator[Token]) -> AsyncIterator[Token]:
        try:
            async with aclosing(tokens) as inner:  # type: ignore[type-var]
                async for token in inner:
                    yield token
        finally:
            await self.close()

    def _free(self) -> None:
        if not self._left:
            self._left = True
            self._leave()
