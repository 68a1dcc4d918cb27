"""Doubt about an answer that a small model begins: held back for its first tokens, judged, and perhaps begun anew by a
better model before anybody saw a word of it.

Decisions are gateway/confidence.py's; the stream owner acts on them. An answer whose judgement cannot be acted on,
because nobody better can be reached, stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from gateway.calibration import Calibration, best_for
from gateway.confidence import Judgement, judge
from gateway.targets import Target
from protocol.policy import Policy
from protocol.policy_routing import is_cloud
from protocol.text import Token

DECIDE_AT = 16
"""Tokens that are held back at most: some three seconds of reading, of which the reader sees nothing while it waits."""

Curves = Callable[[], Sequence[Calibration]]


@frozen
class Better:
    """Who may begin the answer anew, in order of preference."""

    targets: tuple[Target, ...]


@define
class Doubt:
    """Of one answer. `judged` is set once."""

    better: Better
    curves: Sequence[Calibration]
    intent: str
    threshold: float
    decide_at: int = DECIDE_AT
    judged: Judgement | None = field(default=None, init=False)

    def look(self, source: Target, model: str, tokens: Sequence[Token], ended: bool) -> Judgement:
        """Judge what `source` has made so far; `wait` while that is too little."""
        curve = best_for(self.curves, model, source.weights, self.intent)
        found = judge(tokens, self.decide_at, ended, curve, self.threshold)
        if found.act != "wait":
            self.judged = found
        return found


def doubt_of(
    policy: Policy, targets: Sequence[Target], better: Sequence[Target], curves: Curves, intent: str
) -> Doubt | None:
    """Doubt for an answer that the device may make, where policy has a fallback and somebody better may be asked."""
    fallback = policy.routing.fallback
    if not fallback.enable or not any(target.local for target in targets):
        return None
    wanted = [
        target
        for target in better
        if not target.local and (target.name == fallback.upgrade_target or is_cloud(fallback.upgrade_target))
    ]
    if not wanted:
        return None
    return Doubt(Better(tuple(wanted)), curves(), intent, fallback.confidence_threshold)
