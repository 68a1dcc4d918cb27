"""Text requests as a client meant them, whatever endpoint they came by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

from attrs import field, frozen
from attrs import fields as attrs_fields

from protocol.text import Message, Prompt, Sampling, TextRequest

Endpoint = Literal["chat", "completion", "embedding"]


@frozen
class ChatRequest:
    """One request to /v1/chat/completions or /v1/completions, validated.

    prompt: messages for chat; text or token ids for completions. stop: strings that end the answer and are not part of
    it. want_logprobs: the client asked for logprobs, with `top_logprobs` alternatives (sampling.logprobs is then at
    least 1). tools, tool_choice, parallel_tool_calls, response_format: as in TextRequest; whether a target can honour
    them is seen when targets are chosen.
    """

    model: str
    prompt: Prompt
    sampling: Sampling = field(factory=Sampling)
    endpoint: Endpoint = "chat"
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    want_logprobs: bool = False
    top_logprobs: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    user: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns of a chat request; empty for completions."""
        return tuple(item for item in self.prompt if isinstance(item, Message)) if self.endpoint == "chat" else ()

    def named(self, model: str) -> ChatRequest:
        """The same request for `model`. Not by evolve(), which costs several times as much, once per routed request."""
        if model == self.model:
            return self
        return ChatRequest(model, *_after_model(self))

    def text_request(self, tenant: str = "", traceparent: str = "") -> TextRequest:
        """What an engine gets: no stop strings, no wire options. tenant: whose keys a provider is asked with."""
        return TextRequest(
            model=self.model,
            prompt=self.prompt,
            sampling=self.sampling,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.response_format,
            tenant=tenant,
            traceparent=traceparent,
        )

    @property
    def has_images(self) -> bool:
        """Whether some turn has a picture."""
        if self.endpoint == "chat":
            for item in self.prompt:  # several times per request: a plain loop costs a third of a generator
                if isinstance(item, Message) and item.parts:
                    return True
        return False

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the functions that may be called."""
        return tuple(tool["function"]["name"] for tool in self.tools)


_after_model = attrgetter(*(one.name for one in attrs_fields(ChatRequest)[1:]))


@frozen
class EmbeddingsRequest:
    """One request to /v1/embeddings."""

    model: str
    texts: tuple[str, ...]
    base64: bool = False


def tool_definition(name: str, description: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """One entry of `tools`. parameters: JSON schema of the arguments; None for a function without any."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """One entry of Message.tool_calls. arguments: JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_schema(response_format: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema that an answer in this format fits."""
    if response_format["type"] == "json_object":
        return {"type": "object"}
    schema: Mapping[str, Any] = response_format["json_schema"].get("schema") or {"type": "object"}
    return schema


def prompt_bytes(prompt: Prompt) -> int:
    """Size of a prompt: UTF-8 bytes of its text, or four bytes a token id. Pictures do not count."""
    if isinstance(prompt, str):
        return _bytes_of(prompt)
    size = 0
    for item in prompt:  # several times per request: a plain loop costs half of a generator
        size += 4 if isinstance(item, int) else _message_bytes(item)
    return size


def tools_bytes(tools: Sequence[Mapping[str, Any]]) -> int:
    """Size of tool definitions as JSON."""
    if not tools:
        return 0
    return sum(len(json.dumps(tool, ensure_ascii=False).encode("utf-8", "replace")) for tool in tools)


def _message_bytes(message: Message) -> int:
    size = _bytes_of(message.content)
    for call in message.tool_calls:
        function = call["function"]
        size += len(function["name"].encode("utf-8")) + len(function["arguments"].encode("utf-8"))
    return size


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))
