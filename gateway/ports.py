"""Ports of the text way's steps, and their open forms: what a house has that asks for no keys, limits or cache.

Each step of `gateway/pipeline.py` talks to one of these. An open form does its whole work for a house without that
feature: everybody may ask, nothing is limited, nothing is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from attrs import evolve, field, frozen

from gateway.context import LOCAL, Caller, Constraints
from gateway.shadow_measure import Difference
from gateway.targets import TargetView
from protocol.chat import ChatRequest
from protocol.errors import NotAllowed
from protocol.policy import Policy
from protocol.policy_privacy import Kind
from protocol.text import FinishReason, Message, Usage

AUTO = "auto"
"""The model name with which a client leaves the choice to the router."""


class KeyRing(Protocol):
    """Who may ask."""

    def caller(self, headers: Mapping[str, str], remote_ip: str | None, peer: str | None = None) -> Caller:
        """Header names are lower case. `peer`: a device whose certificate the house has judged; it needs no key.

        Raises Unauthenticated or NotAllowed.
        """
        ...


@frozen
class Estimate:
    """The most that a request may take: prompt as estimated, the answer's bound, money at the dearest target."""

    model: str
    prompt_tokens: int
    answer_tokens: int
    money: float = 0.0


@frozen
class Spent:
    """What a request did take, as the engines counted it. sides: (target, tokens of the answer) in order.

    held: the most money that it can have taken, where an upstream did not say; a budget keeps this much of it.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    money: float = 0.0
    sides: tuple[tuple[str, int], ...] = ()
    held: float = 0.0


class Reservation(Protocol):
    """A place under all limits, held until `settle` or `release`; both are idempotent, the first one counts."""

    @property
    def degrade(self) -> bool:
        """The cost cap is reached and policy wants the device to answer instead of nobody."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """x-ratelimit-* for the answer."""
        ...

    async def extend(self, money: float) -> bool:
        """Hold this much more, for another attempt; False when the budget has no room for it."""
        ...

    async def settle(self, spent: Spent) -> None:
        """The request ended: charge what it took."""
        ...

    async def release(self) -> None:
        """The request never began: charge nothing."""
        ...


class Limits(Protocol):
    """Admission over requests, tokens, concurrency and money."""

    async def reserve(self, caller: Caller, estimate: Estimate) -> Reservation:
        """Raises RateLimited or BudgetExceeded."""
        ...

    def left_ratios(self, caller: Caller) -> Mapping[str, float]:
        """Share of the caller's budgets that is left, by `day` and `month`, as far as known."""
        ...


@frozen
class Signals:
    """What a house knows beside its targets; None: unknown.

    day_left_ratio, month_left_ratio: share of the caller's budget that is left (0 to 1).
    battery_ratio: charge of a device that runs on battery; None on mains. hot: it is throttled.
    """

    day_left_ratio: float | None = None
    month_left_ratio: float | None = None
    battery_ratio: float | None = None
    hot: bool = False


@frozen
class Span:
    """Something private in a request. path: where (`messages[2]`); start, end: characters; kind: `email`, `name`."""

    path: str
    start: int
    end: int
    kind: Kind


@frozen
class Findings:
    """local_only: the request may not leave this machine. spans: what a remote target must not see.

    scope: whose values these are; placeholders of different scopes cannot be joined.
    """

    local_only: bool = False
    reason: str = ""
    spans: tuple[Span, ...] = ()
    scope: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind, for records: never what they were."""
        return dict(Counter(span.kind for span in self.spans))


class Restorer(Protocol):
    """Puts back what was redacted, in a text that comes in pieces."""

    def feed(self, text: str, in_json: bool = False) -> str:
        """What may be shown so far; the end of `text` is held back while a placeholder may have begun.

        in_json: `text` is JSON (arguments of a tool call); what is put back is escaped as a part of a JSON string.
        """
        ...

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        ...


@frozen
class Redaction:
    """The request as targets see it. restorer: None when nothing was replaced."""

    chat: ChatRequest
    restorer: Restorer | None = None


class Privacy(Protocol):
    """What may leave, and in which form."""

    def inspect(self, chat: ChatRequest, caller: Caller, policy: Policy) -> Findings: ...

    def redact(self, chat: ChatRequest, findings: Findings) -> Redaction: ...


Level = Literal["rules", "heuristic", "dynamic", "named", "plugin"]


class Routed(NamedTuple):
    """Where a request may go, as which model, and which level of routing said so. A tuple, as one is made per request.

    start: the side that answers first where both may; None: as policy.dispatch has it. other_model: what the other side
    would answer with, for a fallback. hard: the device's answer alone is not enough while the cloud can be asked.
    """

    constraints: Constraints
    model: str
    reason: str
    level: Level = "named"
    start: Literal["device", "cloud"] | None = None
    other_model: str | None = None
    intent: str | None = None
    complexity: float | None = None
    hard: bool = False


class Offer(Protocol):
    """What there is to choose from, looked up only when asked."""

    def models(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the targets by model, local targets first."""
        ...

    def views(self, model: str) -> Sequence[TargetView]:
        """What may be known of the targets that have `model`."""
        ...

    def signals(self, caller: Caller) -> Signals:
        """Budgets and the state of this machine."""
        ...


