"""The routing section of a policy: which side answers a text request, in three levels. Each part complete by default.

Level 1 are rules, level 2 is the estimated complexity of a prompt against `cloud_threshold`, level 3 moves that
threshold with budgets, latency, the device and the cloud. docs/routing.md has the file form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from protocol.errors import ProtocolError

ComplexityBand = Literal["low", "medium", "high"]

EDGE_NAMES = frozenset({"edge", "device", "local"})
"""Words of a rule's `target` that mean this machine."""

CLOUD_NAMES = frozenset({"cloud", "remote"})
"""Words that mean any target that is not on this device. Every other word is the name of one target."""

MAX_RULES = 256


@frozen
class RouteWhen:
    """What must hold for a rule; a condition left out always holds, an empty `when` matches every request.

    intent: any of these. estimated_complexity: the band of the estimate (`low` below `low_below`, `high` from
    `cloud_threshold` on, before anything moved it). labels: all of these in the request's labels.
    tenants: any of these. min_prompt_tokens, max_prompt_tokens: bounds of the estimated length, both included.
    tools: whether tools are offered. language: most of the prompt's letters.
    """

    intent: tuple[str, ...] = ()
    estimated_complexity: tuple[ComplexityBand, ...] = ()
    labels: Mapping[str, str] = field(factory=dict)
    tenants: tuple[str, ...] = ()
    min_prompt_tokens: int = 0
    max_prompt_tokens: int | None = None
    tools: bool | None = None
    language: Literal["en", "zh", None] = None


@frozen
class RouteRule:
    """`target`: edge, cloud, or a target's name, preferred; with `strict` nothing else may answer. `model`: the model
    that answers when the request left the choice to the gateway; None: what the side has."""

    target: str
    when: RouteWhen = field(factory=RouteWhen)
    model: str | None = None
    strict: bool = False


@frozen
class RouteFallback:
    """What stands behind an answer of the device: with `enable`, one whose confidence is under the threshold goes to
    `upgrade_target`. A route to the edge counts only while this is armed."""

    enable: bool = False
    confidence_threshold: float = 0.6
    upgrade_target: str = "cloud"


@frozen
class BudgetLift:
    """With `left_ratio` of a budget left, the cloud threshold is higher by `lift`."""

    left_ratio: float
    lift: float


def _lifts() -> tuple[BudgetLift, ...]:
    return (BudgetLift(1.0, 0.0), BudgetLift(0.4, 0.15), BudgetLift(0.0, 0.3))


@frozen
class DynamicRouting:
    """What moves the cloud threshold; a lift sends more to the device, a drop more to the cloud.

    budget_lifts: points joined by straight lines, for the day's and the month's budget alike; the larger lift counts.
    max_ttft_s: a first token is wanted by then: the side that alone keeps it gets `latency_shift`; None: no bound.
    battery_low_ratio, battery_drop: a device on battery below this charge. hot_drop: a device throttled by heat.
    queue_s, queue_drop: the device's queue is at least this long.
    slow_ttft_s, slow_lift: the cloud's median first token takes longer. failing_ratio, failing_lift: this share of the
    cloud's recent requests failed; with no cloud target up the device answers whatever it can.
    """

    enable: bool = True
    budget_lifts: tuple[BudgetLift, ...] = field(factory=_lifts)
    max_ttft_s: float | None = None
    latency_shift: float = 0.15
    battery_low_ratio: float = 0.2
    battery_drop: float = 0.1
    hot_drop: float = 0.1
    queue_s: float = 5.0
    queue_drop: float = 0.1
    slow_ttft_s: float = 5.0
    slow_lift: float = 0.1
    failing_ratio: float = 0.25
    failing_lift: float = 0.2


@frozen
class IntentRouting:
    """When the intent classifier is believed.

    threshold: least probability; None: the one that was fitted with the classifier. encoder: id of the classifier that
    `threshold` was chosen for; with any other, the threshold is not used (scores of two encoders do not compare).
    """

    threshold: float | None = None
    encoder: str | None = None


@frozen
class ShadowRouting:
    """Requests that are asked of the other path too, after they were answered; nobody sees the second answer.

    share: of requests that may go both ways (0: off). concurrent: such second requests at once. usd_per_day: what they
    may cost in a UTC day, in each process; the tenant's own budgets hold as well. deadline_s: of one.
    alike_ratio: two answers with this share of words in common count as alike.
    """

    share: float = 0.0
    concurrent: int = 2
    usd_per_day: float = 1.0
    deadline_s: float = 60.0
    alike_ratio: float = 0.5


