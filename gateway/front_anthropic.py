"""Anthropic's Messages API over HTTP: answers whole and streamed, and counts of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.answer import Answer
from gateway.door import JSON, Door, Handle, shaped
from gateway.wire_anthropic import AnthropicWire
from links.port import Request, Response, Route
from protocol import anthropic_wire
from protocol.anthropic_parse import parse_messages
from protocol.openai_wire import dump


class AnthropicFront:
    """/v1/messages and /v1/messages/count_tokens."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def routes(self) -> Sequence[Route]:
        """What a house mounts."""
        limit = self._door.way.settings.max_body_bytes

        def route(path: str, handle: Handle) -> Route:
            return Route("POST", path, shaped(handle, anthropic_wire.error_body), limit)

        return route("/v1/messages", self.messages), route("/v1/messages/count_tokens", self.count_tokens)

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        caller, body = self._door.opened(request)
        return await self._door.answer(caller, parse_messages(body), _wire, "anthropic")

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: a target of this machine reads the prompt, and keeps it for the request."""
        caller, body = self._door.opened(request)
        tokens = await self._door.way.count_tokens(parse_messages(body, counting=True), caller)
        return Response(200, JSON, dump({"input_tokens": tokens}))


def _wire(answer: Answer) -> AnthropicWire:
    return AnthropicWire(f"msg_{answer.context.id}")
