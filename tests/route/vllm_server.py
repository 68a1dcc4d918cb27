"""A server that treats chat requests as vLLM's OpenAI front does, with a model that counts words.

Faithful in what a continued answer depends on: `continue_final_message` excludes `add_generation_prompt`, the template
trims turns, and the rendered chat is cut behind the last turn's text as transformers' `apply_chat_template` does it, so
blanks at its end are lost. After vLLM's check_generation_prompt and its documentation; there is no wheel of vLLM for
this machine to record. Other servers of the same API continue every last turn of the assistant and say it again in
whole answers (llama-server, as its own front does here), ignore the wish, or refuse fields that they do not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from attrs import define, field

from links.http_server import RunningServer, serve
from links.port import Request, Response, Route

Flavour = Literal["vllm", "prefills", "ignores", "refuses"]
CONTEXT_TOKENS = 2048
WORDS = 200
_JSON = {"content-type": "application/json"}
_TURN = "<|im_start|>{role}\n{content}<|im_end|>\n"
_SAID = re.compile(r" w(\d+)$")
_COUNTED = "five,"
_KNOWN = frozenset(
    {"model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p"}
    | {"seed", "logprobs", "top_logprobs", "tools", "tool_choice", "logit_bias", "response_format", "stop"}
)


class _Refused(Exception):
    """A request that the server does not take."""


@define
class VllmServer:
    """chats: bodies of the chat requests that came, in order. rendered: the prompts as the model saw them."""

    flavour: Flavour
    chats: list[dict[str, Any]] = field(factory=list)
    rendered: list[str] = field(factory=list)
    server: RunningServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = json.loads(request.body)
        self.chats.append(body)
        try:
            prompt = self._render(body)
        except _Refused as err:
            error = {"message": str(err), "type": "BadRequestError", "param": None, "code": 400}
            return Response(400, _JSON, json.dumps({"error": error}).encode())
        self.rendered.append(prompt)
        return self._answer(body, prompt)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        listed = {"object": "list", "data": [{"id": "counting", "object": "model", "max_model_len": CONTEXT_TOKENS}]}
        return Response(200, _JSON, json.dumps(listed).encode())

    def _render(self, body: dict[str, Any]) -> str:
        if self.flavour == "refuses" and set(body) - _KNOWN:
            raise _Refused(f"Extra inputs are not permitted: {', '.join(sorted(set(body) - _KNOWN))}")
        if body.get("tools"):
            raise _Refused('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        begins = body.get("add_generation_prompt", True) or self.flavour != "vllm"
        turns = body["messages"]
        continues = bool(body.get("continue_final_message")) and self.flavour == "vllm"
        if continues and begins:
            raise _Refused("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        continues = continues or (self.flavour == "prefills" and turns[-1]["role"] == "assistant")
        text = "".join(_TURN.format(role=turn["role"], content=str(turn["content"]).strip()) for turn in turns)
        if continues:
            last = str(turns[-1]["content"])
            return text[: text.rindex(last.strip()) + len(last.strip())]
        return text + ("<|im_start|>assistant\n" if begins else "")

    def _answer(self, body: dict[str, Any], prompt: str) -> Response:
        found = _SAID.search(prompt)
        first = int(found[1]) + 1 if found else 0
        bound = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        end = min(WORDS, first + bound)
        words = [f" w{number}" for number in range(first, end)]
        if prompt.endswith(_COUNTED):
            words = [" six,", " seven,"][: len(words)]
        finish = "stop" if end == WORDS else "length"
        usage = {"prompt_tokens": len(re.findall(r"\S+", prompt)), "completion_tokens": len(words)}
        usage["total_tokens"] = sum(usage.values())
        if not body.get("stream"):
            said = str(body["messages"][-1]["content"]) if self.flavour == "prefills" else ""
            message = {"role": "assistant", "content": said + "".join(words)}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
            whole = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage}
            return Response(200, _JSON, json.dumps(whole).encode())
        counted = usage if (body.get("stream_options") or {}).get("include_usage") else None
        return Response(200, {"content-type": "text/event-stream; charset=utf-8"}, _stream(words, finish, counted))


async def _stream(words: list[str], finish: str, usage: dict[str, int] | None) -> AsyncIterator[bytes]:
    yield _event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])
    for word in words:
        yield _event([{"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": None}])
    yield _event([{"index": 0, "delta": {"content": ""}, "finish_reason": finish, "stop_reason": None}])
    if usage is not None:
        yield _event([], usage)
    yield b"data: [DONE]\n\n"


def _event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    document = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "counting", "choices": choices}
    if usage is not None:
        document["usage"] = usage
    return b"data: " + json.dumps(document).encode() + b"\n\n"


@asynccontextmanager
async def vllm_server(flavour: Flavour) -> AsyncIterator[VllmServer]:
    """Serves until the block ends."""
    made = VllmServer(flavour)
    routes = [Route("POST", "/v1/chat/completions", made.chat), Route("GET", "/v1/models", made.models)]
    made.server = await serve(routes, host="127.0.0.1", port=0)
    try:
        yield made
    finally:
        await made.server.close()
