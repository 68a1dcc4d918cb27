"""Statistics over the audit's requests: who answered, what it cost, how soon, how steadily; pure.

"All cloud" is what the same tokens would have cost at the prices that paid targets took in the same records, or at
prices that are given. Stability is the share of answers that ended well, and how much the mean TTFT moves from one
period to the next.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from gateway.report_shadow import ShadowReport

HOUR_S = 3600.0
MAX_TTFTS = 200_000
"""TTFTs kept for quantiles; a longer log counts on in sums."""

MAX_NAMES = 100
"""Targets, models, tenants and reasons told apart; the rest is `other`."""


@frozen
class Prices:
    """Dollars per token for the all-cloud comparison; None: taken from what was paid."""

    usd_per_prompt_token: float | None = None
    usd_per_completion_token: float | None = None


@define
class Period:
    """One stretch of time."""

    begins_s: float
    requests: int = 0
    failed: int = 0
    usd: float = 0.0
    own_tokens: int = 0
    paid_tokens: int = 0
    ttft_sum_s: float = 0.0
    ttft_count: int = 0

    @property
    def mean_ttft_s(self) -> float | None:
        return self.ttft_sum_s / self.ttft_count if self.ttft_count else None


@define
class Report:
    """Sums over all requests of a log; see the properties for what is made of them."""

    period_s: float = HOUR_S
    requests: int = 0
    ended: Counter[str] = field(factory=Counter)
    by_tenant: Counter[str] = field(factory=Counter)
    by_model: Counter[str] = field(factory=Counter)
    by_level: Counter[str] = field(factory=Counter)
    tokens_by_target: Counter[str] = field(factory=Counter)
    usd_by_target: dict[str, float] = field(factory=dict)
    found: Counter[str] = field(factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    saved_tokens: int = 0
    usd: float = 0.0
    paid_prompt_tokens: int = 0
    paid_completion_tokens: int = 0
    cached: int = 0
    handed_over: int = 0
    redacted: int = 0
    local_only: int = 0
    shadow: ShadowReport = field(factory=ShadowReport)
    ttfts_s: list[float] = field(factory=list)
    periods: dict[int, Period] = field(factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        """One line of the audit; lines of other kinds than `invocation` and `shadow` are passed over."""
        if row.get("kind") == "shadow" and "too_long" not in row:
            self.shadow.add(row)
        if row.get("kind") != "invocation" or "too_long" in row:
            return
        self.requests += 1
        _count(self.ended, str(row["status"]))
        _count(self.by_tenant, str(row["tenant"]))
        _count(self.by_model, str(row["model"]))
        _count(self.by_level, str(row["level"]))
        for kind, number in row.get("found", {}).items():
            _count(self.found, str(kind), int(number))
        self.redacted += bool(row["redacted"])
        self.local_only += bool(row["local_only"])
        self.saved_tokens += int(row["saved_tokens"])
        self._add_answer(row, self._period(float(row["at_s"])))

    def _period(self, at_s: float) -> Period:
        number = int(at_s // self.period_s)
        return self.periods.setdefault(number, Period(number * self.period_s))

    def _add_answer(self, row: Mapping[str, Any], period: Period) -> None:
        sides = [(str(name), int(tokens)) for name, tokens in row["sides"]]
        usd, paid = float(row["usd"]), float(row["usd"]) > 0
        tokens = sum(count for _, count in sides)
        self.cached += bool(row["cached"])
        self.handed_over += len({name for name, _ in sides}) > 1
        self.prompt_tokens += int(row["prompt_tokens"])
        self.completion_tokens += int(row["completion_tokens"])
        self.usd += usd
        for name, count in sides:
            _count(self.tokens_by_target, name, count)
        if paid and len(sides) == 1:
            self.paid_prompt_tokens += int(row["prompt_tokens"])
            self.paid_completion_tokens += int(row["completion_tokens"])
            self.usd_by_target[sides[0][0]] = self.usd_by_target.get(sides[0][0], 0.0) + usd
        period.requests += 1
        period.failed += row["status"] not in ("ok", "cancelled")
        period.usd += usd
        period.paid_tokens += tokens if paid else 0
        period.own_tokens += 0 if paid else tokens
        ttft_s = row["ttft_s"]
        if ttft_s is not None:
            period.ttft_sum_s += float(ttft_s)
            period.ttft_count += 1
            if len(self.ttfts_s) < MAX_TTFTS:
                self.ttfts_s.append(float(ttft_s))

    @property
    def own_share(self) -> float | None:
        """Share of answer tokens that cost nothing: the device, this machine's own models, the cache."""
        own = sum(period.own_tokens for period in self.periods.values())
        paid = sum(period.paid_tokens for period in self.periods.values())
        return own / (own + paid) if own + paid else None

    @property
    def mean_ttft_s(self) -> float | None:
        count = sum(period.ttft_count for period in self.periods.values())
        return sum(period.ttft_sum_s for period in self.periods.values()) / count if count else None

    def ttft_quantile_s(self, share: float) -> float | None:
        """Nearest rank over the kept TTFTs."""
        ordered = sorted(self.ttfts_s)
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else None

    def all_cloud_usd(self, prices: Prices) -> float | None:
        """What every prompt and answer token would have cost at a paid target; None while no price is known."""
        if prices.usd_per_prompt_token is not None and prices.usd_per_completion_token is not None:
            return (
                self.prompt_tokens * prices.usd_per_prompt_token
                + self.completion_tokens * prices.usd_per_completion_token
            )
        paid_tokens = self.paid_prompt_tokens + self.paid_completion_tokens
        if not paid_tokens:
            return None
        usd_per_token = sum(self.usd_by_target.values()) / paid_tokens
        return usd_per_token * (self.prompt_tokens + self.completion_tokens)

    @property
    def ttft_moves_ratio(self) -> float | None:
        """Standard deviation of the periods' mean TTFTs over their mean; None with fewer than two periods."""
        means = [period.mean_ttft_s for period in self.periods.values() if period.mean_ttft_s is not None]
        mean_s = statistics.fmean(means) if means else 0.0
        return statistics.pstdev(means) / mean_s if len(means) > 1 and mean_s else None

    def headline(self, prices: Prices) -> dict[str, float | int | None]:
        """The numbers at the top, by name with unit."""
        all_cloud_usd = self.all_cloud_usd(prices)
        ok = self.ended["ok"] + self.ended["cancelled"]
        return {
            "requests": self.requests,
            "own_tokens_ratio": self.own_share,
            "cost_usd": self.usd,
            "all_cloud_usd": all_cloud_usd,
            "saved_ratio": 1 - self.usd / all_cloud_usd if all_cloud_usd else None,
            "mean_ttft_s": self.mean_ttft_s,
            "p50_ttft_s": self.ttft_quantile_s(0.5),
            "p99_ttft_s": self.ttft_quantile_s(0.99),
            "cache_hit_ratio": _ratio(self.cached, self.requests),
            "handed_over_ratio": _ratio(self.handed_over, self.requests),
            "failed_ratio": _ratio(self.requests - ok, self.requests),
            "ttft_moves_ratio": self.ttft_moves_ratio,
            "compression_saved_tokens": self.saved_tokens,
            "redacted_ratio": _ratio(self.redacted, self.requests),
            "local_only_ratio": _ratio(self.local_only, self.requests),
            "shadow_requests": self.shadow.total.requests,
            "shadow_agreement_ratio": self.shadow.total.alike_ratio,
            "shadow_cost_usd": self.shadow.total.other.usd,
        }


def summarise(rows: Iterable[Mapping[str, Any]], period_s: float = HOUR_S) -> Report:
    """A report over the lines of an audit."""
    report = Report(period_s)
    for row in rows:
        report.add(row)
    return report


def series(report: Report) -> Sequence[Period]:
    """Periods in order of time; those without a request are absent."""
    return [report.periods[number] for number in sorted(report.periods)]


def _count(counter: Counter[str], name: str, number: int = 1) -> None:
    counter[name if name in counter or len(counter) < MAX_NAMES else "other"] += number


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
