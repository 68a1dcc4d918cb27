"""Policy: what the fleet's owner asks of a device, as frozen sections, each complete by default.

The document travels signed (protocol.signature) and is judged by protocol.acceptance. Local config bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from protocol.policy_privacy import PrivacyPolicy as PrivacyPolicy
from protocol.policy_routing import RoutingPolicy as RoutingPolicy

SCHEMA = "midstream.policy/1.0"

Start = Literal["device", "cloud", "race"]
"""Which side answers first."""


def _latency_only() -> dict[str, float]:
    return {"seconds": 1.0}


@frozen
class SplitPolicy:
    """How tensor requests choose between device, cut and cloud.

    objective: weights of the sum that is minimised; keys `seconds`, `joules`, `server_seconds`.
    ratio: a new arm must be better than the held one by this factor (0.03 = 3 %) ...
    periods: ... for this many sampling periods in a row, before the switch.
    period_s: length of a sampling period; a period also lasts until a request has finished.
    codecs: forms in which an activation may cross; compressing one changes no bit and needs no leave of its own.
    explore_one_in: when the held arm silences the link, one request in N goes through it (0: never).
    hedge_ratio: share of device seconds that hedges may start.
    """

    objective: Mapping[str, float] = field(factory=_latency_only)
    deadline_s: float | None = None
    raw_input_leaves: bool = True
    ratio: float = 0.03
    periods: int = 3
    period_s: float = 0.5
    codecs: tuple[str, ...] = ("raw", "fp16", "int8")
    max_error_ratio: float = 0.02
    explore_one_in: int = 20
    hedge_ratio: float = 0.25


@frozen
class TokenPrice:
    """What a target asks, in money per million tokens; any one currency for the whole policy.

    per_million_cached_tokens: prompt tokens that the target had in its cache; None: like any other.
    """

    per_million_prompt_tokens: float = 0.0
    per_million_cached_tokens: float | None = None
    per_million_completion_tokens: float = 0.0


@frozen
class DispatchPolicy:
    """Where a text answer begins. Precedence: what is allowed, then caps of money, then budget_ratio, then start.

    start: `device` begins here, `cloud` there, `race` on both. It decides alone while budget_ratio is 1.
    budget_ratio: share of prompt tokens that the dear side may prefill, in expectation (b in DiSCo).
    tail_ratio: part of the budget kept for the tail (alpha in DiSCo).
    money_per_joule: exchange rate between device energy and money (lambda in DiSCo), on mains and cool.
    battery_factor: times that on battery; empty_factor: times that on an empty battery, in proportion to what is gone;
        hot_factor: times that where the device throttles, in proportion over the last 15 K.
    prices: by target name; they take the place of those that a target tells.
    weaker_model: a target that answers with a weaker model than the one asked for may be chosen.
    """

    start: Start = "device"
    budget_ratio: float = 1.0
    tail_ratio: float = 0.05
    money_per_joule: float = 0.0
    battery_factor: float = 1.0
    empty_factor: float = 1.0
    hot_factor: float = 1.0
    prices: Mapping[str, TokenPrice] = field(factory=dict)
    weaker_model: bool = False


@frozen
class MigrationPolicy:
    """When a running answer moves.

    enabled: device -> cloud moves by plan; falling back after a loss is always on.
    consume_tokens_per_s: how fast the reader takes tokens (r_c in DiSCo).
    min_tokens: the source makes at least this many tokens before a planned move.
    min_remaining_tokens: a shorter expected rest is not worth a move.
    max_moves: planned moves of one answer.
    stall_s: a source silent for this long is treated as lost.
    """

    enabled: bool = True
    consume_tokens_per_s: float = 5.0
    min_tokens: int = 8
    min_remaining_tokens: int = 16
    max_moves: int = 1
    stall_s: float = 5.0


@frozen
class DeliveryPolicy:
    """How fast a streamed answer is given to its reader.

    mode: `raw` as it comes; `reading` and `listening` (for voices) at the reader's rate, which then is r_c too.
    """

    mode: Literal["raw", "reading", "listening"] = "raw"
    reading_tokens_per_s: float = 5.0
    listening_tokens_per_s: float = 3.3


@frozen
class LimitsPolicy:
    """Bounds on one request, and on all requests of a device's own front door together. None: no such limit.

    tokens_per_min: prompt and answer, in any 60 s. max_concurrent: requests under way. usd_per_day, usd_per_month: what
    targets that cost money may cost, UTC; they come before budget_ratio. on_budget: at that cap the device answers
    (`degrade`) or nobody (`refuse`).
    """

    max_prompt_bytes: int = 256 << 10
    max_answer_tokens: int = 2048
    requests_per_s: float | None = None
    tokens_per_min: int | None = None
    max_concurrent: int | None = None
    usd_per_day: float | None = None
    usd_per_month: float | None = None
    on_budget: Literal["degrade", "refuse"] = "degrade"


@frozen
class EnginesPolicy:
    """wait_target_s: a new request should wait no longer than this; capacity follows from it by Little's law."""

    wait_target_s: float = 2.0


@frozen
class Policy:
    """One whole policy document.

    `critical` names sections or fields that the reader must understand or refuse the document. `selector` picks the
    devices by label. `epoch` grows when the coordinator's history starts anew, `version` with each document.
    """

    schema: str = SCHEMA
    critical: tuple[str, ...] = ()
    fleet: str = "default"
    selector: Mapping[str, str] = field(factory=dict)
    epoch: int = 0
    version: int = 0
    not_before_s: float = 0.0
    expires_s: float = 0.0
    split: SplitPolicy = field(factory=SplitPolicy)
    dispatch: DispatchPolicy = field(factory=DispatchPolicy)
    migration: MigrationPolicy = field(factory=MigrationPolicy)
    delivery: DeliveryPolicy = field(factory=DeliveryPolicy)
    routing: RoutingPolicy = field(factory=RoutingPolicy)
    privacy: PrivacyPolicy = field(factory=PrivacyPolicy)
    limits: LimitsPolicy = field(factory=LimitsPolicy)
    engines: EnginesPolicy = field(factory=EnginesPolicy)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
