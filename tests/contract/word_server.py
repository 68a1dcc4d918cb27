"""An OpenAI-compatible server on loopback that speaks in numbered words, one chunk each, and continues what it said."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from links.http_server import serve
from links.port import Request, Response, Route

CONTEXT_TOKENS = 512
ANSWER_WORDS = 64
_SAID = re.compile(r" w(\d+)$")
_JSON = {"content-type": "application/json"}


@asynccontextmanager
async def word_server() -> AsyncIterator[str]:
    """Serves until the block ends; gives the base URL."""
    routes = [
        Route("POST", "/v1/completions", _completion),
        Route("POST", "/v1/chat/completions", _chat),
        Route("GET", "/v1/models", _models),
    ]
    server = await serve(routes, host="127.0.0.1", port=0, origin_check=True)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


async def _models(request: Request) -> Response:
    listed = {"data": [{"id": "words", "max_model_len": CONTEXT_TOKENS}]}
    return Response(200, _JSON, json.dumps(listed).encode())


async def _completion(request: Request) -> Response:
    body = json.loads(request.body)
    return _answer(body, body["prompt"], body["prompt"])


async def _chat(request: Request) -> Response:
    body = json.loads(request.body)
    last = body["messages"][-1]
    said = last["content"] if body.get("continue_final_message") else ""
    text = " ".join(message["content"] for message in body["messages"])
    # A turn that is continued is not closed: it costs fewer tokens.
    return _answer(body, text if said else f"{text} .", said)


def _answer(body: dict[str, Any], prompt: str, said: str) -> Response:
    prompt_tokens = len(prompt.split())
    if prompt_tokens > CONTEXT_TOKENS:
        error = {
            "message": "too long", "code": "context_length_exceeded", "type": "exceed_context_size_error",
            "n_prompt_tokens": prompt_tokens, "n_ctx": CONTEXT_TOKENS,
        }  # fmt: skip
        return Response(400, _JSON, json.dumps({"error": error}).encode())
    found = _SAID.search(said)
    first = int(found[1]) + 1 if found else 0
    end = min(ANSWER_WORDS, first + body["max_tokens"])
    finish = "stop" if end == ANSWER_WORDS else "length"
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": end - first}
    words = [f" w{number}" for number in range(first, end)]
    if not body["stream"]:
        choice = {"message": {"content": "".join(words)}, "text": "".join(words), "finish_reason": finish}
        return Response(200, _JSON, json.dumps({"choices": [choice], "usage": usage}).encode())
    return Response(200, {"content-type": "text/event-stream"}, _stream(words, finish, usage))


async def _stream(words: list[str], finish: str, usage: dict[str, int]) -> AsyncIterator[bytes]:
    for word in words:
        yield _event({"choices": [{"index": 0, "delta": {"content": word}, "text": word, "finish_reason": None}]})
    yield _event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": finish}]})
    yield _event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
