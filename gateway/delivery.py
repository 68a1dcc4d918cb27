"""How an answer leaves: whole, or as server-sent events whose headers wait for the first content of a live attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from gateway.answer import Answer
from gateway.settings import GatewaySettings
from gateway.stops import Piece
from links.port import Response
from protocol import openai_wire, sse
from protocol.errors import MidstreamError
from protocol.openai_wire import AnswerHead


async def whole(answer: Answer, head: AnswerHead) -> Response:
    """The answer in one body. Raises what ended it early: half an answer is never sent as a whole one."""
    try:
        pieces = [piece async for piece in answer.pieces()]
    finally:
        await answer.aclose()
    text = "".join(piece.text for piece in pieces)
    logprobs = _logprobs(answer, tuple(pieces), 0)
    extra = {"midstream": {"sides": [{"side": side, "tokens": tokens} for side, tokens in answer.owner.sides]}}
    document = openai_wire.response(head, text, answer.finish or "stop", answer.usage, logprobs=logprobs, extra=extra)
    headers = {"content-type": "application/json", **_headers(answer)}
    return Response(200, headers, openai_wire.dump(document))


async def streamed(answer: Answer, head: AnswerHead, settings: GatewaySettings) -> Response:
    """Server-sent events. Waits up to `hold_headers_s` for the first piece, so that a failure keeps its own status."""
    body = EventBody(answer, head, settings.ping_every_s)
    try:
        await body.first(settings.hold_headers_s)
    except BaseException:
        await body.aclose()
        raise
    return Response(200, {**sse.HEADERS, **_headers(answer)}, body)


class EventBody:
    """The chunks of one streamed answer. Closing it cancels the generation, even before a chunk was asked for."""

    def __init__(self, answer: Answer, head: AnswerHead, ping_every_s: float) -> None:
        self._answer = answer
        self._head = head
        self._ping_every_s = ping_every_s
        self._pieces = answer.delivered()
        self._coming: asyncio.Task[Piece | None] | None = None
        self._text_offset = 0
        self._role_due = True
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
        """Cancel whatever runs; idempotent."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})
            if not coming.cancelled():
                coming.exception()
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
                    yield sse.PING
                    continue
                self._coming = None
                piece = coming.result()
                if piece is None:
                    break
                yield self._role() + self._event(piece)
        except MidstreamError as err:
            # No finish reason and no [DONE] follow: a cut answer must not look complete.
            yield openai_wire.error_event(err)
            return
        yield self._role() + self._end()

    def _role(self) -> bytes:
        due, self._role_due = self._role_due, False
        if not due or self._head.endpoint != "chat":
            return b""
        return self._data(openai_wire.chunk(self._head, "", role=True, null_usage=self._asked_usage))

    @property
    def _asked_usage(self) -> bool:
        return self._answer.request.include_usage

    def _event(self, piece: Piece) -> bytes:
        logprobs = _logprobs(self._answer, (piece,), self._text_offset)
        self._text_offset += len(piece.text)
        extra = {"midstream": {"side": piece.side, "index": piece.index, "tokens": len(piece.tokens)}}
        return self._data(
            openai_wire.chunk(self._head, piece.text, logprobs=logprobs, null_usage=self._asked_usage, extra=extra)
        )

    def _end(self) -> bytes:
        answer = self._answer
        last = openai_wire.chunk(self._head, finish=answer.finish or "stop", null_usage=self._asked_usage)
        usage = self._data(openai_wire.usage_chunk(self._head, answer.usage)) if self._asked_usage else b""
        return self._data(last) + usage + sse.DONE

    def _data(self, document: dict[str, Any]) -> bytes:
        return openai_wire.data_event(document)


async def _take(pieces: AsyncIterator[Piece]) -> Piece | None:
    return await anext(pieces, None)


def _headers(answer: Answer) -> dict[str, str]:
    sides = [side for side, _ in answer.owner.sides]
    found = {
        "x-midstream-request-id": answer.context.id,
        "x-midstream-reason": answer.reason,
        "x-midstream-max-tokens": str(answer.request.sampling.max_tokens),
        **answer.ending.reservation.headers,
    }
    if sides:
        found["x-midstream-target"] = ",".join(dict.fromkeys(sides))
    return found


def _logprobs(answer: Answer, pieces: tuple[Piece, ...], text_offset: int) -> dict[str, Any] | None:
    request = answer.request
    if not request.want_logprobs:
        return None
    tokens = [owned.token for piece in pieces for owned in piece.tokens]
    return openai_wire.logprobs_object(request.endpoint, tokens, request.top_logprobs, text_offset)
