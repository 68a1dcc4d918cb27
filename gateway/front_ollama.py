"""Ollama's own API over HTTP: its chat and generate as JSON lines, embeddings, lists of models."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from gateway.answer import Answer
from gateway.door import JSON, Door, Handle, shaped
from gateway.wire_ollama import OllamaWire
from links.port import Request, Response, Route
from protocol import ollama_wire
from protocol.chat import EmbeddingsRequest
from protocol.ollama_parse import bare_name, parse_chat, parse_embed, parse_generate
from protocol.openai_wire import dump
from protocol.request_fields import Fields


class OllamaFront:
    """/api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/show, /api/version."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._version = _own_version()

    def routes(self) -> Sequence[Route]:
        """What a house mounts."""
        limit = self._door.way.settings.max_body_bytes

        def route(method: str, path: str, handle: Handle) -> Route:
            return Route(method, path, shaped(handle, ollama_wire.error_body), limit if method == "POST" else 0)

        return (
            route("POST", "/api/chat", self.chat),
            route("POST", "/api/generate", self.generate),
            route("POST", "/api/embed", self.embed),
            route("POST", "/api/embeddings", self.embedding),
            route("POST", "/api/show", self.show),
            route("GET", "/api/tags", self.tags),
            route("GET", "/api/version", self.version),
        )

    async def chat(self, request: Request) -> Response:
        """POST /api/chat."""
        caller, body = self._door.opened(request)
        return await self._door.answer(caller, parse_chat(body), lambda answer: self._wire(answer, chat=True), "ollama")

    async def generate(self, request: Request) -> Response:
        """POST /api/generate."""
        caller, body = self._door.opened(request)
        return await self._door.answer(caller, parse_generate(body), lambda answer: self._wire(answer, chat=False))

    def _wire(self, answer: Answer, *, chat: bool) -> OllamaWire:
        def now() -> str:
            return ollama_wire.moment(self._door.wall().unix_s)

        return OllamaWire(answer.request.model, chat=chat, now=now, clock=self._door.way.ports.clock)

    async def embed(self, request: Request) -> Response:
        """POST /api/embed."""
        wanted, vectors, tokens, headers = await self._vectors(request)
        document = {
            "model": wanted.model,
            "embeddings": [list(vector) for vector in vectors],
            "prompt_eval_count": tokens,
        }
        return Response(200, headers, dump(document))

    async def embedding(self, request: Request) -> Response:
        """POST /api/embeddings, the older form with one vector."""
        _, vectors, _, headers = await self._vectors(request)
        return Response(200, headers, dump({"embedding": list(vectors[0])}))

    async def _vectors(
        self, request: Request
    ) -> tuple[EmbeddingsRequest, Sequence[Sequence[float]], int, dict[str, str]]:
        caller, body = self._door.opened(request)
        wanted = parse_embed(body)
        run = await self._door.way.embedding(wanted, caller)
        vectors = await run.vectors()
        headers = {**JSON, **run.headers}
        return wanted, vectors, run.prompt_tokens, headers

    async def tags(self, request: Request) -> Response:
        """GET /api/tags."""
        allowed = self._door.way.caller(request).models
        models = [model for model in self._door.way.candidates.models() if allowed is None or model in allowed]
        return Response(200, JSON, dump(ollama_wire.models_list(models, self._door.begun_unix_s)))

    async def show(self, request: Request) -> Response:
        """POST /api/show."""
        _, body = self._door.opened(request)
        fields = Fields(body)
        model = bare_name(fields.text("model" if "model" in body else "name"))
        self._door.known(model)
        context_tokens, can = await self._door.way.candidates.abilities(model)
        return Response(200, JSON, dump(ollama_wire.shown_model(context_tokens, can, self._door.begun_unix_s)))

    async def version(self, request: Request) -> Response:
        """GET /api/version."""
        return Response(200, JSON, dump({"version": self._version}))


def _own_version() -> str:
    try:
        return importlib.metadata.version("midstream")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"
