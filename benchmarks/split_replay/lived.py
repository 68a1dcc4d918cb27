"""What the requests of a live run cost, for its replay: each what it took itself, here and at the far end.

A machine that others use is slow for seconds on end, and a P99 of a few hundred requests is a few of them. Costs drawn
from other runs would compare two such handfuls. With the requests' own costs a difference is the model's: of the link,
of who waits for whom, and of what was decided. (It is called trace-driven, or correlated, inspection: A. M. Law,
"Simulation Modeling and Analysis", on validation.) In an arm without a link only the queue is left to compare.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from split_models.arm_cost import Arm, ArmCost
from split_models.arms import Spent
from split_models.costs import ENVELOPE_BYTES
from split_models.replay import Took


@frozen
class Lived:
    """What one run cost. number: of the request that it answered; below zero before the first request, beyond the last
    one after it."""

    number: int
    cost: ArmCost


def cost_of(arm: Arm, spent: Spent, here_s: float | None = None) -> ArmCost:
    """The cost of a run that spent so much. here_s: all seconds on the device where they are known, else of its stages
    there.
    """
    if here_s is None:
        here_s = spent.queue_s + spent.before_s + spent.compute_s + spent.encode_s + spent.after_s
    up_bytes, down_bytes = (n + ENVELOPE_BYTES if arm.link else 0 for n in (spent.up_bytes, spent.down_bytes))
    return ArmCost(arm, max(0.0, here_s), up_bytes, down_bytes, spent.server_s + spent.server_queue_s)


def around(before: Sequence[ArmCost], after: Sequence[ArmCost], count: int) -> list[Lived]:
    """Runs before the first of `count` requests, and after the last one."""
    first = [Lived(number - len(before), cost) for number, cost in enumerate(before)]
    return [*first, *(Lived(count + number, cost) for number, cost in enumerate(after))]


def as_lived(runs: Sequence[Lived], planned: Sequence[ArmCost]) -> Took:
    """Each request costs on an arm what it took on it itself, else what the nearest run of that arm took; an arm that
    never ran costs what is planned with.
    """
    plan = {cost.arm: cost for cost in planned}
    by_arm: dict[Arm, list[Lived]] = {}
    for run in runs:
        by_arm.setdefault(run.cost.arm, []).append(run)

    def took(number: int, arm: Arm) -> ArmCost:
        if arm not in by_arm:
            return plan[arm]
        nearest = min(by_arm[arm], key=lambda run: (abs(run.number - number), run.number))
        return evolve(nearest.cost, rest_s=plan[arm].rest_s)

    return took
