"""Frozen records that any room may emit: ids and numbers, never prompt text.

Metrics, logs and telemetry are folds over these in the compositions. Emitting never blocks and never raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

from attrs import frozen

from protocol.trace import TraceContext

Direction = Literal["up", "down"]


@frozen(kw_only=True)
class Event:
    """Root of all events; `at_s` is monotonic seconds."""

    at_s: float


@frozen(kw_only=True)
class TransferSample(Event):
    """One transfer that happened anyway. `seconds` is wire time only: the peer's `server_s` is already taken out.

    moved_bytes: of a transfer that is not complete, how many of its bytes are known to have crossed; None when the
    link cannot tell.
    """

    link: str
    direction: Direction
    size_bytes: int
    seconds: float
    server_s: float = 0.0
    idle_before_s: float = 0.0
    complete: bool = True
    moved_bytes: int | None = None


@frozen(kw_only=True)
class TensorDone(Event):
    """A tensor request ended. `arm` reads device, cut:<id>:<codec> or cloud; @<link> after it: by another link.

    Stages, in seconds; together they are total_s but for what the event loop itself takes: lost_s waiting for an arm
    that did not answer, queue_s waiting in executors here, pre_s and post_s the recipe's work before and after the
    model, head_s the model (or its head) on this side, encode_s the request's body, connect_s a free connection (DNS
    and TLS included), send_s the way up, server_queue_s and server_s the far end, receive_s the way down and the
    answer's tensors.

    hedged: the device began while the link's arm was under way. winner: `device` or `link`, of a hedged request.
    trace: this request's span; None for one of no trace.
    """

    request_id: str
    model: str
    arm: str
    status: str
    total_s: float
    lost_s: float = 0.0
    queue_s: float = 0.0
    pre_s: float = 0.0
    head_s: float = 0.0
    encode_s: float = 0.0
    connect_s: float = 0.0
    send_s: float = 0.0
    server_queue_s: float = 0.0
    server_s: float = 0.0
    receive_s: float = 0.0
    post_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    reason: str = ""
    hedged: bool = False
    winner: Literal["", "device", "link"] = ""
    trace: TraceContext | None = None

    def stages(self) -> Mapping[str, float]:
        """Seconds by stage, in the order of a request."""
        return {name: getattr(self, f"{name}_s") for name in STAGES}


STAGES = (
    "lost", "queue", "pre", "head", "encode", "connect", "send", "server_queue", "server", "receive", "post",
)  # fmt: skip
"""Of a tensor request; see TensorDone."""


def arm_kind(arm: str) -> str:
    """`device`, `cut` or `cloud` of an arm as TensorDone names it.

    >>> arm_kind("cut:017:int8"), arm_kind("cloud@webrtc")
    ('cut', 'cloud')
    """
    return arm.partition("@")[0].partition(":")[0]


@frozen(kw_only=True)
class ArmSwitched(Event):
    """The held arm of a model changed; `request_id` is the first request that uses the new arm."""

    model: str
    source: str
    target: str
    reason: str
    request_id: str = ""


@frozen(kw_only=True)
class RouteTold(Event):
    """Somebody asked where a request would go, to run it themselves; nothing was generated. target: who would begin."""

    model: str
    target: str
    level: str
    reason: str
    total_s: float
    trace: TraceContext


@frozen(kw_only=True)
class TextDone(Event):
    """A text request ended. `sides` lists (target, tokens) in order of delivery.

    losers: targets that were asked for the first token too and cancelled when another one spoke; they are billed.
    level: of routing, which said so. decided_s: from the request's arrival until engines could be asked; total_s begins
    there. usd: what paid targets took, as far as known. cached: it came out of the cache. trace: this request's span.
    """

    request_id: str
    model: str
    status: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float
    sides: tuple[tuple[str, int], ...] = ()
    losers: tuple[str, ...] = ()
    reason: str = ""
    level: str = ""
    decided_s: float = 0.0
    usd: float = 0.0
    cached: bool = False
    trace: TraceContext | None = None

    @property
    def moved(self) -> bool:
        """More than one side made the answer: it fell back, or moved by plan."""
        return len({name for name, _ in self.sides}) > 1


TBT_BOUNDS_S = (
    0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.21, 0.25, 0.3, 0.31, 0.35, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
"""Upper bounds of the buckets in which times between tokens are counted; one more bucket is for what is longer."""


@frozen
class Gaps:
    """Times between the tokens of one answer. counts: one per bound of TBT_BOUNDS_S and one for longer ones."""

    counts: tuple[int, ...]
    sum_s: float
    p99_s: float


@frozen(kw_only=True)
class TextDelivered(Event):
    """A streamed answer as its reader saw it. `mode` as in the policy; tokens_per_s: the reader's rate.

    delayed_tokens: came after they were due, t_first + i / tokens_per_s. raw: between tokens as they came; paced: as
    they left.
    """

    request_id: str
    model: str
    mode: str
    tokens_per_s: float
    tokens: int
    delayed_tokens: int
    raw: Gaps
    paced: Gaps


@frozen(kw_only=True)
class RegimeChosen(Event):
    """Which side a budget spares for a model from now on: the dear one by the money of its usual request.

    calibrated: the device's energy was fitted to readings of its power.
    """

    model: str
    server: str
    regime: Literal["device_constrained", "server_constrained"]
    device_money: float
    server_money: float
    money_per_joule: float
    calibrated: bool = False


@frozen(kw_only=True)
class HandedOver(Event):
    """A stream moved by plan: `target` made the token at `index` and those after."""

    request_id: str
    source: str
    target: str
    index: int
    local: bool
    reason: str = ""


@frozen(kw_only=True)
class SourceLost(Event):
    """The side that generated died or stalled; `target` continued at `index`. At 0 it had not said anything yet."""

    request_id: str
    source: str
    target: str
    index: int
    reason: str = ""


@frozen(kw_only=True)
class HandoffServed(Event):
    """A stream that this house generated for a peer is over. traceparent: as the peer sent it.

    status: `ok`, `stopped` when its owner went on elsewhere or left, or the code of a refusal. first: index of the
    first token that was made here; tokens: how many were.
    """

    traceparent: str
    model: str
    status: str
    prompt_tokens: int
    first: int
    tokens: int
    total_s: float


@frozen(kw_only=True)
class QueueSampled(Event):
    """State of one bounded executor after an admission decision."""

    name: str
    waiting: int
    running: int
    capacity: int
    outcome: Literal["queued", "ran_here", "refused", "done"]
    wait_s: float = 0.0
    service_s: float = 0.0


@frozen(kw_only=True)
class LinkStateChanged(Event):
    """A control channel or link came up or went down."""

    link: str
    state: str
    reason: str = ""


@frozen(kw_only=True)
class PolicyJudged(Event):
    """A policy document was accepted or refused; `code` is a reason code of protocol.acceptance."""

    version: int
    accepted: bool
    code: str


@frozen(kw_only=True)
class LimitHit(Event):
    """A request was refused by a limit of its tenant. dimension: requests, tokens, places, share, day or month."""

    tenant: str
    dimension: str


@frozen(kw_only=True)
class BudgetAlert(Event):
    """A tenant has spent this share of the budget of a `day` or a `month`; once per window and process."""

    tenant: str
    window: str
    ratio: float
    spent_usd: float
    budget_usd: float


@frozen(kw_only=True)
class Shadowed(Event):
    """A request was drawn to be asked of the other path too. skipped: nobody could be asked, or bounds said no.

    similarity_ratio: words in common of both answers, where there are two.
    """

    request_id: str
    model: str
    target: str
    outcome: Literal["alike", "different", "failed", "skipped"]
    similarity_ratio: float | None = None


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """An Emit that drops everything."""


class RecordingEmit:
    """An Emit that keeps the last `limit` events, for tests and for status pages."""

    def __init__(self, limit: int = 10_000) -> None:
        self.events: deque[Event] = deque(maxlen=limit)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
