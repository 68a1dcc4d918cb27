"""One answer as text: the owner's tokens through the stop scanner; usage, finish reason and the record of the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from attrs import define, field

from gateway.context import RequestContext
from gateway.stops import Owned, Piece, StopScanner
from gateway.stream import StreamOwner
from protocol.chat import ChatRequest
from protocol.clock import Clock
from protocol.errors import MidstreamError
from protocol.events import Emit, TextDone
from protocol.text import FinishReason, Usage

Admit = Callable[["Answer"], Callable[[], None]]
"""Takes a place for a running answer and returns the way to give it back; raises Full."""


@define
class Answer:
    """Iterate `pieces()` once; then `finish` and `usage` are settled. Closing the iterator cancels the generation."""

    context: RequestContext
    request: ChatRequest
    owner: StreamOwner
    reason: str
    admit: Admit
    clock: Clock
    emit: Emit
    finish: FinishReason | None = None
    completion_tokens: int = field(default=0, init=False)

    @property
    def usage(self) -> Usage:
        """What was counted, not estimated: tokens taken from the engines and the prompt as the first one saw it."""
        return Usage(self.owner.prompt_tokens, self.completion_tokens, self.owner.cached_tokens)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Text as it settles. Raises what StreamOwner.tokens raises, and Full when the house is."""
        release = self.admit(self)
        begun_s = self.clock()
        status = "cancelled"
        stream = self.owner.tokens()
        try:
            async with aclosing(self._scan(stream)) as pieces:
                async for piece in pieces:
                    yield piece
            status = "ok"
        except MidstreamError as err:
            status = err.code
            raise
        finally:
            release()
            await stream.aclose()
            self._record(status, begun_s)

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

    def _record(self, status: str, begun_s: float) -> None:
        now_s = self.clock()
        self.emit(
            TextDone(
                at_s=now_s,
                request_id=self.context.id,
                model=self.context.model,
                status=status,
                prompt_tokens=self.owner.prompt_tokens,
                completion_tokens=self.completion_tokens,
                ttft_s=self.owner.ttft_s,
                total_s=now_s - begun_s,
                sides=self.owner.sides,
                reason=self.reason,
            )
        )
