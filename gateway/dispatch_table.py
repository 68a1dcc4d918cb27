"""The plan that dispatch follows, made from prompt lengths, TTFTs and a budget. Pure.

DiSCo (arXiv 2502.11417) limits the dear side to a share b of all prompt tokens. Its two forms, as docs/dispatch.md
reconstructs them:

- device-constrained: the server starts at once, the device after w(l). First alpha of the budget protects the tail (no
  prompt waits longer than the (1 - alpha)-quantile of F); what is left starts the device at once for short prompts.
- server-constrained: prompts up to l_th on the device alone, longer ones on both.

In both the prompts of the boundary length are divided by chance to the exact fraction, so that the expected spending
meets the budget and ties never overshoot it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import Literal

from attrs import frozen

from gateway.dispatch_lengths import Lengths
from gateway.dispatch_values import Worth
from gateway.ttft import Distribution

Regime = Literal["device_constrained", "server_constrained"]

EVERY_LENGTH = 1 << 62
"""As a boundary: every prompt is shorter."""


@frozen
class DispatchTable:
    """What decides a request's starts; whole plans are four numbers.

    boundary_tokens, boundary_ratio: prompts below the boundary are short, and of those that lie on it this share.
    tail_wait_s: the device waits this long for the server with a prompt that is not short (device-constrained), or
        beside a server that was asked while the device is wanted by others (server-constrained).
    protected_ratio: share of those prompts for which it starts at all; below 1 only where the server fails more often
        than the budget can pay for.
    worth: takes the boundary's place where the device's queue is known (server-constrained only).
    """

    regime: Regime
    budget_ratio: float
    boundary_tokens: int
    boundary_ratio: float = 0.0
    tail_wait_s: float = inf
    protected_ratio: float = 0.0
    worth: Worth | None = None

    def short(self, prompt_tokens: int, draw: float) -> bool:
        """Whether a prompt counts as short. draw: uniform in [0, 1)."""
        if prompt_tokens == self.boundary_tokens:
            return draw < self.boundary_ratio
        return prompt_tokens < self.boundary_tokens

    def device_wait_s(self, prompt_tokens: int, draw: float) -> float:
        """w(l): when the device starts unless the server has spoken; infinite: never by plan."""
        if self.regime == "server_constrained" or self.short(prompt_tokens, draw):
            return 0.0
        return self.tail_wait_s if draw < self.protected_ratio else inf

    def server_starts(self, prompt_tokens: int, draw: float) -> bool:
        """Whether the server is asked at once; otherwise only if the device fails."""
        return self.regime == "device_constrained" or not self.short(prompt_tokens, draw)


def make_table(
    regime: Regime, lengths: Lengths, ttft: Distribution, budget_ratio: float, tail_ratio: float
) -> DispatchTable:
    """The plan of either regime. `ttft` is the server's; `tail_ratio` (alpha) matters device-constrained only."""
    if regime == "server_constrained":
        return server_table(lengths, budget_ratio)
    return device_table(lengths, ttft, budget_ratio, tail_ratio)


def device_table(lengths: Lengths, ttft: Distribution, budget_ratio: float, tail_ratio: float) -> DispatchTable:
    """w(l) with E[l * (device starts)] == budget_ratio * E[l], as far as all prompts at once do not cost less.

    The tail takes alpha' = min(max(alpha, share of failures), b): a server that fails more often than alpha needs that
    much to be covered at all. Of n samples, n + 1 gaps are equally likely for the next one, so that F is taken times
    n / (n + 1): what is still to come would overspend by one in n + 1 otherwise.
    """
    if budget_ratio <= 0:
        return DispatchTable("device_constrained", 0.0, 0)
    unseen = ttft.samples / (ttft.samples + 1)
    failed = 1.0 - ttft.at(ttft.last_s) * unseen
    tail = min(max(tail_ratio, failed), budget_ratio)
    wait_s = ttft.quantile_s(min(1.0, (1.0 - tail) / unseen)) if ttft.samples else inf
    if not isfinite(wait_s):
        # Rounding of 1 - tail, or failures beyond the budget: the last value seen is the best there is.
        wait_s = ttft.last_s
    late = 1.0 - ttft.at(wait_s) * unseen
    protected = min(1.0, budget_ratio / late) if late > 0 else 1.0
    spent = late * protected
    # Starting at once instead of at the tail costs a prompt's tokens whenever the server would have spoken by then.
    tokens = lengths.total_tokens * (budget_ratio - spent) / (1.0 - spent) if spent < 1.0 else inf
    boundary, ratio = _boundary(lengths, tokens)
    return DispatchTable("device_constrained", budget_ratio, boundary, ratio, wait_s, protected)


def server_table(lengths: Lengths, budget_ratio: float) -> DispatchTable:
    """l_th: prompts that hold 1 - b of all tokens, shortest first, stay on the device."""
    boundary, ratio = _boundary(lengths, lengths.total_tokens * (1.0 - budget_ratio))
    return DispatchTable("server_constrained", budget_ratio, boundary, ratio)


def _boundary(lengths: Lengths, tokens: float) -> tuple[int, float]:
    """(length, share of its prompts): ascending prompts up to there hold exactly `tokens` tokens."""
    if tokens >= lengths.total_tokens:
        return EVERY_LENGTH, 0.0
    length, below, at = lengths.upto(max(0.0, tokens))
    return length, min(1.0, max(0.0, tokens - below) / at)


def spent_ratio(table: DispatchTable, counts: Iterable[tuple[int, int]], ttft: Distribution) -> float:
    """Expected share of prompt tokens that the constrained side prefills.

    counts: (length, prompts). The server's TTFT is taken as independent of the length.
    """
    late = 1.0 - ttft.at(table.tail_wait_s)
    spent, total = 0.0, 0
    for length, count in counts:
        short = table.boundary_ratio if length == table.boundary_tokens else float(length < table.boundary_tokens)
        if table.regime == "server_constrained":
            share = 1.0 - short
        else:
            share = short + (1.0 - short) * table.protected_ratio * late
        spent += length * count * share
        total += length * count
    return spent / total if total else 0.0
