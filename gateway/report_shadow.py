"""The difference report of shadow mode: both paths side by side, by intent, level and model; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

MAX_ROWS = 200
"""Groups told apart; the rest is `other`."""

Group = tuple[str, str, str]
"""Intent, level of routing, model of the delivered answer."""

COLUMNS = (
    "intent", "level", "model", "requests", "failed", "alike_ratio", "similarity_ratio", "old_ttft_s", "other_ttft_s",
    "old_usd", "other_usd", "old_tokens", "other_tokens",
)  # fmt: skip


@define
class Side:
    """Sums over one path's answers."""

    usd: float = 0.0
    tokens: int = 0
    ttft_s: float = 0.0
    ttfts: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        self.usd += float(row["usd"])
        self.tokens += int(row["tokens"])
        if row["ttft_s"] is not None:
            self.ttft_s += float(row["ttft_s"])
            self.ttfts += 1

    @property
    def mean_ttft_s(self) -> float | None:
        return self.ttft_s / self.ttfts if self.ttfts else None


@define
class Differences:
    """Sums over shadows of one group, or of all. failed: the other path gave no whole answer."""

    requests: int = 0
    failed: int = 0
    alike: int = 0
    similarity: float = 0.0
    old: Side = field(factory=Side)
    other: Side = field(factory=Side)

    def add(self, row: Mapping[str, Any]) -> None:
        """One line of the audit of kind `shadow`."""
        self.requests += 1
        self.alike += bool(row["alike"])
        if row["similarity_ratio"] is None:
            self.failed += 1
        else:
            self.similarity += float(row["similarity_ratio"])
        self.old.add(row["old"])
        self.other.add(row["other"])

    @property
    def answered(self) -> int:
        """Shadows that there is something to compare of."""
        return self.requests - self.failed

    @property
    def alike_ratio(self) -> float | None:
        return self.alike / self.answered if self.answered else None

    @property
    def similarity_ratio(self) -> float | None:
        return self.similarity / self.answered if self.answered else None


@define
class ShadowReport:
    """All shadows of a log, and by group."""

    total: Differences = field(factory=Differences)
    groups: dict[Group, Differences] = field(factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        """One line of the audit of kind `shadow`."""
        group = (str(row["intent"] or "unknown"), str(row["level"]), str(row["old"]["model"]))
        if group not in self.groups and len(self.groups) >= MAX_ROWS:
            group = ("other", "other", "other")
        self.total.add(row)
        self.groups.setdefault(group, Differences()).add(row)

    def rows(self) -> Sequence[Mapping[str, str | int | float | None]]:
        """The table by COLUMNS, groups with most shadows first."""
        ordered = sorted(self.groups.items(), key=lambda item: (-item[1].requests, item[0]))
        return [dict(zip(COLUMNS, (*group, *_values(found)), strict=True)) for group, found in ordered]


def _values(found: Differences) -> tuple[int | float | None, ...]:
    old, other = found.old, found.other
    return (
        found.requests, found.failed, found.alike_ratio, found.similarity_ratio, old.mean_ttft_s, other.mean_ttft_s,
        old.usd, other.usd, old.tokens, other.tokens,
    )  # fmt: skip
