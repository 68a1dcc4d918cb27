"""Text requests as a client meant them, whatever endpoint they came by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from protocol.text import Message, Prompt, Sampling, TextRequest

Endpoint = Literal["chat", "completion", "embedding"]


@frozen
class ChatRequest:
    """One request to /v1/chat/completions or /v1/completions, validated.

    prompt: messages for chat; text or token ids for completions. stop: strings that end the answer and are not part of
    it. want_logprobs: the client asked for logprobs, with `top_logprobs` alternatives (sampling.logprobs is then at
    least 1). max_tokens_given: the client set a bound; otherwise sampling.max_tokens is the default and may be cut to
    what the context holds. response_format and tools are present only where the caller of the parser allowed them.
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
    max_tokens_given: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    user: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns of a chat request; empty for completions."""
        return tuple(item for item in self.prompt if isinstance(item, Message)) if self.endpoint == "chat" else ()

    def text_request(self) -> TextRequest:
        """What an engine gets: no stop strings, no wire options."""
        return TextRequest(model=self.model, prompt=self.prompt, sampling=self.sampling)


@frozen
class EmbeddingsRequest:
    """One request to /v1/embeddings."""

    model: str
    texts: tuple[str, ...]
    base64: bool = False


def prompt_bytes(prompt: Prompt) -> int:
    """Size of a prompt: UTF-8 bytes of its text, or four bytes a token id."""
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8"))
    return sum(4 if isinstance(item, int) else len(item.content.encode("utf-8")) for item in prompt)
