"""What tokens cost: US dollars per million, checked against the slips that public gateways were bitten by.

A price typed per token where one per million is meant makes every budget look endless; the reverse blocks everybody.
Both are far outside what any vendor asks, so they are refused when the price is read.
"""

from __future__ import annotations

import math

from attrs import frozen

from protocol.errors import ConfigError

LEAST_USD_PER_MILLION = 0.001
MOST_USD_PER_MILLION = 2_000.0
"""Vendors ask from 0.01 to 600 dollars per million tokens; 0 means free."""

PROMPT_OVERHEAD_TOKENS = 16
"""Per request, for the template around a short prompt."""


@frozen
class Price:
    """Of one model at one target. cached: a prompt token that the vendor had in its cache; None: like any other."""

    usd_per_million_prompt_tokens: float = 0.0
    usd_per_million_completion_tokens: float = 0.0
    usd_per_million_cached_tokens: float | None = None

    @property
    def free(self) -> bool:
        return not (self.usd_per_million_prompt_tokens or self.usd_per_million_completion_tokens)

    def usd(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """What these tokens cost. cached_tokens: part of prompt_tokens."""
        cached = min(cached_tokens, prompt_tokens)
        per_cached = self.usd_per_million_cached_tokens
        if per_cached is None:
            per_cached = self.usd_per_million_prompt_tokens
        total = (
            (prompt_tokens - cached) * self.usd_per_million_prompt_tokens
            + cached * per_cached
            + completion_tokens * self.usd_per_million_completion_tokens
        )
        return total / 1e6


FREE = Price()


def check_price(price: Price, where: str) -> Price:
    """The price, when it can be one. Raises ConfigError that names the field under `where`."""
    for name in (
        "usd_per_million_prompt_tokens", "usd_per_million_completion_tokens", "usd_per_million_cached_tokens",
    ):  # fmt: skip
        value = getattr(price, name)
        if value:
            _check(value, f"{where}.{name}")
    return price


def _check(value: float, where: str) -> None:
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where} is {value}", next_step="give dollars per million tokens, 0 for free", field=where)
    if value < LEAST_USD_PER_MILLION:
        raise ConfigError(
            f"{where} is {value:g} dollars per million tokens, which looks like a price per token",
            next_step=f"if it is per token, write {value * 1e6:g}",
            field=where,
        )
    if value > MOST_USD_PER_MILLION:
        raise ConfigError(
            f"{where} is {value:g} dollars per million tokens, more than any vendor asks",
            next_step="check the unit: dollars, not cents, per million tokens",
            field=where,
        )


def most_prompt_tokens(prompt_bytes: int, messages: int = 1) -> int:
    """A bound that no byte-level tokenizer exceeds: one token a byte, and the template around each message.

    Money is held by this bound until the upstream's count is known.
    """
    return prompt_bytes + PROMPT_OVERHEAD_TOKENS * (1 + messages)
