"""Where an answer begins: which target starts at once and after which wait the others join. Pure.

After DiSCo (arXiv 2502.11417), section on dispatch: the second endpoint starts only if the first has not spoken by
then, so a slow or dead side costs a bounded wait and a healthy one costs nothing. With a budget the table decides, and
without one the policy's preference. A target that fails before the wait is over starts the next one at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, isinf
from typing import Literal

from attrs import frozen

from gateway.context import Constraints
from gateway.dispatch_table import EVERY_LENGTH, DispatchTable
from gateway.dispatch_values import value
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
    regime: Literal["device", "cloud", "race", "none", "device_constrained", "server_constrained"]
    reason: str


NO_PLAN = DispatchPlan((), "none", "a kept answer")
"""Of a request that no target is asked for."""


def dispatch(
    table: DispatchTable | None,
    prompt_tokens: int,
    targets: Sequence[TargetView],
    constraints: Constraints,
    draw: float,
    policy: DispatchPolicy,
    patience_s: float,
) -> DispatchPlan:
    """The starts of one request: by `table` where there is one and both sides may answer, else by preference.

    Args:
        table: made for the server that `sides` names; None without a budget.
        draw: uniform in [0, 1); decides for prompts on the boundary.
        patience_s: as in `plan`.
    """
    device, server = sides(targets, constraints) if table is not None else (None, None)
    if table is None or device is None or server is None:
        return plan(prompt_tokens, targets, constraints, policy, patience_s)
    if table.regime == "device_constrained":
        wait_s, why = _device_wait(table, prompt_tokens, device, server, draw, patience_s)
        first = [(server, 0.0), (device, wait_s)]
    else:
        first, why = _server_constrained(table, prompt_tokens, device, server, draw, patience_s)
    reason = f"{table.regime.replace('_', '-')}, budget {table.budget_ratio:g}, {prompt_tokens} tokens: {why}"
    return DispatchPlan(_with_rest(first, targets, constraints, prompt_tokens, patience_s), table.regime, reason)


def sides(targets: Sequence[TargetView], constraints: Constraints) -> tuple[TargetView | None, TargetView | None]:
    """The device and the server that a table is about: of each side the one whose first token is expected first."""
    up = _up(_allowed(targets, constraints))
    local = min((view for view in up if view.local), key=lambda view: view.queue_s, default=None)
    remote = min((view for view in up if not view.local), key=_expected_s, default=None)
    return local, remote


def alone(name: str, policy: DispatchPolicy) -> DispatchPlan:
    """What `plan` says where this target alone may answer: nothing is weighed then."""
    return DispatchPlan(((name, 0.0),), policy.start, _preferred(policy))


def _preferred(policy: DispatchPolicy) -> str:
    return f"policy.dispatch.start = {policy.start}"


def plan(
    prompt_tokens: int,
    targets: Sequence[TargetView],
    constraints: Constraints,
    policy: DispatchPolicy,
    patience_s: float,
) -> DispatchPlan:
    """Order the allowed targets by the policy's preference and give each its start.

    Args:
        prompt_tokens: estimate is enough; it scales a local target's patience only.
        targets: views of all targets that have the model.
        patience_s: a target without history may be silent for this long before the next one starts.
    """
    allowed = _allowed(targets, constraints)
    if not allowed:
        return DispatchPlan((), "none", constraints.reason or "no target has the model")
    order = _ordered(_up(allowed), policy)
    if policy.start == "race":
        return DispatchPlan(_race_starts(order, prompt_tokens, patience_s), "race", _preferred(policy))
    after_s = 0.0
    starts = [(order[0].name, after_s)]
    for before, view in pairwise(order):
        after_s += patience(before, prompt_tokens, patience_s)
        starts.append((view.name, after_s))
    skipped = [view.name for view in allowed if view not in order]
    reason = _preferred(policy) + (f"; resting: {', '.join(skipped)}" if skipped else "")
    return DispatchPlan(tuple(starts), policy.start, reason)


def patience(view: TargetView, prompt_tokens: int, patience_s: float) -> float:
    """Seconds to wait for this target's first token before another one starts.

    A device's TTFT is predictable (queue + prefill), so twice its prediction is granted; a server's is not, so the
    95 % quantile of what was seen counts, and never more than `patience_s`.
    """
    if view.local:
        return max(patience_s, 2.0 * view.prefill_seconds(prompt_tokens))
    seen_s = view.ttft_within_s(0.95)
    if isinf(seen_s) or view.seen < MIN_HISTORY:
        return patience_s
    return min(patience_s, max(SHORTEST_PATIENCE_S, 1.5 * seen_s))


def _device_wait(
    table: DispatchTable, prompt_tokens: int, device: TargetView, server: TargetView, draw: float, patience_s: float
) -> tuple[float, str]:
    """When the device joins the server, and why."""
    wait_s = table.device_wait_s(prompt_tokens, draw)
    if not isfinite(wait_s):
        return max(patience_s, server.ttft.last_s), "no budget is left for it: the device only if the server is lost"
    if wait_s > 0:
        return wait_s, f"{_boundary(table)}; the device after {wait_s:.2f} s of silence"
    alone_s = device.prefill_seconds(prompt_tokens)
    if alone_s >= server.ttft.last_s and server.seen >= MIN_HISTORY and isfinite(table.tail_wait_s):
        # Tokens for nothing: the queue or the prefill takes longer than the slowest answer of the server.
        return (
            table.tail_wait_s,
            f"the device needs {alone_s:.2f} s and cannot be first: after {table.tail_wait_s:.2f} s",
        )
    return 0.0, f"{_boundary(table)}; both at once"


def _server_constrained(
    table: DispatchTable, prompt_tokens: int, device: TargetView, server: TargetView, draw: float, patience_s: float
) -> tuple[list[tuple[TargetView, float]], str]:
    """Both starts, and why."""
    alone_s = device.prefill_seconds(prompt_tokens)
    if table.worth is None:
        asked, why = table.server_starts(prompt_tokens, draw), _boundary(table)
    else:
        saved_s = value(server.ttft, prompt_tokens, alone_s)
        asked = table.worth.asks(saved_s, alone_s, draw)
        why = f"the server saves {1e3 * saved_s:.3g} ms a token, asked from {1e3 * table.worth.least_value:.3g} on"
    if not asked:
        return [(device, 0.0), (server, patience(device, prompt_tokens, patience_s))], f"{why}; on the device"
    # The server is paid for. Beside it the device starts at once only if that saves more than what requests wait for it
    # on average: it is kept for those that have nothing else, and backs up a late server.
    late_s = min(table.tail_wait_s, max(patience_s, server.ttft.last_s))
    helps_s = server.ttft.mean_within_s(late_s + alone_s) - server.ttft.mean_within_s(alone_s)
    if device.queue_s > 0 or (table.worth is not None and helps_s < table.worth.mean_queue_s):
        return [(server, 0.0), (device, late_s)], f"{why}; on the server, the device after {late_s:.2f} s of silence"
    return [(device, 0.0), (server, 0.0)], f"{why}; both at once"


def _boundary(table: DispatchTable) -> str:
    if table.boundary_tokens == EVERY_LENGTH:
        return "any length is short"
    return f"long from {table.boundary_tokens} on"


def _with_rest(
    first: Sequence[tuple[TargetView, float]],
    targets: Sequence[TargetView],
    constraints: Constraints,
    prompt_tokens: int,
    patience_s: float,
) -> tuple[tuple[str, float], ...]:
    """The plan's two, and whoever else may answer for the case that both are lost."""
    starts = sorted(((view.name, after_s) for view, after_s in first), key=lambda start: start[1])
    named = {name for name, _ in starts}
    lost_s = max(after_s + patience(view, prompt_tokens, patience_s) for view, after_s in first)
    for view in _up(_allowed(targets, constraints)):
        if view.name not in named:
            starts.append((view.name, lost_s))
            lost_s += patience(view, prompt_tokens, patience_s)
    return tuple(starts)


def _allowed(targets: Sequence[TargetView], constraints: Constraints) -> list[TargetView]:
    return [view for view in targets if constraints.allows(view.name, view.local)]


def _up(views: Sequence[TargetView]) -> Sequence[TargetView]:
    """Those that do not rest after failures; when all rest, trying them still beats refusing."""
    return [view for view in views if view.up] or views


def _expected_s(view: TargetView) -> float:
    return view.queue_s + view.ttft_within_s(0.5)


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
