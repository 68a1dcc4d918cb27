"""Prices: the arithmetic, and the slips of unit that are refused."""

from __future__ import annotations

import pytest

from gateway.prices import Price, check_price, most_prompt_tokens
from gateway.quotas import Quota, Tenant, check_tenant, nano_usd
from protocol.errors import BadRequest, ConfigError


def test_tokens_cost_their_price_per_million() -> None:
    price = Price(3.0, 15.0, 0.3)
    assert price.usd(1_000_000, 0) == 3.0
    assert price.usd(1000, 1000) == pytest.approx(0.018)
    assert price.usd(1000, 0, cached_tokens=1000) == pytest.approx(0.0003)
    assert Price(3.0, 15.0).usd(1000, 0, cached_tokens=1000) == pytest.approx(0.003)


def test_what_is_charged_is_rounded_up_once() -> None:
    assert nano_usd(Price(0.15, 0.6).usd(1, 1)) == 750
    assert nano_usd(0.1 + 0.2) == 300_000_000
    assert nano_usd(4e-10) == 1


@pytest.mark.parametrize("value", [1.5e-7, 0.0009, 2001.0, -1.0, float("nan"), float("inf")])
def test_a_price_in_another_unit_is_refused_by_its_name(value: float) -> None:
    with pytest.raises(ConfigError) as refused:
        check_price(Price(usd_per_million_prompt_tokens=value), "prices.gpt")
    assert refused.value.field == "prices.gpt.usd_per_million_prompt_tokens"
    assert refused.value.next_step


@pytest.mark.parametrize("value", [0.0, 0.001, 0.15, 600.0])
def test_prices_of_today_are_taken(value: float) -> None:
    price = Price(value, value, value)
    check_price(price, "prices.m")
    assert price.usd(1_000_000, 1_000_000) == pytest.approx(2 * value)


def test_the_step_out_of_a_price_per_token_names_the_number() -> None:
    with pytest.raises(ConfigError, match=r"write 0\.15"):
        check_price(Price(usd_per_million_completion_tokens=1.5e-7), "prices.m")


def test_a_bound_of_prompt_tokens_counts_bytes() -> None:
    assert most_prompt_tokens(1000, 2) == 1048


@pytest.mark.parametrize(
    ("tenant", "where"),
    [
        (Tenant("Acme"), "name"),
        (Tenant("a" * 64), "name"),
        (Tenant("a", quota=Quota(usd_per_day=-1.0)), "quota.usd_per_day"),
        (Tenant("a", quota=Quota(usd_per_month=float("nan"))), "quota.usd_per_month"),
        (Tenant("a", quota=Quota(max_concurrent=10**9)), "quota.max_concurrent"),
        (Tenant("a", alert_ratios=(1.5,)), "alert_ratios"),
        (Tenant("a", models=("m",) * 300), "models"),
    ],
)
def test_a_tenant_that_makes_no_sense_is_refused_by_field(tenant: Tenant, where: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_tenant(tenant)
    assert refused.value.field == where