@frozen
class RoutingPolicy:
    """Which sides may answer text, and which one is asked first.

    targets: what may answer at all: names of targets; `cloud` stands for every `cloud:PROVIDER` too.
    rules: the first that matches decides. cloud_threshold: from this complexity (0-1) on the cloud answers.
    low_below: complexity under this is `low`. models: the model that `auto` means, by `edge` and `cloud`.
    plugins: entry points of the group `midstream.routers` that may decide, asked in this order before the rules, each
    within plugin_deadline_s. tools_in_cloud: requests with tools go to the cloud where no rule says otherwise; small
    models write calls badly. Rules, plugins and thresholds choose for `model: "auto"`; a named model stays.
    shadow: requests that go both ways, to compare.
    """

    targets: tuple[str, ...] = ("device", "cloud")
    rules: tuple[RouteRule, ...] = ()
    fallback: RouteFallback = field(factory=RouteFallback)
    cloud_threshold: float = 0.7
    low_below: float = 0.35
    dynamic: DynamicRouting = field(factory=DynamicRouting)
    intent: IntentRouting = field(factory=IntentRouting)
    models: Mapping[str, str] = field(factory=dict)
    plugins: tuple[str, ...] = ()
    plugin_deadline_s: float = 0.005
    tools_in_cloud: bool = True
    shadow: ShadowRouting = field(factory=ShadowRouting)


def is_edge(target: str) -> bool:
    """Whether a rule's target means this device."""
    return target.lower() in EDGE_NAMES


def is_cloud(target: str) -> bool:
    """Whether a rule's target means any remote target."""
    return target.lower() in CLOUD_NAMES


def unarmed(routing: RoutingPolicy, local_only: bool) -> str | None:
    """Why the fallback behind edge routes is not armed; None when it is.

    The fallback goes live before the routing does: an edge route without it would deliver a small model's mistakes.
    """
    fallback = routing.fallback
    if not fallback.enable:
        return "routing.fallback.enable is false"
    if is_edge(fallback.upgrade_target):
        return f"routing.fallback.upgrade_target is {fallback.upgrade_target!r}, which is the device itself"
    if local_only:
        return "privacy.local_only keeps every answer on the device, so there is nothing to fall back to"
    if not may_answer(routing, fallback.upgrade_target):
        return f"routing.fallback.upgrade_target {fallback.upgrade_target!r} is not in routing.targets"
    return None


def may_answer(routing: RoutingPolicy, target: str) -> bool:
    """Whether `routing.targets` lets this target (or side) answer."""
    if is_cloud(target):
        return any(not is_edge(name) for name in routing.targets)
    if is_edge(target):
        return any(is_edge(name) for name in routing.targets)
    return target in routing.targets or target.partition(":")[0] in routing.targets


def check_routing(routing: RoutingPolicy) -> None:
    """Raise ProtocolError naming the first field that makes no sense."""
    if len(routing.rules) > MAX_RULES:
        raise _wrong("rules", f"has {len(routing.rules)} rules, at most {MAX_RULES} are taken")
    for at, rule in enumerate(routing.rules):
        _check_rule(routing, rule, f"rules[{at}]")
    if routing.low_below > routing.cloud_threshold:
        raise _wrong("low_below", f"is {routing.low_below:g}, above cloud_threshold {routing.cloud_threshold:g}")
    if routing.intent.threshold is not None and not routing.intent.encoder:
        raise _wrong("intent.threshold", "needs intent.encoder: the id of the classifier that it was chosen for")
    unknown = next((side for side in routing.models if side not in ("edge", "cloud")), None)
    if unknown is not None:
        raise _wrong(f"models.{unknown[:32]}", "must be `edge` or `cloud`")
    _check_lifts(routing.dynamic.budget_lifts)
    _check_shadow(routing.shadow)


def _check_rule(routing: RoutingPolicy, rule: RouteRule, path: str) -> None:
    if not rule.target:
        raise _wrong(f"{path}.target", "is empty; name edge, cloud or a target")
    if not may_answer(routing, rule.target):
        raise _wrong(f"{path}.target", f"is {rule.target[:64]!r}, which routing.targets does not allow")
    most = rule.when.max_prompt_tokens
    if rule.when.min_prompt_tokens < 0 or (most is not None and most < rule.when.min_prompt_tokens):
        raise _wrong(f"{path}.when.max_prompt_tokens", "must be at least min_prompt_tokens, and neither below 0")


def _check_shadow(shadow: ShadowRouting) -> None:
    for name, low, high in (
        ("share", 0, 1), ("concurrent", 1, 64), ("usd_per_day", 0, 1e6), ("deadline_s", 0.1, 3600),
        ("alike_ratio", 0, 1),
    ):  # fmt: skip
        if not low <= getattr(shadow, name) <= high:
            raise _wrong(f"shadow.{name}", f"is {getattr(shadow, name):g}, must be {low:g} to {high:g}")


def _check_lifts(lifts: tuple[BudgetLift, ...]) -> None:
    if not lifts or len(lifts) > 32:
        raise _wrong("dynamic.budget_lifts", "must have 1 to 32 points")
    for at, point in enumerate(lifts):
        if not (0 <= point.left_ratio <= 1 and -1 <= point.lift <= 1):
            raise _wrong(f"dynamic.budget_lifts[{at}]", "must have a left_ratio of 0 to 1 and a lift of -1 to 1")
    shares = [point.left_ratio for point in lifts]
    if shares != sorted(set(shares), reverse=True):
        raise _wrong("dynamic.budget_lifts", "must fall in left_ratio from point to point")


def _wrong(field_path: str, what: str) -> ProtocolError:
    return ProtocolError(f"routing.{field_path} {what}", field=f"routing.{field_path}")
