"""One-shot passes over one prefix in micro-batches of several sizes.

llama.cpp's kernels differ by how many rows they get, and quantised activations make a step of each difference: two
passes over the same text, equally valid, put one token up to 0.45 nats apart (Gemma 270M, Q4_K_M, answers that nobody
moved). So a token that lies too far below the best one in one pass goes through the others. What was made from another
prefix lies far below in all of them: the bench shows that with answers of which a token before the seam is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define

from benchmarks.handoff_score import MICRO_BATCH_TOKENS

SIZES = (MICRO_BATCH_TOKENS, 512, 1, 4, 64)
"""Rows at once: as in the first pass, all of them, one as in decoding, and two between."""


class Pass(Protocol):
    """What makes a pass."""

    def below(self, given: Sequence[int], made: Sequence[int]) -> list[float]:
        """How far below the best one each token of `made` lies, in nats."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


@define
class Question:
    """Tokens that were made behind `given`. nats: how far each lies below the best one in the pass nearest to it."""

    given: Sequence[int]
    made: Sequence[int]
    nats: list[float]


def put(questions: Sequence[Question], begin: Callable[[int], Pass], bound_nats: float, end_s: float) -> bool:
    """Take each question through the passes until all its tokens lie within the bound in one of them.

    Args:
        begin: a pass in micro-batches of so many tokens.
        end_s: monotonic; no pass begins later.

    Returns:
        Whether there was time for all of them.
    """
    for size in SIZES:
        left = [question for question in questions if max(question.nats) > bound_nats]
        if not left:
            return True
        if time.monotonic() > end_s:
            return False
        one = begin(size)
        try:
            for question in left:
                if time.monotonic() > end_s:
                    return False
                found = one.below(question.given, question.made)
                question.nats = [min(pair) for pair in zip(question.nats, found, strict=True)]
        finally:
            one.close()
    return True
