"""Answers in OpenAI's form: chat completions and completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from gateway.answer import Answer
from gateway.stops import Piece
from protocol import openai_wire, sse
from protocol.errors import MidstreamError
from protocol.openai_wire import AnswerHead


class OpenAIWire:
    """Wire form of /v1/chat/completions and /v1/completions."""

    headers: Mapping[str, str] = sse.HEADERS
    ping = sse.PING

    def __init__(self, make_head: Callable[[], AnswerHead]) -> None:
        self._make_head = make_head
        self._text_offset = 0

    @cached_property
    def _head(self) -> AnswerHead:
        """Made for the first chunk of ours: an answer that a provider's bytes are given on of has none."""
        return self._make_head()

    def begin(self, answer: Answer) -> bytes:
        if self._head.endpoint != "chat":
            return b""
        return openai_wire.data_event(openai_wire.chunk(self._head, "", role=True, null_usage=_asked_usage(answer)))

    def piece(self, answer: Answer, piece: Piece) -> bytes:
        logprobs = _logprobs(answer, (piece,), self._text_offset)
        self._text_offset += len(piece.text)
        extra = {"midstream": {"side": piece.side, "index": piece.index, "tokens": len(piece.tokens)}}
        text = piece.text if piece.text or not piece.calls else None
        return openai_wire.data_event(
            openai_wire.chunk(
                self._head,
                text,
                calls=piece.calls,
                logprobs=logprobs,
                null_usage=_asked_usage(answer),
                extra=extra,
            )
        )

    def end(self, answer: Answer) -> bytes:
        asked = _asked_usage(answer)
        extra = {"midstream": {"broken_calls": list(answer.broken_calls)}} if answer.broken_calls else None
        last = openai_wire.chunk(self._head, finish=answer.finish or "stop", null_usage=asked, extra=extra)
        usage = openai_wire.data_event(openai_wire.usage_chunk(self._head, answer.usage)) if asked else b""
        return openai_wire.data_event(last) + usage + sse.DONE

    def error(self, err: MidstreamError) -> bytes:
        return openai_wire.error_event(err)

    def whole(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        sides = [{"side": side, "tokens": tokens} for side, tokens in answer.owner.sides]
        told: dict[str, Any] = {"sides": sides}
        if answer.broken_calls:
            told["broken_calls"] = list(answer.broken_calls)
        message = answer.message
        return openai_wire.dump(
            openai_wire.response(
                self._head,
                message.content,
                answer.finish or "stop",
                answer.usage,
                logprobs=_logprobs(answer, pieces, 0),
                tool_calls=message.tool_calls,
                extra={"midstream": told},
            )
        )


def _asked_usage(answer: Answer) -> bool:
    return answer.request.include_usage


def _logprobs(answer: Answer, pieces: Sequence[Piece], text_offset: int) -> dict[str, Any] | None:
    request = answer.request
    if not request.want_logprobs:
        return None
    tokens = [owned.token for piece in pieces for owned in piece.tokens]
    return openai_wire.logprobs_object(request.endpoint, tokens, request.top_logprobs, text_offset)
