"""Level 1 of routing: the policy's rules over what is known of a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from protocol.policy_routing import ComplexityBand, RouteRule, RouteWhen, RoutingPolicy

Language = Literal["en", "zh"]


NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Facts(NamedTuple):
    """What is known of a request when it is routed, without a word of it.

    intent: said by the client, or told by the classifier; None when neither knows. complexity: 0 to 1; band: by the
    policy's bounds. hard: it has a mark that makes it hard however short it is. A tuple, for plugins see it and must
    not change it, and a frozen class takes five times as long to make.
    """

    prompt_tokens: int
    complexity: float
    band: ComplexityBand
    hard: bool = False
    intent: str | None = None
    language: Language = "en"
    tenant: str = "local"
    tools: bool = False
    labels: Mapping[str, str] = NO_LABELS


def band_of(complexity: float, routing: RoutingPolicy) -> ComplexityBand:
    """Low, medium or high; the bounds are the policy's, before anything moved them."""
    if complexity < routing.low_below:
        return "low"
    return "high" if complexity >= routing.cloud_threshold else "medium"


def first_match(rules: tuple[RouteRule, ...], facts: Facts) -> int | None:
    """Index of the first rule whose conditions all hold."""
    intent = facts.intent
    for at, rule in enumerate(rules):
        when = rule.when
        # Most rules are passed over by their intent, before anything else of them is looked at.
        if (not when.intent or intent in when.intent) and _fits(when, facts):
            return at
    return None


def _fits(when: RouteWhen, facts: Facts) -> bool:
    """Whether every condition that is given holds, the intent's aside."""
    if when.estimated_complexity and facts.band not in when.estimated_complexity:
        return False
    if when.labels and any(facts.labels.get(name) != value for name, value in when.labels.items()):
        return False
    if facts.prompt_tokens < when.min_prompt_tokens:
        return False
    if when.max_prompt_tokens is not None and facts.prompt_tokens > when.max_prompt_tokens:
        return False
    if when.tools is not None and when.tools != facts.tools:
        return False
    if when.language is not None and when.language != facts.language:
        return False
    return not when.tenants or facts.tenant in when.tenants
