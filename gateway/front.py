"""OpenAI's API over HTTP: routes, bodies in, answers and errors out in OpenAI's own shapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from gateway import delivery
from gateway.context import Caller
from gateway.pipeline import TextWay
from links.port import Request, Response, Route
from protocol import openai_wire
from protocol.chat import ChatRequest
from protocol.clock import WallClock
from protocol.errors import MidstreamError, NotFound

Handle = Callable[[Request], Awaitable[Response]]
JSON = {"content-type": "application/json"}


class Front:
    """The routes of the text way."""

    def __init__(self, way: TextWay, wall: WallClock) -> None:
        self._way = way
        self._wall = wall
        self._begun_unix_s = int(wall().unix_s)

    def routes(self) -> Sequence[Route]:
        """What a house mounts."""
        limit = self._way.settings.max_body_bytes
        return (
            Route("GET", "/v1/models", _shaped(self.models), max_body_bytes=0),
            Route("GET", "/v1/models/{id}", _shaped(self.model), max_body_bytes=0),
            Route("POST", "/v1/chat/completions", _shaped(self.chat), max_body_bytes=limit),
            Route("POST", "/v1/completions", _shaped(self.completion), max_body_bytes=limit),
            Route("POST", "/v1/embeddings", _shaped(self.embeddings), max_body_bytes=limit),
        )

    async def models(self, request: Request) -> Response:
        """Every model that some allowed target has; `owned_by` names those targets."""
        listed = openai_wire.models_list(
            (model, "+".join(targets), self._begun_unix_s) for model, targets in self._way.models().items()
        )
        return Response(200, JSON, openai_wire.dump(listed))

    async def model(self, request: Request) -> Response:
        """One model by name."""
        name = request.params.get("id", "")
        targets = self._way.models().get(name)
        if targets is None:
            self._way.check_loading(name)
            known = ", ".join(self._way.models()) or "none"
            raise NotFound(f"there is no model {name[:256]!r} here", next_step=f"available: {known}", field="model")
        listed = openai_wire.models_list([(name, "+".join(targets), self._begun_unix_s)])
        return Response(200, JSON, openai_wire.dump(listed["data"][0]))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(openai_wire.parse_chat(request.body), self._way.caller(request))

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(openai_wire.parse_completion(request.body), self._way.caller(request))

    async def _answer(self, chat: ChatRequest, caller: Caller) -> Response:
        answer = await self._way.answer(chat, caller)
        prefix = "chatcmpl" if chat.endpoint == "chat" else "cmpl"
        head = openai_wire.head_for(chat, f"{prefix}-{answer.context.id}", int(self._wall().unix_s))
        if chat.stream:
            return await delivery.streamed(answer, head, self._way.settings)
        return await delivery.whole(answer, head)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings, by the first allowed target whose engine was seen to embed."""
        wanted = openai_wire.parse_embeddings(request.body)
        run = await self._way.embedding(wanted, self._way.caller(request))
        vectors = await run.vectors()
        document = openai_wire.embeddings_response(wanted.model, vectors, run.prompt_tokens, wanted.base64)
        headers = {**JSON, "x-midstream-target": run.target, "x-midstream-request-id": run.context.id}
        return Response(200, headers, openai_wire.dump(document))


def _shaped(handle: Handle) -> Handle:
    """Errors of this way speak OpenAI's form in either house."""

    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except MidstreamError as err:
            return Response(*openai_wire.error_body(err))

    return handled
