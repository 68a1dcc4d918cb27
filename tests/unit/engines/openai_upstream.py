"""A scripted OpenAI-compatible server in memory: what it does wrong is the test's choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from links.memory import MemoryLink
from links.port import Request, Response, Route

SSE = {"content-type": "text/event-stream"}


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"


class Upstream:
    """Answers with `script`; an item may be bytes to send, a number of seconds to wait, or an Exception to raise.

    continues: how it treats a last assistant message with continue_final_message: goes on, ignores, or refuses.
    """

    def __init__(self, script: list[Any], continues: str = "goes on", status: int = 200, error: bytes = b"") -> None:
        self.script = script
        self.continues = continues
        self.status = status
        self.error = error
        self.embeds = True
        self.bodies: list[dict[str, Any]] = []
        self.closed = 0
        self.link = MemoryLink(
            "upstream",
            [
                Route("POST", "/v1/chat/completions", self._chat),
                Route("POST", "/v1/completions", self._chat),
                Route("POST", "/v1/embeddings", self._embed),
                Route("GET", "/v1/models", self._models),
            ],
        )

    async def _chat(self, request: Request) -> Response:
        body = json.loads(request.body)
        self.bodies.append(body)
        if self.status != 200:
            return Response(self.status, {"retry-after": "3"}, self.error)
        if not body["stream"]:
            return self._whole(body)
        return Response(200, SSE, self._stream())

    def _whole(self, body: dict[str, Any]) -> Response:
        asked = body.get("continue_final_message", False)
        if asked and self.continues == "refuses":
            return Response(400, {}, b'{"error": {"message": "unknown field", "type": "invalid_request_error"}}')
        going_on = asked and self.continues == "goes on"
        message = {"content": " six, seven" if going_on else "What next?"}
        usage = {"prompt_tokens": 20 if going_on else 24, "completion_tokens": 2}
        answer = {"choices": [{"message": message, "finish_reason": "length"}], "usage": usage}
        return Response(200, {}, json.dumps(answer).encode())

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            for item in self.script:
                if isinstance(item, bytes):
                    yield item
                elif isinstance(item, Exception):
                    raise item
                else:
                    await asyncio.sleep(item)
        finally:
            self.closed += 1

    async def _embed(self, request: Request) -> Response:
        if not self.embeds:
            return Response(404, {}, b'{"error": {"message": "this model makes no embeddings"}}')
        texts = json.loads(request.body)["input"]
        return Response(
            200, {}, json.dumps({"data": [{"embedding": [float(len(text)), 1.0]} for text in texts]}).encode()
        )

    async def _models(self, request: Request) -> Response:
        return Response(200, {}, b'{"data": [{"id": "big", "max_model_len": 4096}]}')
