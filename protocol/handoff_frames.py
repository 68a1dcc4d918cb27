"""The frames of a handoff as records; their bytes are in protocol.handoff. The client owns the stream."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import frozen

from protocol.text import TextCapabilities, TextRequest, Token, Usage


@frozen
class Prepare:
    """Client: admit this request and prefill prompt and prefix.

    vocabulary: the client's, so that the host knows whether ids suffice. hop: 0 from the owner of the stream; a host
    refuses to pass on a request that already has one. early: the owner takes the first token with Ready, before Start.
    """

    request: TextRequest
    deadline_s: float = 30.0
    vocabulary: str | None = None
    hop: int = 0
    traceparent: str = ""
    early: bool = False


@frozen
class Extend:
    """Client: tokens that another engine made meanwhile; prefill them too."""

    first: int
    tokens: tuple[Token, ...]


@frozen
class Ready:
    """Host: prompt and tokens below `prefilled_to` are prefilled. queue_s and prefill_s are what that took."""

    prefilled_to: int
    vocabulary: str | None
    queue_s: float
    prefill_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0


@frozen
class Start:
    """Client: generate from index `at`; pause `ahead_tokens` past the last ack."""

    at: int
    ahead_tokens: int


@frozen
class Tokens:
    """Host: a run of tokens. echo_ms: `sent_ms` of the last ack seen, 0 for none."""

    first: int
    tokens: tuple[Token, ...]
    echo_ms: int = 0


@frozen
class Ack:
    """Client: everything up to and including `index` was taken (-1: nothing yet). Credit, RTT sample, resume point."""

    index: int
    sent_ms: int


@frozen
class Stop:
    """Client: no token at or after `at` is wanted; the host ends the generation and frees it."""

    at: int


@frozen
class Resume:
    """Client, on a new connection with a new epoch: send again from index `next`."""

    next: int


@frozen
class Finish:
    """Host: the generation ended; `index` is the number of tokens of the answer, prefix included."""

    index: int
    reason: str
    usage: Usage


@frozen
class Refuse:
    """Host: not done. `code` is that of an error class; `counts` carries numbers such as prompt_tokens."""

    code: str
    message: str = ""
    retry_after_s: float | None = None
    field: str | None = None
    counts: Mapping[str, int] = attrs.field(factory=dict)


@frozen
class Query:
    """Client: what can this model do, and how loaded is it?"""

    model: str


@frozen
class Capabilities:
    """Host: the answer to Query, and unasked when the load changed much."""

    capabilities: TextCapabilities
    running: int = 0
    waiting: int = 0
    wait_s: float = 0.0


@frozen
class Tokenize:
    """Client: token ids of `data`, no special tokens added."""

    model: str
    data: bytes


@frozen
class TokenIds:
    """Host: the answer to Tokenize."""

    ids: tuple[int, ...]


@frozen
class Embed:
    """Client: one vector per text."""

    model: str
    texts: tuple[str, ...]


@frozen
class Vectors:
    """Host: the answer to Embed, 32-bit floats."""

    vectors: tuple[tuple[float, ...], ...]


Frame = (
    Prepare | Extend | Ready | Start | Tokens | Ack | Stop | Resume | Finish | Refuse
    | Query | Capabilities | Tokenize | TokenIds | Embed | Vectors
)  # fmt: skip
