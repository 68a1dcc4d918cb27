"""OpenAI's API over HTTP: bodies in, answers and errors out in OpenAI's own shapes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from gateway.answer import Answer
from gateway.door import JSON, Door, Handle, shaped
from gateway.wire_openai import OpenAIWire
from links.port import Request, Response, Route
from protocol import anthropic_wire, openai_wire
from protocol.openai_parse import parse_chat, parse_completion, parse_embeddings

ANTHROPIC = "anthropic-version"
"""The header by which Anthropic's clients are known at the paths that both APIs have."""


class OpenAIFront:
    """/v1/models, /v1/chat/completions, /v1/completions, /v1/embeddings."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def routes(self) -> Sequence[Route]:
        """What a house mounts."""
        limit = self._door.way.settings.max_body_bytes

        def route(method: str, path: str, handle: Handle) -> Route:
            return Route(method, path, shaped(handle, openai_wire.error_body), limit if method == "POST" else 0)

        return (
            route("GET", "/v1/models", self.models),
            route("GET", "/v1/models/{id}", self.model),
            route("POST", "/v1/chat/completions", self.chat),
            route("POST", "/v1/completions", self.completion),
            route("POST", "/v1/embeddings", self.embeddings),
        )

    async def models(self, request: Request) -> Response:
        """Every model that some allowed target has and the key may name; `owned_by` names those targets."""
        allowed = self._door.way.caller(request).models
        known = self._door.way.candidates.models()
        found = {m: targets for m, targets in known.items() if allowed is None or m in allowed}
        if ANTHROPIC in request.headers:
            return Response(200, JSON, openai_wire.dump(anthropic_wire.models_list(list(found), self._begun())))
        listed = openai_wire.models_list(
            (model, "+".join(targets), self._door.begun_unix_s) for model, targets in found.items()
        )
        return Response(200, JSON, openai_wire.dump(listed))

    async def model(self, request: Request) -> Response:
        """One model by name."""
        self._door.way.caller(request)
        name = request.params.get("id", "")
        targets = self._door.known(name)
        if ANTHROPIC in request.headers:
            return Response(200, JSON, openai_wire.dump(anthropic_wire.model_object(name, self._begun())))
        listed = openai_wire.models_list([(name, "+".join(targets), self._door.begun_unix_s)])
        return Response(200, JSON, openai_wire.dump(listed["data"][0]))

    def _begun(self) -> str:
        return datetime.fromtimestamp(self._door.begun_unix_s, UTC).isoformat().replace("+00:00", "Z")

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        caller, body = self._door.opened(request)
        return await self._door.answer(caller, parse_chat(body), self._wire, "openai")

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        caller, body = self._door.opened(request)
        return await self._door.answer(caller, parse_completion(body), self._wire, "openai")

    def _wire(self, answer: Answer) -> OpenAIWire:
        def head() -> openai_wire.AnswerHead:
            prefix = "chatcmpl" if answer.request.endpoint == "chat" else "cmpl"
            created_s = int(self._door.wall().unix_s)
            return openai_wire.head_for(answer.request, f"{prefix}-{answer.context.id}", created_s)

        return OpenAIWire(head)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings, by the first allowed target whose engine was seen to embed."""
        caller, body = self._door.opened(request)
        wanted = parse_embeddings(body)
        run = await self._door.way.embedding(wanted, caller)
        vectors = await run.vectors()
        document = openai_wire.embeddings_response(run.context.model, vectors, run.prompt_tokens, wanted.base64)
        headers = {**JSON, **run.headers}
        return Response(200, headers, openai_wire.dump(document))
