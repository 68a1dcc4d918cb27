"""What a server token buys on a device that may be busy: seconds of TTFT saved per prompt token. Pure.

On an idle device longer prompts save more per token, so the best use of a server's budget is DiSCo's threshold on the
length. A queue turns that around: a short prompt behind a long answer saves most. Ranking by seconds per token covers
both, and is the threshold on the length where the device is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import groupby
from math import inf
from operator import itemgetter

from attrs import frozen

from gateway.ttft import Ecdf

WINDOW = 512
"""Requests remembered."""

KEPT_RATIO = 1.0 - 1.0 / 4096.0
"""Of the account, with each request: what was long ago is settled."""

CREDIT_PROMPTS = 24.0

LOAD_KEPT_RATIO = 1.0 - 1.0 / 64.0
"""Of the load, which changes by the minute."""

LEAST = 4
"""Fewer say nothing about what a budget should be kept for."""


def value(ttft: Ecdf, prompt_tokens: int, alone_s: float) -> float:
    """Seconds of mean TTFT saved per token, if the server is asked as well as a device that alone needs `alone_s`."""
    if prompt_tokens <= 0:
        return inf
    return (alone_s - ttft.mean_within_s(alone_s)) / prompt_tokens


@frozen
class Worth:
    """For which requests the server is asked: those that would wait longest, then those that save most per token.

    ratio: share of the requests that save just the least value. mean_queue_s: what requests wait for the device.
    """

    least_value: float
    ratio: float
    longest_s: float = inf
    mean_queue_s: float = 0.0

    def asks(self, saved_per_token_s: float, alone_s: float, draw: float) -> bool:
        """Whether the server is asked. draw: uniform in [0, 1)."""
        if saved_per_token_s == self.least_value and alone_s <= self.longest_s:
            return draw < self.ratio
        return saved_per_token_s > self.least_value or alone_s > self.longest_s


NOTHING = Worth(inf, 0.0)
"""Asks for no request that has tokens."""


class ValueHistory:
    """Requests as they found the device, and an account of the tokens that the server was asked for."""

    def __init__(self, limit: int = WINDOW) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=limit)
        self._tokens = 0.0
        self._spent = 0.0
        self._requests = 0.0
        self._count = 0.0
        self._queued_s = 0.0

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, prompt_tokens: int, alone_s: float, queue_s: float, asked: bool) -> None:
        """A request was decided. alone_s: queue and prefill of the device at that moment."""
        tokens = max(1, prompt_tokens)
        self._seen.append((tokens, alone_s))
        self._tokens = self._tokens * KEPT_RATIO + tokens
        self._spent = self._spent * KEPT_RATIO + tokens * asked
        self._requests = self._requests * KEPT_RATIO + 1.0
        self._count = self._count * LOAD_KEPT_RATIO + 1.0
        self._queued_s = self._queued_s * LOAD_KEPT_RATIO + queue_s

    @property
    def spent_tokens(self) -> float:
        """Tokens that the server was asked for, older ones discounted."""
        return self._spent

    def spendable_ratio(self, budget_ratio: float) -> float:
        """The budget with what was saved or overspent so far, to be evened out over a quarter of the window."""
        owed = budget_ratio * self._tokens - self._spent
        window = sum(tokens for tokens, _ in self._seen)
        return (
            min(1.0, max(0.0, budget_ratio + 4.0 * owed / window)) if window and 0 < budget_ratio < 1 else budget_ratio
        )

    def overdrawn(self, budget_ratio: float) -> bool:
        """More was spent than the budget and a credit of some usual prompts: plans lag behind a burst."""
        credit = CREDIT_PROMPTS * self._tokens / self._requests if self._requests else 0.0
        return budget_ratio < 1.0 and self._spent > budget_ratio * self._tokens + credit

    def expected_ratio(self, ttft: Ecdf, plan: Worth) -> float:
        """Share of these requests' tokens that a plan asks the server for, in expectation."""
        spent, total = 0.0, 0
        for tokens, alone_s in self._seen:
            saved = value(ttft, tokens, alone_s)
            tie = saved == plan.least_value and alone_s <= plan.longest_s
            spent += tokens * (plan.ratio if tie else plan.asks(saved, alone_s, 1.0))
            total += tokens
        return spent / total if total else 0.0

    def worth(self, ttft: Ecdf, spendable_ratio: float, tail_ratio: float) -> Worth:
        """What spends `spendable_ratio` of these requests' tokens in expectation, `tail_ratio` of it for the tail."""
        total = sum(tokens for tokens, _ in self._seen)
        longest_s, tail = _longest(self._seen, min(tail_ratio, spendable_ratio) * total)
        left = spendable_ratio * total - tail
        ranked = sorted(((value(ttft, n, s), n) for n, s in self._seen if s <= longest_s), reverse=True)
        mean_queue_s = self._queued_s / self._count if self._count else 0.0
        for floor, alike in groupby(ranked, key=itemgetter(0)):
            at = sum(tokens for _, tokens in alike)
            if left < at:
                return Worth(floor, left / at, longest_s, mean_queue_s)
            left -= at
        return Worth(-inf, 1.0, longest_s, mean_queue_s)


def _longest(seen: Iterable[tuple[int, float]], tokens: float) -> tuple[float, float]:
    """(longest wait that the tail's budget leaves, tokens that the longer ones hold)."""
    spent = 0
    for alone_s, alike in groupby(sorted(((s, n) for n, s in seen), reverse=True), key=itemgetter(0)):
        at = sum(n for _, n in alike)
        if spent + at > tokens:
            return alone_s, spent
        spent += at
    return 0.0, spent
