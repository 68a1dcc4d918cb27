"""Engines that an app may use by name: anything that streams text for messages; here the one over OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from links.port import Link, RejectedStatus
from protocol.errors import EngineError, MidstreamError, ProtocolError
from protocol.sse import SseParser

DEADLINE_S = 600.0
MAX_EVENT_BYTES = 1 << 20


@frozen
class Completion:
    """One piece of an answer. side: which side made it, as the server tells. finish: with the last piece only."""

    text: str
    side: str = ""
    finish: str | None = None
    usage: Mapping[str, int] = field(factory=dict)


class Engine(Protocol):
    """What a ModelHandle asks. An engine of the app's own (a runtime within the app) has the same two methods."""

    def stream(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> AsyncIterator[Completion]:
        """The answer in pieces. Raises MidstreamError; closing the iterator cancels the generation."""
        ...

    async def close(self) -> None: ...


class HttpEngine:
    """A server with OpenAI's API: the agent on this device, a gateway, or anybody's.

    key: sent as a bearer token; never logged.
    """

    def __init__(self, link: Link, key: str | None = None) -> None:
        self._link = link
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    async def stream(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> AsyncIterator[Completion]:
        """See Engine. Raises EngineError for an answer that was cut: half an answer is never a whole one."""
        body = {
            "model": model, "messages": list(messages), **options,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        parser, ended = SseParser(MAX_EVENT_BYTES), False
        try:
            lines = self._link.lines("/v1/chat/completions", self._headers, json.dumps(body).encode(), DEADLINE_S)
            async for chunk in lines:
                for event in parser.feed(chunk):
                    if event.data == "[DONE]":
                        ended = True
                        continue
                    piece = _piece(event.data)
                    if piece is not None:
                        yield piece
        except RejectedStatus as err:
            raise _refusal(err) from err
        if not ended:
            raise EngineError("the answer was cut before its end", next_step="ask again")

    async def close(self) -> None:
        """Close the link."""
        await self._link.close()


def _piece(data: str) -> Completion | None:
    try:
        document = json.loads(data)
        if "error" in document:
            raise EngineError(str(document["error"]["message"]))
        choices = document["choices"]
        usage = document.get("usage") or {}
        if not choices:
            return Completion("", usage=usage) if usage else None
        choice = choices[0]
        text = choice["delta"].get("content") or ""
        finish = choice.get("finish_reason")
    except (ValueError, KeyError, TypeError, IndexError) as err:
        raise ProtocolError(f"an event of the answer is not as OpenAI's API has it: {data[:120]!r}") from err
    side = str((document.get("midstream") or {}).get("side", ""))
    return Completion(text, side, finish, usage) if text or finish else None


def _refusal(err: RejectedStatus) -> MidstreamError:
    try:
        message = str(json.loads(err.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {err.status}"
    return EngineError(message)
