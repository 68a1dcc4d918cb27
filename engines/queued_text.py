"""Bounded admission in front of a text engine: a short queue by Little's law, and an honest refusal beyond it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Literal

from attrs import define

from engines.port import Continuation, EngineLoad, TextEngine
from engines.text_admission import Running, TextAdmission, Work
from engines.wrapping import WrappedContinuation
from protocol.chat import prompt_bytes
from protocol.clock import Clock
from protocol.errors import EngineError, Full, LinkTimeout
from protocol.events import Emit, QueueSampled, ignore
from protocol.text import TextCapabilities, TextRequest, Token

EMBED_S = 30.0
Outcome = Literal["queued", "refused", "done"]


class QueuedTextEngine:
    """Runs at most `slots` generations of `engine`, lets others wait in order of arrival, refuses the rest with Full.

    A request that is cancelled or whose deadline passes while it waits leaves the queue and never runs. How many may
    wait follows from the measured decode rate, the requests' lengths and `wait_target_s`: see engines.text_admission.
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
        self._admission = TextAdmission(slots, wait_target_s)
        self._waiting: deque[_Turn] = deque()
        self._running: list[_Place] = []
        self._closed = False

    async def capabilities(self) -> TextCapabilities:
        return await self._engine.capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        began_s = self._clock()
        most = max(1, request.sampling.max_tokens - len(request.prefix))
        place = await self._enter(Work(prompt_bytes(request.prompt), most), deadline_s)
        entered_s = self._clock()
        try:
            inner = await self._engine.prepare(request, max(0.001, deadline_s - (entered_s - began_s)))
        except BaseException:
            self._leave(place)
            raise
        self._admission.learn_prefill(place.work.prompt_bytes, self._clock() - entered_s, len(self._running))
        place.made = 0
        return QueuedContinuation(inner, place, self._clock, lambda: self._learn_and_leave(place))

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._engine.tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        place = await self._enter(Work(sum(len(text) for text in texts), 1), EMBED_S)
        try:
            return await self._engine.embed(texts)
        finally:
            self._leave(place)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self._waiting), self._wait_s())

    def expect(self, tokens_per_s: float | None) -> None:
        """A decode rate from elsewhere, for admission until an answer was seen here; None forgets it."""
        self._admission.expect(tokens_per_s)

    def set_wait_target(self, seconds: float) -> None:
        """Let requests wait up to `seconds` from now on; who waits already stays. ValueError unless above 0."""
        self._admission.set_wait_target(seconds)

    async def close(self) -> None:
        """Refuse who waits, then close the engine."""
        self._closed = True
        for turn in self._waiting:
            if not turn.place.done():
                turn.place.set_exception(EngineError(f"the engine {self._name} was closed"))
        self._waiting.clear()
        await self._engine.close()

    async def _enter(self, work: Work, deadline_s: float) -> _Place:
        if self._closed:
            raise EngineError(f"the engine {self._name} was closed")
        decision = self._admission.decide(self._views(), [turn.work for turn in self._waiting])
        if decision.act == "refuse":
            self._sample("refused")
            raise Full(f"{self._name}: {decision.reason}", retry_after_s=max(0.1, decision.retry_after_s))
        if len(self._running) < self._slots and not self._waiting:
            self._running.append(place := _Place(work, self._clock()))
            self._sample("queued")
            return place
        turn = _Turn(work, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._sample("queued")
        try:
            async with asyncio.timeout(deadline_s):
                return await turn.place
        except BaseException as err:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.place.done() and not turn.place.cancelled() and turn.place.exception() is None:
                # The place came in the same moment: hand it on.
                self._leave(turn.place.result())
            if isinstance(err, TimeoutError):
                raise LinkTimeout(f"{self._name}: no slot became free within {deadline_s:.1f} s") from err
            raise

    def _learn_and_leave(self, place: _Place) -> None:
        """An answer was given, or a part of it: its tokens tell the rate, its end the length."""
        if place.made and place.first_s is not None:
            self._admission.learn_decode(place.made - 1, place.last_s - place.first_s, len(self._running))
        if place.made and place.ended:
            self._admission.learn_length(place.made)
        self._leave(place)

    def _leave(self, place: _Place) -> None:
        self._running.remove(place)
        while self._waiting and len(self._running) < self._slots:
            turn = self._waiting.popleft()
            if not turn.place.done():
                self._running.append(following := _Place(turn.work, self._clock()))
                turn.place.set_result(following)
        self._sample("done", self._clock() - place.since_s)

    def _views(self) -> list[Running]:
        return [Running(place.work, place.made) for place in self._running]

    def _wait_s(self) -> float:
        return self._admission.wait_s(self._views(), [turn.work for turn in self._waiting])

    def _sample(self, outcome: Outcome, service_s: float = 0.0) -> None:
        self._emit(
            QueueSampled(
                at_s=self._clock(),
                name=self._name,
                waiting=len(self._waiting),
                running=len(self._running),
                capacity=self._admission.capacity,
                outcome=outcome,
                wait_s=self._wait_s(),
                service_s=service_s,
            )
        )


@define(eq=False)
class _Place:
    """A slot in use: tokens so far (None while the prompt is read), when the first and the last were handed over."""

    work: Work
    since_s: float
    made: int | None = None
    first_s: float | None = None
    last_s: float = 0.0
    ended: bool = False

    def count(self, token: Token, now_s: float) -> None:
        """A token is on its way to the consumer."""
        self.ended = token.finish is not None
        if token.data or token.finish is None:
            self.made = (self.made or 0) + 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s


@define(eq=False)
class _Turn:
    """A request that waits for its place."""

    work: Work
    place: asyncio.Future[_Place]


class QueuedContinuation(WrappedContinuation):
    """Gives its slot back when it is closed or its answer has ended. Tokens pass through as they are."""

    def __init__(self, inner: Continuation, place: _Place, clock: Clock, leave: Callable[[], None]) -> None:
        super().__init__(inner)
        self._place = place
        self._clock = clock
        self._leave = leave
        self._left = False

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
                    self._place.count(token, self._clock())
                    yield token
        finally:
            await self.close()

    def _free(self) -> None:
        if not self._left:
            self._left = True
            self._leave()
