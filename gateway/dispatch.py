"""Where an answer begins: which target starts at once and after which wait the others join. Pure.

After DiSCo (arXiv 2502.11417), section on dispatch: the second endpoint starts only if the first has not spoken by
then, so a slow or dead side costs a bounded wait and a healthy one costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import Literal

from attrs import frozen

from gateway.context import Constraints
from gateway.targets import TargetView
from protocol.policy import DispatchPolicy

MIN_HISTORY = 5
"""Fewer TTFT samples than this say nothing about a tail."""

SHORTEST_PATIENCE_S = 0.25
"""Below this a hedge would only double the work of a healthy target."""


@frozen
class DispatchPlan:
    """`starts` holds (target name, seconds after arrival), ascending; empty when nothing is allowed."""

    starts: tuple[tuple[str, float], ...]
    regime: Literal["device", "cloud", "race", "none"]
    reason: str


NO_PLAN = DispatchPlan((), "none", "an answer that was kept")
"""Nothing starts: the cache has the answer."""


def plan(
    prompt_tokens: int,
    targets: Sequence[TargetView],
    constraints: Constraints,
    policy: DispatchPolicy,
    patience_s: float,
) -> DispatchPlan:
    """Order the allowed targets and give each its start.

    Args:
        prompt_tokens: estimate is enough; it scales a local target's patience only.
        targets: views of all targets that have the model.
        patience_s: a target without history may be silent for this long before the next one starts.
    """
    allowed = [view for view in targets if constraints.allows(view.name, view.local)]
    if not allowed:
        return DispatchPlan((), "none", constraints.reason or "no target has the model")
    up = [view for view in allowed if view.up]
    # When all rest after failures, trying them still beats refusing.
    order = _ordered(up or allowed, policy)
    if policy.start == "race":
        return DispatchPlan(_race_starts(order, prompt_tokens, patience_s), "race", "policy.dispatch.start = race")
    starts: list[tuple[str, float]] = []
    after_s = 0.0
    for view in order:
        starts.append((view.name, after_s))
        after_s += patience(view, prompt_tokens, patience_s)
    skipped = [view.name for view in allowed if view not in order]
    reason = f"policy.dispatch.start = {policy.start}" + (f"; resting: {', '.join(skipped)}" if skipped else "")
    return DispatchPlan(tuple(starts), policy.start, reason)


def patience(view: TargetView, prompt_tokens: int, patience_s: float) -> float:
    """Seconds to wait for this target's first token before another one starts.

    A device's TTFT is predictable (queue + prefill), so twice its prediction is granted; a server's is not, so the
    95 % quantile of what was seen counts, and never more than `patience_s`.
    """
    if view.local:
        return max(patience_s, 2.0 * view.prefill_seconds(prompt_tokens))
    seen_s = view.ttft_quantile_s(0.95)
    if seen_s is None or isinf(seen_s) or len(view.ttft_s) < MIN_HISTORY:
        return patience_s
    return min(patience_s, max(SHORTEST_PATIENCE_S, 1.5 * seen_s))


def _ordered(views: Sequence[TargetView], policy: DispatchPolicy) -> list[TargetView]:
    """Preferred side first, then the shorter queue; the given order breaks ties."""
    first_local = policy.start != "cloud"
    return sorted(views, key=lambda view: (view.local != first_local, view.queue_s))


def _race_starts(order: Sequence[TargetView], prompt_tokens: int, patience_s: float) -> tuple[tuple[str, float], ...]:
    """The first of each side at once, the rest after the longest patience of those."""
    heads = [next((v for v in order if v.local is local), None) for local in (True, False)]
    racing = [view for view in order if any(view is head for head in heads)]
    rest = [view for view in order if not any(view is one for one in racing)]
    late_s = max(patience(view, prompt_tokens, patience_s) for view in racing)
    late = tuple((view.name, late_s * (place + 1)) for place, view in enumerate(rest))
    return (*((view.name, 0.0) for view in racing), *late)