class Router(Protocol):
    """Which model and which targets; pure, `draw` is a random number in [0, 1)."""

    def route(
        self, chat: ChatRequest, caller: Caller, findings: Findings, offer: Offer, policy: Policy, draw: float
    ) -> Routed:
        """Raises NotFound or NotAllowed. `findings.local_only` and `caller.models` must be kept."""
        ...

    async def consulted(self, chat: ChatRequest, caller: Caller, policy: Policy) -> Caller:
        """Before `route`, for what takes longer: the caller, with the intent where it had to be asked for elsewhere."""
        ...

    def close(self) -> None:
        """End what runs beside requests."""
        ...


@frozen
class CacheKey:
    """The final request, with its model, of one tenant. personal: the answer is not to be kept."""

    tenant: str
    chat: ChatRequest
    personal: bool = False


@frozen
class CachedAnswer:
    """A whole answer. pieces: its text in the shape it was streamed in. calls: as in Message.tool_calls. usage: what
    making it took."""

    pieces: tuple[str, ...]
    finish: FinishReason
    usage: Usage
    source: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()


class AnswerCache(Protocol):
    """Answers that were given before."""

    async def find(self, key: CacheKey) -> CachedAnswer | None: ...

    async def store(self, key: CacheKey, answer: CachedAnswer) -> None: ...


@frozen
class Compressed:
    """A conversation made shorter for its next target."""

    chat: ChatRequest
    saved_tokens: int = 0


class Conversations(Protocol):
    """Histories by conversation id."""

    async def opened(self, caller: Caller, chat: ChatRequest) -> ChatRequest:
        """The request with the history of `caller.conversation_id` before its messages. Raises BadRequest, TooLarge, or
        Full where the history cannot be read."""
        ...

    async def stays(self, caller: Caller, chat: ChatRequest) -> str:
        """Why this conversation may not leave this machine, whatever the request itself says; empty: it may."""
        ...

    async def compressed(self, caller: Caller, chat: ChatRequest, target: str, context_tokens: int) -> Compressed:
        """The request for `target`, which is asked first and whose context holds `context_tokens` (0: unknown)."""
        ...

    async def closed(
        self,
        caller: Caller,
        chat: ChatRequest,
        answer: Message,
        finish: FinishReason | None,
        target: str,
        stays: str = "",
    ) -> None:
        """The request, as the client sent it, got this answer, tool calls included; `finish` None when it was cut.

        target: who made the answer's end; empty when nobody did. stays: why it had to stay on this machine; from then
        on all of its conversation does. Never raises for a disk: a turn that cannot be kept is not there the next time.
        """
        ...


@frozen
class Invocation:
    """The record of one request, without a word of it."""

    request_id: str
    caller: Caller
    model: str
    endpoint: str
    status: str
    level: Level
    reason: str
    findings: Findings
    redacted: bool
    cached: bool
    saved_tokens: int
    spent: Spent
    ttft_s: float | None
    total_s: float


class Audit(Protocol):
    """Keeps records of requests; never blocks, never raises."""

    def invocation(self, record: Invocation) -> None: ...

    def shadow(self, difference: Difference) -> None:
        """How far the other path's answer lay from the one that was delivered."""
        ...


class OpenKeys:
    """Everybody is the local client: for a front door on loopback, or behind a guard of its own."""

    def caller(self, headers: Mapping[str, str], remote_ip: str | None, peer: str | None = None) -> Caller:
        return LOCAL


@frozen
class FreeReservation:
    """Holds nothing."""

    degrade: bool = False
    headers: Mapping[str, str] = field(factory=dict)

    async def extend(self, money: float) -> bool:
        """There is no budget."""
        return True

    async def settle(self, spent: Spent) -> None:
        """Nothing is charged."""

    async def release(self) -> None:
        """Nothing is held."""


_FREE = FreeReservation()


class NoLimits:
    """Admits everything."""

    async def reserve(self, caller: Caller, estimate: Estimate) -> Reservation:
        return _FREE

    def left_ratios(self, caller: Caller) -> Mapping[str, float]:
        return {}


def narrowed(constraints: Constraints, findings: Findings) -> Constraints:
    """What is left of an allowed set by what was found in a request."""
    if findings.local_only and not constraints.local_only:
        return evolve(constraints, local_only=True, reason=findings.reason)
    return constraints


def check_model(caller: Caller, model: str) -> None:
    """Raises NotAllowed for a model that the caller's key may not name."""
    if caller.models is not None and model not in caller.models:
        raise NotAllowed(
            f"this key may not use model {model[:256]!r}", next_step="ask for a key that may", field="model"
        )


class NoCache:
    """Keeps nothing."""

    async def find(self, key: CacheKey) -> CachedAnswer | None:
        return None

    async def store(self, key: CacheKey, answer: CachedAnswer) -> None:
        """Nothing is kept."""


class NoConversations:
    """Every request carries its own history; nothing is shortened."""

    async def opened(self, caller: Caller, chat: ChatRequest) -> ChatRequest:
        return chat

    async def stays(self, caller: Caller, chat: ChatRequest) -> str:
        return ""

    async def compressed(self, caller: Caller, chat: ChatRequest, target: str, context_tokens: int) -> Compressed:
        return Compressed(chat)

    async def closed(
        self,
        caller: Caller,
        chat: ChatRequest,
        answer: Message,
        finish: FinishReason | None,
        target: str,
        stays: str = "",
    ) -> None:
        """Nothing is kept."""


class NoAudit:
    """Keeps no records; the events still go out."""

    def invocation(self, record: Invocation) -> None:
        """Nothing is kept."""

    def shadow(self, difference: Difference) -> None:
        """Nothing is kept."""
