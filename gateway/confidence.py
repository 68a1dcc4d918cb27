"""How sure a model was of what it wrote, from raw logits: features, a calibrated probability, when to hand over. Pure.

Wrong answers of small chat models lie within 0.15 nats of right ones, so no absolute threshold ships: a probability is
read off a curve that was fitted for this model, quantisation, template and intent (gateway/calibration.py). Without one
only signs that need no curve count: no logprobs at all, an empty answer, a loop, a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite
from typing import Literal

from attrs import frozen

from gateway.calibration import Calibration, FeatureName
from protocol.text import Token

FIRST_TOKENS = 5
LOOP_REPEATS = 4
LOOP_TOKENS = 12
"""A run of up to so many tokens, written so often in a row, is a loop."""

REFUSALS = (
    "i'm sorry, but i",
    "i cannot",
    "i can't help",
    "as an ai",
    "i am unable",
    "抱歉\uff0c我",
    "我无法",
    "对不起\uff0c我",
)

FEATURES: tuple[FeatureName, ...] = ("mean", "tenth", "least", "margin", "first", "hybrid")


@frozen
class Features:
    """Of the tokens so far, from raw logits at temperature 1, before any grammar.

    mean, tenth, least: of the tokens' logprobs (10 % quantile). margin: mean logit distance to the runner-up, 0 where
    an engine gives none. first: mean logprob of the first five. tokens: how many there were.
    """

    mean: float
    tenth: float
    least: float
    margin: float
    first: float
    tokens: int

    def value(self, name: FeatureName) -> float:
        """One number in 0..1 that rises with confidence."""
        if name == "margin":
            return 1.0 - exp(-self.margin / 3.0)
        if name == "hybrid":
            return 0.5 * exp(self.mean) + 0.5 * (1.0 - exp(-self.margin / 3.0))
        logprob: float = getattr(self, name)
        return exp(min(0.0, logprob))


def features(tokens: Sequence[Token]) -> Features | None:
    """Of tokens that carry text; None when one of them has no finite logprob: a missing value is not certainty."""
    written = [token for token in tokens if token.data]
    logprobs = [token.logprob for token in written if token.logprob is not None and isfinite(token.logprob)]
    if not written or len(logprobs) != len(written):
        return None
    ordered = sorted(logprobs)
    margins = [token.margin for token in written if token.margin is not None and isfinite(token.margin)]
    first = logprobs[:FIRST_TOKENS]
    return Features(
        mean=sum(logprobs) / len(logprobs),
        tenth=ordered[len(ordered) // 10],
        least=ordered[0],
        margin=sum(margins) / len(margins) if len(margins) == len(written) else 0.0,
        first=sum(first) / len(first),
        tokens=len(written),
    )


@frozen
class Judgement:
    """confidence: calibrated probability that the answer is right; None where no curve says so."""

    act: Literal["wait", "keep", "upgrade"]
    confidence: float | None
    reason: str


def judge(
    tokens: Sequence[Token], decide_at: int, ended: bool, calibration: Calibration | None, threshold: float
) -> Judgement:
    """What to do with an answer that a small model has begun.

    Args:
        tokens: the answer so far.
        decide_at: tokens after which the decision falls; an answer that ends before is judged at its end.
        threshold: least probability of being right that is good enough (policy.routing.confidence_threshold).
    """
    text = b"".join(token.data for token in tokens).decode("utf-8", "ignore")
    if looping([token.data for token in tokens]):
        return Judgement("upgrade", 0.0, "it repeats itself")
    if len(tokens) < decide_at and not ended:
        return Judgement("wait", None, f"{len(tokens)} of {decide_at} tokens")
    if ended and not text.strip():
        return Judgement("upgrade", 0.0, "the answer is empty")
    if text.strip().lower().startswith(REFUSALS):
        return Judgement("upgrade", 0.0, "it refuses")
    found = features(tokens)
    if found is None:
        return Judgement("upgrade", 0.0, "the engine gives no logprobs, so nothing is known of its confidence")
    if calibration is None:
        return Judgement("keep", None, "this model and intent were never calibrated; see `midstream route calibrate`")
    confidence = calibration.probability(found.value(calibration.feature))
    if confidence < threshold:
        return Judgement("upgrade", confidence, f"confidence {confidence:.2f}, {threshold:.2f} wanted")
    return Judgement("keep", confidence, f"confidence {confidence:.2f}")


def looping(pieces: Sequence[bytes]) -> bool:
    """Whether the answer ends in the same few tokens over and over."""
    for length in range(1, LOOP_TOKENS + 1):
        tail = pieces[-length * LOOP_REPEATS :]
        if len(tail) < length * LOOP_REPEATS:
            return False
        if all(tail[place] == tail[place % length] for place in range(len(tail))) and b"".join(tail).strip():
            return True
    return False
