"""How an answer leaves: whole, or as a stream whose headers wait for the first content of a live attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from gateway.answer import Answer
from gateway.settings import GatewaySettings
from gateway.stops import Piece
from gateway.surely import Once, dropped
from gateway.wire import Wire
from links.port import Response
from protocol.errors import MidstreamError


async def whole(answer: Answer, wire: Wire) -> Response:
    """The answer in one body. Raises what ended it early: half an answer is never sent as a whole one."""
    try:
        pieces = [piece async for piece in answer.pieces()]
    finally:
        await answer.aclose()
    return Response(200, {"content-type": "application/json", **_headers(answer)}, wire.whole(answer, pieces))


async def streamed(answer: Answer, wire: Wire, settings: GatewaySettings) -> Response:
    """The answer as it comes. Waits up to `hold_headers_s` for the first piece, so that a failure keeps its status."""
    body = EventBody(answer, wire, settings.ping_every_s)
    try:
        await body.first(settings.hold_headers_s)
    except BaseException:
        await body.aclose()
        raise
    return Response(200, {**wire.headers, **_headers(answer)}, body)


class EventBody:
    """The chunks of one streamed answer. Closing it cancels the generation, even before a chunk was asked for."""

    def __init__(self, answer: Answer, wire: Wire, ping_every_s: float) -> None:
        self._answer = answer
        self._wire = wire
        self._ping_every_s = ping_every_s
        self._pieces = answer.delivered()
        self._coming: asyncio.Task[Piece | None] | None = None
        self._begun = False
        self._ending = Once()
        self._events = self._make()

    async def first(self, hold_s: float) -> None:
        """Return when the first piece is there or `hold_s` has passed. Raises what refused the request before it."""
        coming = self._next()
        await asyncio.wait({coming}, timeout=hold_s)
        if coming.done():
            coming.result()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Cancel whatever runs; idempotent, and done even if whoever waits for it is cancelled."""
        await self._ending.run(self._close())

    async def _close(self) -> None:
        coming, self._coming = self._coming, None
        await dropped(coming)
        await self._events.aclose()
        await self._pieces.aclose()
        await self._answer.aclose()

    def _next(self) -> asyncio.Task[Piece | None]:
        if self._coming is None:
            self._coming = asyncio.create_task(_take(self._pieces))
        return self._coming

    async def _make(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                coming = self._next()
                done, _ = await asyncio.wait({coming}, timeout=self._ping_every_s)
                if not done:
                    yield self._wire.ping
                    continue
                self._coming = None
                piece = coming.result()
                if piece is None:
                    break
                if event := self._begin() + self._wire.piece(self._answer, piece):
                    yield event
        except MidstreamError as err:
            # No finish reason and no end mark follow: a cut answer must not look complete.
            yield self._wire.error(err)
            return
        yield self._begin() + self._wire.end(self._answer)

    def _begin(self) -> bytes:
        begun, self._begun = self._begun, True
        return b"" if begun else self._wire.begin(self._answer)


async def _take(pieces: AsyncIterator[Piece]) -> Piece | None:
    return await anext(pieces, None)


def _headers(answer: Answer) -> dict[str, str]:
    sides = [side for side, _ in answer.owner.sides]
    found = {
        "x-midstream-request-id": answer.context.id,
        "x-midstream-trace-id": answer.context.trace.trace_id,
        "x-midstream-reason": answer.reason,
        "x-midstream-max-tokens": str(answer.request.sampling.max_tokens),
        **answer.ending.reservation.headers,
    }
    if sides:
        found["x-midstream-target"] = ",".join(dict.fromkeys(sides))
    return found
