"""Text generation as engines see it: tokens with indices and bytes, a request, what an engine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

FinishReason = Literal["stop", "length", "tool_calls"]


@frozen
class TextPart:
    """A text within a turn that also has images."""

    text: str


@frozen
class ImagePart:
    """A picture within a turn: its bytes with their media type (`image/png`), or an address that the server fetches.

    `detail` is OpenAI's hint (`auto`, `low`, `high`).
    """

    media_type: str = ""
    data: bytes = field(default=b"", repr=False)
    url: str = ""
    detail: str = "auto"


Part = TextPart | ImagePart


@frozen
class Message:
    """One chat turn. `content` is text; `name`, `tool_calls` and `tool_call_id` as in OpenAI's chat API.

    tool_calls: objects `{"id", "type": "function", "function": {"name", "arguments"}}`, arguments as JSON text.
    parts: text and images in their order, only where there is an image; `content` is then the text of them alone.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    parts: tuple[Part, ...] = ()


def sayable(text: str) -> str:
    """The same text in UTF-8's reach: JSON can say half a surrogate pair. Halves that meet become their character,
    others U+FFFD."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@frozen
class CallDelta:
    """A piece of a tool call, from an engine that tells calls apart from text.

    index: which call of the answer, from 0. id, name: with the first piece of a call. arguments: the next part of
    its JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@frozen
class Token:
    """One generated token.

    `index` counts from 0 in the answer. `data` is the raw piece, possibly a part of a UTF-8 character, and empty on a
    pure finish mark. `margin` is the logit distance to the runner-up. `at_s` is monotonic, set where it was made.
    `alternatives` holds up to Sampling.logprobs pairs (piece, logprob) of the raw distribution, best first.
    `call` is a piece of a tool call in place of text; `data` is then empty.
    """

    index: int
    id: int | None
    data: bytes
    logprob: float | None = None
    margin: float | None = None
    at_s: float = 0.0
    finish: FinishReason | None = None
    alternatives: tuple[tuple[bytes, float], ...] = ()
    call: CallDelta | None = None


@frozen
class Sampling:
    """How to choose tokens. Stop strings are absent on purpose: the stream owner applies them, across the seam too.

    grammar: GBNF text; json_schema: the answer is JSON that fits this schema. One of them at the most; an engine with
    TextCapabilities.grammar honours both.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    logit_bias: Mapping[int, float] = field(factory=dict)
    grammar: str | None = None
    logprobs: int = 0
    json_schema: Mapping[str, Any] | None = None


Prompt = Sequence[Message] | str | tuple[int, ...]


@frozen
class TextRequest:
    """What to generate. The engine applies its chat template to messages; `prefix` is the answer so far.

    The prefix is taken by ids where vocabularies match, by bytes otherwise; generation goes on at len(prefix).

    tools: definitions as in OpenAI's API (`{"type": "function", "function": {...}}`). tool_choice: `auto`, `required`
    or the name of the one function to call, after a colon (`function:NAME`). response_format: `json_object` or
    `json_schema` as in OpenAI's API. An engine that knows none of these is given a prompt and a grammar instead.
    tenant: whose keys a provider is asked with; it crosses no wire. traceparent: the span on whose behalf it is asked.
    """

    model: str
    prompt: Prompt
    sampling: Sampling = field(factory=Sampling)
    prefix: tuple[Token, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    tenant: str = ""
    traceparent: str = field(default="", eq=False)


@frozen
class TextCapabilities:
    """What an engine was seen to do (probed, never assumed).

    `vocabulary` is a hash over tokens, merges and special ids; equal hashes mean that ids may cross.
    images: takes ImagePart. tools: takes TextRequest.tools and response_format itself, and tells calls by Token.call.
    """

    vocabulary: str | None
    template: str | None
    context_tokens: int
    continues: Literal["ids", "text", "no"]
    grammar: bool
    logprobs: bool
    embeds: bool
    images: bool = False
    tools: bool = False


@frozen
class Usage:
    """Token counts of one finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
