"""Answers in Ollama's form: JSON lines of /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.answer import Answer
from gateway.stops import Piece
from protocol import ollama_wire
from protocol.clock import Clock
from protocol.errors import MidstreamError
from protocol.openai_wire import dump


class OllamaWire:
    """Wire form of /api/chat (`chat`) and /api/generate. Tool calls go out whole, at the end, as Ollama's do.

    now: the moment as RFC 3339, read for each line. clock: monotonic seconds, for the times of the last line.
    """

    headers: Mapping[str, str] = ollama_wire.HEADERS

    def __init__(self, model: str, *, chat: bool, now: Callable[[], str], clock: Clock) -> None:
        self._model = model
        self._chat = chat
        self._now = now
        self._clock = clock
        self._begun_s = clock()

    @property
    def ping(self) -> bytes:
        """Clients parse every line, so that a sign of life is an empty piece."""
        return ollama_wire.line(self._document("", done=False))

    def begin(self, answer: Answer) -> bytes:
        return b""

    def piece(self, answer: Answer, piece: Piece) -> bytes:
        return ollama_wire.line(self._document(piece.text, done=False)) if piece.text else b""

    def end(self, answer: Answer) -> bytes:
        calls = self._calls(answer)
        told = ollama_wire.line(self._document("", done=False, calls=calls)) if calls else b""
        return told + ollama_wire.line(self._last(answer, ""))

    def error(self, err: MidstreamError) -> bytes:
        return ollama_wire.error_line(err)

    def whole(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        return dump(self._last(answer, answer.message.content, self._calls(answer)))

    def _last(self, answer: Answer, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        total_s = self._clock() - self._begun_s
        document = self._document(text, done=True, calls=calls)
        document.update(ollama_wire.ends(answer.finish or "stop", answer.usage, answer.owner.ttft_s, total_s))
        told: dict[str, Any] = {"sides": [{"side": side, "tokens": tokens} for side, tokens in answer.owner.sides]}
        if answer.broken_calls:
            told["broken_calls"] = [
                {"index": number, "arguments": answer.shown_calls[number].arguments} for number in answer.broken_calls
            ]
        return {**document, "midstream": told}

    def _calls(self, answer: Answer) -> list[dict[str, Any]]:
        return [
            ollama_wire.call_object(call.id, number, call.name, call.parsed() or {})
            for number, call in enumerate(answer.shown_calls)
        ]

    def _document(self, text: str, *, done: bool, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        document: dict[str, Any] = {"model": self._model, "created_at": self._now()}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = list(calls)
            document["message"] = message
        else:
            document["response"] = text
        document["done"] = done
        return document
