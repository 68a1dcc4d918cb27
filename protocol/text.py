"""Text generation as engines see it: tokens with indices and bytes, a request, what an engine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

FinishReason = Literal["stop", "length", "tool_calls"]


@frozen
class Message:
    """One chat turn. `content` is text; `name`, `tool_calls` and `tool_call_id` as in OpenAI's chat API."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None


@frozen
class Token:
    """One generated token.

    `index` counts from 0 in the answer. `data` is the raw piece, possibly a part of a UTF-8 character, and empty on a
    pure finish mark. `margin` is the logit distance to the runner-up. `at_s` is monotonic, set where it was made.
    `alternatives` holds up to Sampling.logprobs pairs (piece, logprob) of the raw distribution, best first.
    """

    index: int
    id: int | None
    data: bytes
    logprob: float | None = None
    margin: float | None = None
    at_s: float = 0.0
    finish: FinishReason | None = None
    alternatives: tuple[tuple[bytes, float], ...] = ()


@frozen
class Sampling:
    """How to choose tokens. Stop strings are absent on purpose: the stream owner applies them, across the seam too."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    logit_bias: Mapping[int, float] = field(factory=dict)
    grammar: str | None = None
    logprobs: int = 0


Prompt = Sequence[Message] | str | tuple[int, ...]


@frozen
class TextRequest:
    """What to generate. The engine applies its chat template to messages; `prefix` is the answer so far.

    The prefix is taken by ids where vocabularies match, by bytes otherwise; generation goes on at len(prefix).
    """

    model: str
    prompt: Prompt
    sampling: Sampling = field(factory=Sampling)
    prefix: tuple[Token, ...] = ()


@frozen
class TextCapabilities:
    """What an engine was seen to do (probed, never assumed).

    `vocabulary` is a hash over tokens, merges and special ids; equal hashes mean that ids may cross.
    """

    vocabulary: str | None
    template: str | None
    context_tokens: int
    continues: Literal["ids", "text", "no"]
    grammar: bool
    logprobs: bool
    embeds: bool


@frozen
class Usage:
    """Token counts of one finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
