"""Whether a failed request is sent again, and when: jitter, Retry-After with a cap, one budget per server. Pure.

The budget keeps retries from multiplying an outage: each first attempt earns a fraction of a retry, each retry spends
a whole one.
"""

from __future__ import annotations

from attrs import define, field, frozen

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""409 is a lock time-out at OpenAI; 52x are a CDN's words for a server that is away; 529 is Anthropic overloaded."""

FAILING_STATUSES = RETRIED_STATUSES - {409, 425, 429}
"""These speak of the server's health. A rate limit is about the key."""


@frozen
class RetryRules:
    """attempts: in all, the first included. base_s, longest_s: full jitter over base_s * 2^n, up to longest_s.

    retry_after_most_s: a server that asks for a longer wait is not waited for: another target answers meanwhile.
    budget_ratio: retries that a first attempt earns. budget_most: retries that may be saved up.
    """

    attempts: int = 3
    base_s: float = 0.2
    longest_s: float = 4.0
    retry_after_most_s: float = 10.0
    budget_ratio: float = 0.2
    budget_most: float = 10.0


@define
class RetryBudget:
    """Retries of all requests to one server. It begins full."""

    rules: RetryRules = field(factory=RetryRules)
    _saved: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._saved = self.rules.budget_most

    @property
    def saved(self) -> float:
        """Retries that could be spent now."""
        return self._saved

    def earned(self) -> None:
        """A first attempt goes out."""
        self._saved = min(self.rules.budget_most, self._saved + self.rules.budget_ratio)

    def spend(self) -> bool:
        """Take one retry; False when there is none left."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


def wait_s(rules: RetryRules, failed: int, retry_after_s: float | None, left_s: float, draw: float) -> float | None:
    """Seconds until the next attempt after `failed` failures, or None for no further one.

    retry_after_s: what the server asked for; it is never undercut, up to a tenth is added so that clients do not come
    back together. left_s: seconds until the request's deadline. draw: a random number in [0, 1).
    """
    if failed >= rules.attempts:
        return None
    if retry_after_s is not None:
        if retry_after_s > rules.retry_after_most_s:
            return None
        seconds = retry_after_s * (1.0 + 0.1 * draw)
    else:
        seconds = draw * min(rules.longest_s, rules.base_s * 2.0 ** min(16, failed - 1))
    return seconds if seconds < left_s else None
