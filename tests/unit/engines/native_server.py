"""A scripted llama-server in memory: what it does wrong is the test's choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from links.memory import MemoryLink
from links.port import Request, Response, Route

SSE = {"content-type": "text/event-stream"}
CONTEXT_TOKENS = 32


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def report(total: int, cached: int = 0) -> bytes:
    """The prompt was counted, its prefill begins."""
    return event({"content": "", "prompt_progress": {"total": total, "cache": cached, "processed": cached}})


def made(number: int, text: str, place: int) -> bytes:
    """Token `number` shown as `text`, the `place`-th of its request."""
    return event({"content": text, "tokens": [number], "tokens_predicted": place, "tokens_evaluated": 7, "stop": False})


def ended(place: int, by: str = "limit") -> bytes:
    return event({"content": "", "tokens": [], "tokens_predicted": place, "stop": True, "stop_type": by})


class NativeUpstream:
    """Answers each streamed completion with the next of `scripts` (the last one for ever), others with `whole`.

    Items of a script: bytes to send, seconds to wait, an Exception to raise.
    """

    def __init__(self, *scripts: list[Any], whole: dict[str, Any] | None = None) -> None:
        self.scripts = list(scripts)
        self.whole = whole or {"content": "a", "tokens": [1], "completion_probabilities": [1]}
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.closed = 0
        self.refusal: tuple[int, dict[str, Any]] | None = None
        routes = [Route("GET", "/props", self._props)]
        routes += [Route("POST", path, self._small) for path in ("/tokenize", "/detokenize", "/apply-template")]
        routes += [Route("POST", "/completion", self._complete), Route("POST", "/v1/embeddings", self._embed)]
        self.link = MemoryLink("llama-server", routes)

    async def _props(self, request: Request) -> Response:
        document = {"default_generation_settings": {"n_ctx": CONTEXT_TOKENS}, "total_slots": 2, "chat_template": "t"}
        return Response(200, {}, json.dumps(document).encode())

    async def _embed(self, request: Request) -> Response:
        return Response(501, {}, b'{"error": {"code": 501, "type": "not_supported_error", "message": "no"}}')

    async def _small(self, request: Request) -> Response:
        self.asked.append(request.path)
        return Response(200, {}, b'{"tokens": [5, 6], "content": "x", "prompt": "templated"}')

    async def _complete(self, request: Request) -> Response:
        body = json.loads(request.body)
        if not body["stream"]:
            return Response(200, {}, json.dumps(self.whole).encode())
        self.bodies.append(body)
        if self.refusal is not None:
            return Response(self.refusal[0], {}, json.dumps({"error": self.refusal[1]}).encode())
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return Response(200, SSE, self._stream(script))

    async def _stream(self, script: list[Any]) -> AsyncIterator[bytes]:
        try:
            for item in script:
                if isinstance(item, bytes):
                    yield item
                elif isinstance(item, Exception):
                    raise item
                else:
                    await asyncio.sleep(item)
        finally:
            self.closed += 1
