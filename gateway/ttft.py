"""What is known of a target's time to first token (TTFT): a sliding window, and its distribution. Pure.

Failures and time-outs are mass at infinity. A race that the other side won says only that this side took longer: such
samples are censored, and the Kaplan-Meier estimate gives their mass to what came later. Without it a server whose slow
answers were always beaten by the device would look quick.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil, inf, isfinite
from typing import Protocol

from attrs import field, frozen

WINDOW = 256
"""Requests remembered of one target and model."""

SERVER_PRIOR_S = (0.25, 0.35, 0.5, 0.7, 1.0, 1.5, 3.0, 8.0)
"""Stands for a server that nobody has asked yet: hosted services of 2023-24 had medians of 0.2-1.7 s and tails of
1-70 s. Each real sample displaces one of these."""


class Distribution(Protocol):
    """Of TTFTs: F with a possible mass at infinity."""

    @property
    def samples(self) -> int:
        """Requests it is made of."""
        ...

    @property
    def last_s(self) -> float:
        """The largest finite value; 0 without one."""
        ...

    def at(self, seconds: float) -> float:
        """F: share of requests that had their first token within `seconds`."""
        ...

    def quantile_s(self, ratio: float) -> float:
        """The smallest value that at least `ratio` of the requests kept; infinite where too many failed."""
        ...


def rank(ratio: float, count: int) -> int:
    """The least k >= 1 with k / count >= ratio, exact in floats: every path of planning uses this one.

    >>> rank(0.95, 100), rank(0.0, 10), rank(1.0, 3)
    (95, 1, 3)
    """
    k = max(1, ceil(ratio * count))
    while k > 1 and (k - 1) / count >= ratio:
        k -= 1
    while k / count < ratio:
        k += 1
    return k


@frozen
class Ecdf:
    """A step function: F(values_s[i]) == at_most[i], values ascending and finite; what is missing to 1 never came.

    areas_s[i]: E[min(S, values_s[i])].
    """

    values_s: tuple[float, ...] = ()
    at_most: tuple[float, ...] = ()
    samples: int = 0
    areas_s: tuple[float, ...] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        areas, total, before, reached = [], 0.0, 0.0, 0.0
        for seconds, share in zip(self.values_s, self.at_most, strict=True):
            total += (seconds - before) * (1.0 - reached)
            areas.append(total)
            before, reached = seconds, share
        object.__setattr__(self, "areas_s", tuple(areas))

    @property
    def last_s(self) -> float:
        """The largest finite value; 0 without one."""
        return self.values_s[-1] if self.values_s else 0.0

    @property
    def failed_ratio(self) -> float:
        """Mass at infinity."""
        return 1.0 - self.at_most[-1] if self.at_most else float(self.samples > 0)

    def at(self, seconds: float) -> float:
        """F(seconds); 0 without samples."""
        place = bisect_right(self.values_s, seconds)
        return self.at_most[place - 1] if place else 0.0

    def quantile_s(self, ratio: float) -> float:
        """The smallest value with F >= ratio, infinite where F never gets there or nothing is known."""
        place = bisect_left(self.at_most, ratio)
        return self.values_s[place] if place < len(self.values_s) else inf

    def mean_within_s(self, bound_s: float) -> float:
        """E[min(S, bound_s)]: what a request waits on average if something else speaks after `bound_s` seconds."""
        place = bisect_right(self.values_s, bound_s)
        if not place:
            return bound_s
        missing = 1.0 - self.at_most[place - 1]
        return self.areas_s[place - 1] + ((bound_s - self.values_s[place - 1]) * missing if missing > 0 else 0.0)


def ecdf(values_s: Iterable[float]) -> Ecdf:
    """The plain empirical distribution; infinite values are failures."""
    ordered = sorted(values_s)
    finite = [value for value in ordered if isfinite(value)]
    return _steps(finite, (), len(ordered) - len(finite))


def _steps(seen_s: Sequence[float], outlasted_s: Sequence[float], failures: int) -> Ecdf:
    """Kaplan-Meier over ascending `seen_s` and `outlasted_s`; failures are at risk for ever.

    Without censored samples F is the count over the number of samples, to the last bit.
    """
    count = len(seen_s) + len(outlasted_s) + failures
    values: list[float] = []
    at_most: list[float] = []
    alive, place = 1.0, 0
    while place < len(seen_s):
        value = seen_s[place]
        after = bisect_right(seen_s, value, place)
        if outlasted_s:
            at_risk = count - place - bisect_left(outlasted_s, value)
            alive *= 1.0 - (after - place) / at_risk
            share = 1.0 - alive
        else:
            share = after / count
        values.append(value)
        at_most.append(share)
        place = after
    return Ecdf(tuple(values), tuple(at_most), count)


class TtftWindow:
    """The last `limit` requests, kept in order: adding one costs a search and a short move.

    `prior_s` stands in at first and goes sample by sample as real ones come.
    """

    def __init__(self, limit: int = WINDOW, prior_s: Sequence[float] = ()) -> None:
        self._limit = limit
        self._order: deque[tuple[float, bool]] = deque()
        self._seen: list[float] = []
        self._outlasted: list[float] = []
        self._failures = 0
        self._known: Ecdf | None = None
        self._priors = 0
        for value in prior_s:
            self._put(value, censored=False)
        self._priors = len(self._order)

    @property
    def samples(self) -> int:
        """Requests it is made of, the prior's included."""
        return len(self._order)

    @property
    def observed(self) -> int:
        """Real requests among them."""
        return len(self._order) - self._priors

    @property
    def last_s(self) -> float:
        """The largest finite value; 0 without one."""
        return self._seen[-1] if self._seen else 0.0

    @property
    def failed_ratio(self) -> float:
        """Mass at infinity."""
        if self._outlasted:
            return self.ecdf().failed_ratio
        return 1.0 - len(self._seen) / len(self._order) if self._order else 0.0

    def add(self, ttft_s: float) -> None:
        """A request had its first token after `ttft_s`; infinite: it failed or was given up."""
        self._put(ttft_s, censored=False)
        self._bound()

    def outlasted(self, elapsed_s: float) -> None:
        """A request was cancelled after `elapsed_s`, when it had not spoken yet."""
        self._put(elapsed_s, censored=True)
        self._bound()

    def at(self, seconds: float) -> float:
        """F(seconds)."""
        if self._outlasted:
            return self.ecdf().at(seconds)
        return bisect_right(self._seen, seconds) / len(self._order) if self._order else 0.0

    def quantile_s(self, ratio: float) -> float:
        """The smallest value with F >= ratio; infinite where F never gets there or nothing is known."""
        if self._outlasted:
            return self.ecdf().quantile_s(ratio)
        place = rank(ratio, len(self._order)) if self._order else 1
        return self._seen[place - 1] if place <= len(self._seen) else inf

    def ecdf(self) -> Ecdf:
        """The distribution as it stands; made once after each change."""
        if self._known is None:
            self._known = _steps(self._seen, self._outlasted, self._failures)
        return self._known

    def _put(self, value: float, *, censored: bool) -> None:
        self._order.append((value, censored))
        if censored:
            insort(self._outlasted, value)
        elif isfinite(value):
            insort(self._seen, value)
        else:
            self._failures += 1
        self._known = None

    def _bound(self) -> None:
        """Forget one sample for the one that came: a prior's first, else the oldest over the limit."""
        if self._priors:
            self._priors -= 1
        elif len(self._order) <= self._limit:
            return
        value, censored = self._order.popleft()
        if not censored and not isfinite(value):
            self._failures -= 1
            return
        ordered = self._outlasted if censored else self._seen
        del ordered[bisect_left(ordered, value)]
