"""Pure: how far the transfers of requests under way have come, and which of them stand still.

The pace so far says little of a transfer that has stopped: it seems to end soon for as long as it stands. What stands
still is a hole, and holes are long in proportion to how long they have lasted already.
"""

from __future__ import annotations

from collections.abc import Mapping

from netprobe.view import UNKNOWN_LINK, LinkView
from split_models.arm_cost import ArmCost
from split_models.planner import link_seconds, moved_bytes, still_needed_s

STILL_S = 0.1
GRACE_TRIPS = 2.0
"""A transfer of which nothing has arrived for so long and so many round trips stands still."""

OVERDUE = 2.0
"""It does so for twice as long again as it has (the mean of a Pareto law of 1.5, as holes are)."""

MOST_UNDER_WAY = 64
"""Requests that are followed at once; of more the oldest is forgotten."""


class Progress:
    """By when a request began: how much of it had moved when that was last seen to change, and when that was."""

    def __init__(self) -> None:
        self._moved: dict[float, tuple[int, float]] = {}
        self._still: set[float] = set()

    def left_s(self, cost: ArmCost, views: Mapping[str, LinkView], began_s: float, now_s: float) -> float | None:
        """Seconds until the answer, at the pace so far or by how long nothing has moved; None where nothing tells."""
        left_s, moved = still_needed_s(cost, views, began_s), moved_bytes(cost, views, began_s)
        if moved is None:
            return left_s
        before, since_s = self._moved.get(began_s, (-1, now_s))
        if moved != before:
            self._note(began_s, moved, now_s)
            return left_s
        overdue_s = now_s - since_s - _due_s(cost, views, answer_alone=left_s is None)
        if overdue_s <= 0:
            return left_s
        self._still.add(began_s)
        return (left_s or 0.0) + OVERDUE * overdue_s

    def stands_still(self, began_s: float) -> bool:
        """Whether nothing moved any more when that request was last looked at."""
        return began_s in self._still

    def over(self, began_s: float) -> None:
        """That request has its answer."""
        self._moved.pop(began_s, None)
        self._still.discard(began_s)

    def _note(self, began_s: float, moved: int, now_s: float) -> None:
        if began_s not in self._moved and len(self._moved) >= MOST_UNDER_WAY:
            self.over(next(iter(self._moved)))
        self._moved[began_s] = moved, now_s
        self._still.discard(began_s)


def _due_s(cost: ArmCost, views: Mapping[str, LinkView], *, answer_alone: bool) -> float:
    """Seconds without a byte that are nothing unusual. answer_alone: all has been sent, the far end works."""
    view = views.get(cost.arm.link or "", UNKNOWN_LINK)
    due_s = GRACE_TRIPS * (view.rtt_s or 0.0) + STILL_S
    if not answer_alone:
        return due_s
    return due_s + cost.server_s + max(0.0, link_seconds(cost, views) - view.seconds_for(cost.up_bytes))
