"""Curves from a raw score to the probability of being right: isotonic regression, and how good a score is. Pure.

Pool adjacent violators (Ayer et al. 1955; Barlow et al., Statistical Inference under Order Restrictions, 1972, section
1.2). Calibrating token margins this way is UCCI's first step (arXiv 2605.18796, abstract).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from protocol.models import CatalogueEntry

LEAST_PAIRS = 200
"""Fewer labelled answers say too little about a curve."""

BINS = 10

FeatureName = Literal["mean", "tenth", "least", "margin", "first", "hybrid"]


@frozen
class Scope:
    """What a curve is for: it says nothing about another file, quantisation, template or intent.

    weights: of `weights_of`, which settles file, quantisation and template. intent: empty for a curve over all.
    """

    model: str
    weights: str
    intent: str = ""


@frozen
class Calibration:
    """One fitted curve. scores: ascending; probabilities: at them, ascending; between two it goes straight.

    auroc: chance that a right answer scores above a wrong one. ece: expected calibration error of the fitted curve on
    the held-out part; raw_ece: of the score itself. pairs: labelled answers behind it.
    """

    scope: Scope
    feature: FeatureName
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    auroc: float
    ece: float
    raw_ece: float
    pairs: int

    def probability(self, score: float) -> float:
        """Of being right, at this score; beyond the ends as at the ends."""
        place = bisect_right(self.scores, score)
        if place == 0:
            return self.probabilities[0]
        if place == len(self.scores):
            return self.probabilities[-1]
        low, high = self.scores[place - 1], self.scores[place]
        share = (score - low) / (high - low)
        return self.probabilities[place - 1] + share * (self.probabilities[place] - self.probabilities[place - 1])


def isotonic(scores: Sequence[float], right: Sequence[bool]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(scores, probabilities) of the rising step curve with the least squared error, one point per step."""
    ties: dict[float, tuple[int, int]] = {}
    for score, good in zip(scores, right, strict=True):
        before = ties.get(score, (0, 0))
        ties[score] = before[0] + good, before[1] + 1
    blocks: list[list[float]] = []  # score times count, right ones, count
    for score, (rights, count) in sorted(ties.items()):
        blocks.append([score * count, float(rights), float(count)])
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][2] >= blocks[-1][1] / blocks[-1][2]:
            last = blocks.pop()
            blocks[-1] = [one + other for one, other in zip(blocks[-1], last, strict=True)]
    points = {block[0] / block[2]: block[1] / block[2] for block in blocks}
    return tuple(points), tuple(points.values())


def auroc(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Area under the ROC curve by ranks, ties counted half; 0.5 when all are right or all wrong."""
    good = sum(right)
    if not 0 < good < len(right):
        return 0.5
    ordered = sorted(zip(scores, right, strict=True))
    wins = below = 0.0
    at = 0
    while at < len(ordered):
        end = at
        while end < len(ordered) and ordered[end][0] == ordered[at][0]:
            end += 1
        here = sum(flag for _, flag in ordered[at:end])
        wins += here * (below + (end - at - here) / 2)
        below += end - at - here
        at = end
    return wins / (good * (len(right) - good))


def calibration_error(probabilities: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error over ten bins of equal width (Guo et al. 2017, section 2)."""
    error = 0.0
    for number in range(BINS):
        inside = [
            (p, flag)
            for p, flag in zip(probabilities, right, strict=True)
            if number / BINS <= p < (number + 1) / BINS or (number == BINS - 1 and p == 1.0)
        ]
        if inside:
            gap = sum(p for p, _ in inside) / len(inside) - sum(flag for _, flag in inside) / len(inside)
            error += abs(gap) * len(inside) / len(right)
    return error


def fit(scope: Scope, feature: FeatureName, scores: Sequence[float], right: Sequence[bool]) -> Calibration:
    """A curve over all pairs; its errors are measured with every other pair held out. Raises ValueError for too few."""
    if len(scores) < LEAST_PAIRS:
        raise ValueError(f"{len(scores)} labelled answers, at least {LEAST_PAIRS} are needed")
    fitted = Calibration(scope, feature, *isotonic(scores[::2], right[::2]), 0.0, 0.0, 0.0, 0)
    held = [fitted.probability(score) for score in scores[1::2]]
    return Calibration(
        scope=scope,
        feature=feature,
        scores=(curve := isotonic(scores, right))[0],
        probabilities=curve[1],
        auroc=auroc(scores, right),
        ece=calibration_error(held, right[1::2]),
        raw_ece=calibration_error(scores, right),
        pairs=len(scores),
    )


def threshold_for(calibration: Calibration, scores: Sequence[float], share: float) -> float:
    """The probability below which `share` of these answers would be handed over."""
    ordered = sorted(calibration.probability(score) for score in scores)
    place = min(len(ordered) - 1, round(share * len(ordered)))
    return ordered[place]


def best_for(curves: Sequence[Calibration], model: str, weights: str, intent: str) -> Calibration | None:
    """The curve of this very scope, else that over all intents; None rather than one of other weights."""
    for wanted in (Scope(model, weights, intent), Scope(model, weights)):
        found = next((curve for curve in curves if curve.scope == wanted), None)
        if found is not None:
            return found
    return None


def weights_of(entry: CatalogueEntry) -> str:
    """Names a model's bytes and the chat template that goes before them; the file's own template is in its bytes."""
    template = hashlib.sha256(entry.chat_template.encode()).hexdigest()[:12] if entry.chat_template else "own"
    return f"{entry.source_sha256[:16]}/{template}"
