"""What all front doors share: who asks, the way behind them, and errors in the form of their API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway import delivery, relay
from gateway.answer import Answer
from gateway.context import Caller
from gateway.naming import named
from gateway.pipeline import TextWay
from gateway.wire import Wire
from links.port import Request, Response
from protocol.chat import ChatRequest
from protocol.clock import WallClock
from protocol.errors import MidstreamError, NotFound
from protocol.request_fields import load_object
from protocol.upstream import Dialect

Handle = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[MidstreamError], tuple[int, dict[str, str], bytes]]
JSON = {"content-type": "application/json"}


class Door:
    """The way behind a front door."""

    def __init__(self, way: TextWay, wall: WallClock) -> None:
        self.way = way
        self.wall = wall
        self.begun_unix_s = int(wall().unix_s)

    def opened(self, request: Request) -> tuple[Caller, Mapping[str, Any]]:
        """Who asks, with what the request says of itself, and its body. Nothing is parsed for strangers."""
        caller = self.way.caller(request)
        body = load_object(request.body)
        return named(caller, request.headers, body), body

    async def answer(
        self, caller: Caller, chat: ChatRequest, wire: Callable[[Answer], Wire], dialect: Dialect | None = None
    ) -> Response:
        """The way's answer to `chat`, streamed if the client asked for it. dialect: in which bytes may be given on."""
        answer = await self.way.answer(chat, caller)
        if answer.relay is not None and answer.relay.dialect == dialect:
            if chat.stream:
                return await relay.streamed(answer, answer.relay, wire(answer), self.way.settings)
            return await relay.whole(answer, answer.relay)
        if chat.stream:
            return await delivery.streamed(answer, wire(answer), self.way.settings)
        return await delivery.whole(answer, wire(answer))

    def known(self, model: str) -> tuple[str, ...]:
        """Targets that have `model`. Raises NotFound or Loading."""
        targets = self.way.candidates.models().get(model)
        if targets is None:
            self.way.candidates.check_loading(model)
            known = ", ".join(self.way.candidates.models()) or "none"
            raise NotFound(f"there is no model {model[:256]!r} here", next_step=f"available: {known}", field="model")
        return targets


def shaped(handle: Handle, error_body: ErrorBody) -> Handle:
    """Errors of this way speak their API's form in either house."""

    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except MidstreamError as err:
            return Response(*error_body(err))

    return handled
