"""One answer as text: the owner's tokens through the stop scanner; usage, finish reason and the record of the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from attrs import define, field

from gateway.context import RequestContext
from gateway.ending import Ending, Made
from gateway.pacing import DeliveryMeter, gaps, metered, paced, reader_tokens_per_s
from gateway.ports import Restorer
from gateway.stops import Owned, Piece, StopScanner
from protocol.chat import ChatRequest
from protocol.clock import Clock
from protocol.errors import MidstreamError
from protocol.events import Emit, TextDelivered, TextDone
from protocol.text import FinishReason, Usage

Admit = Callable[["Answer"], Callable[[], None]]
"""Takes a place for a running answer and returns the way to give it back; raises Full."""


class Source(Protocol):
    """Where an answer's tokens come from: the owner of a stream, or an answer that was kept."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def ttft_s(self) -> float | None: ...

    @property
    def finish(self) -> FinishReason | None: ...

    @property
    def sides(self) -> tuple[tuple[str, int], ...]: ...

    def tokens(self) -> AsyncGenerator[Owned, None]: ...

    async def abort(self, reason: str) -> None: ...


@define
class Answer:
    """Iterate `pieces()` once; then `finish` and `usage` are settled. Closing the iterator cancels the generation.

    Whoever was given an answer calls `aclose()` in the end, even if it was never begun: it holds a reservation.
    """

    context: RequestContext
    request: ChatRequest
    owner: Source
    reason: str
    admit: Admit
    ending: Ending
    restorer: Restorer | None
    clock: Clock
    emit: Emit
    finish: FinishReason | None = None
    completion_tokens: int = field(default=0, init=False)
    _made: list[str] = field(factory=list, init=False)
    _shown: list[str] = field(factory=list, init=False)
    _over: bool = field(default=False, init=False)

    @property
    def usage(self) -> Usage:
        """What was counted, not estimated: tokens taken from the engines and the prompt as the first one saw it."""
        return Usage(self.owner.prompt_tokens, self.completion_tokens, self.owner.cached_tokens)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Text as it settles. Raises what StreamOwner.tokens raises, and Full when the house is."""
        release: Callable[[], None] | None = None
        begun_s = self.clock()
        status = "cancelled"
        stream = self.owner.tokens()
        try:
            release = self.admit(self)
            async with aclosing(self._restored(self._scan(stream))) as pieces:
                async for piece in pieces:
                    self._shown.append(piece.text)
                    yield piece
            status = "ok"
        except MidstreamError as err:
            status = err.code
            raise
        finally:
            if release is not None:
                release()
            await stream.aclose()
            await self._end(status, self.clock() - begun_s)

    async def delivered(self) -> AsyncGenerator[Piece, None]:
        """`pieces()` for a stream: at the pace that the policy sets, and counted as its reader sees them."""
        policy, context = self.context.policy, self.context
        meter = DeliveryMeter(reader_tokens_per_s(policy))
        deliver = metered if policy.delivery.mode == "raw" else paced
        try:
            async with aclosing(deliver(self.pieces(), meter, _tokens_of, self.clock)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.emit(
                TextDelivered(
                    at_s=self.clock(),
                    request_id=context.id,
                    model=context.model,
                    mode=policy.delivery.mode,
                    tokens_per_s=meter.tokens_per_s,
                    tokens=meter.tokens,
                    delayed_tokens=meter.delayed_tokens,
                    raw=gaps(meter.raw_s),
                    paced=gaps(meter.paced_s),
                )
            )

    async def aclose(self) -> None:
        """The end of an answer that nobody began; after `pieces()` it does nothing."""
        await self._end("cancelled", 0.0)

    async def _restored(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
        """The pieces as the client may see them; text waits while a placeholder may have begun in it."""
        waiting: tuple[Owned, ...] = ()
        async with aclosing(pieces):
            async for piece in pieces:
                self._made.append(piece.text)
                if self.restorer is None:
                    yield piece
                    continue
                text, waiting = self.restorer.feed(piece.text), waiting + piece.tokens
                if text or not piece.text:
                    yield Piece(text, waiting)
                    waiting = ()
        rest = self.restorer.flush() if self.restorer is not None else ""
        if rest or waiting:
            yield Piece(rest, waiting)

    async def _scan(self, stream: AsyncGenerator[Owned, None]) -> AsyncGenerator[Piece, None]:
        scanner = StopScanner(self.request.stop)
        async for owned in stream:
            self.completion_tokens += 1
            settled = scanner.feed(owned)
            if scanner.hit is not None:
                # The engine is freed before the client reads the last piece.
                await stream.aclose()
            for piece in settled:
                yield piece
            if scanner.hit is not None:
                self.finish = "stop"
                return
        for piece in scanner.flush():
            yield piece
        self.finish = self.owner.finish or "stop"

    async def _end(self, status: str, total_s: float) -> None:
        if self._over:
            return
        self._over = True
        owner = self.owner
        self.emit(
            TextDone(
                at_s=self.clock(),
                request_id=self.context.id,
                model=self.context.model,
                status=status,
                prompt_tokens=owner.prompt_tokens,
                completion_tokens=self.completion_tokens,
                ttft_s=owner.ttft_s,
                total_s=total_s,
                sides=owner.sides,
                reason=self.reason,
            )
        )
        made, shown = tuple(self._made), "".join(self._shown)
        await self.ending.run(Made(status, self.finish, self.usage, owner.sides, made, shown, owner.ttft_s, total_s))


def _tokens_of(piece: Piece) -> int:
    return len(piece.tokens)
