"""Answers in Anthropic's form: a message of blocks, or its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.answer import Answer
from gateway.stops import Piece
from protocol import anthropic_wire, sse
from protocol.errors import MidstreamError
from protocol.openai_wire import dump
from protocol.text import CallDelta, Usage


class AnthropicWire:
    """Wire form of /v1/messages. One text block or call is open at a time; each is numbered."""

    headers: Mapping[str, str] = sse.HEADERS
    ping = sse.PING

    def __init__(self, id: str) -> None:
        self._id = id
        self._blocks = 0
        self._in_text = False
        self._in_call = False

    def begin(self, answer: Answer) -> bytes:
        usage = answer.usage
        first = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        begun = anthropic_wire.message(self._id, answer.request.model, (), first)
        return anthropic_wire.event({"type": "message_start", "message": begun})

    def piece(self, answer: Answer, piece: Piece) -> bytes:
        out = self._text(piece.text) if piece.text else b""
        return out + b"".join(self._call(delta) for delta in piece.calls)

    def _text(self, text: str) -> bytes:
        out = b""
        if not self._in_text:
            out = self._close() + anthropic_wire.start(self._blocks, anthropic_wire.text_block(""))
            self._in_text = True
        return out + anthropic_wire.text_delta(self._blocks, text)

    def _call(self, delta: CallDelta) -> bytes:
        out = b""
        if delta.id:
            block = anthropic_wire.call_block(delta.id, delta.name, {})
            out = self._close() + anthropic_wire.start(self._blocks, block)
            self._in_call = True
        return out + (anthropic_wire.arguments_delta(self._blocks, delta.arguments) if delta.arguments else b"")

    def _close(self) -> bytes:
        if not (self._in_text or self._in_call):
            return b""
        self._in_text = self._in_call = False
        self._blocks += 1
        return anthropic_wire.stop(self._blocks - 1)

    def end(self, answer: Answer) -> bytes:
        reason, sequence = anthropic_wire.stop_reason(answer.finish or "stop", answer.stopped_by)
        told: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": anthropic_wire.usage_object(answer.usage),
        }
        told.update(_told(answer, sides=False))
        return self._close() + anthropic_wire.event(told) + anthropic_wire.event({"type": "message_stop"})

    def error(self, err: MidstreamError) -> bytes:
        return anthropic_wire.event(anthropic_wire.error_object(err))

    def whole(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        text = answer.message.content
        calls = answer.shown_calls
        content = [anthropic_wire.text_block(text)] if text or not calls else []
        content += [anthropic_wire.call_block(call.id, call.name, call.parsed() or {}) for call in calls]
        document = anthropic_wire.message(self._id, answer.request.model, content, answer.usage)
        reason, sequence = anthropic_wire.stop_reason(answer.finish or "stop", answer.stopped_by)
        return dump({**document, "stop_reason": reason, "stop_sequence": sequence, **_told(answer, sides=True)})


def _told(answer: Answer, *, sides: bool) -> dict[str, Any]:
    """Fields of ours: who made the answer, and calls whose input was no JSON object, as it came."""
    told: dict[str, Any] = {}
    if sides:
        told["sides"] = [{"side": side, "tokens": tokens} for side, tokens in answer.owner.sides]
    if answer.broken_calls:
        told["broken_calls"] = [
            {"index": number, "input": answer.shown_calls[number].arguments} for number in answer.broken_calls
        ]
    return {"midstream": told} if told else {}
