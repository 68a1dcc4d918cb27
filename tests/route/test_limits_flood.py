"""A flood from one key: it spends no more than its cap, and another tenant hardly notices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.fake_upstream import serve_upstream
from benchmarks.limited_gateway import GatewaySetup, limited_gateway
from benchmarks.limits_flood import CAP_USD, FULL, Plan, flood, measure, spent_usd


async def test_a_flood_of_identical_requests_spends_no_more_than_its_cap(tmp_path: Path) -> None:
    port, ledger, stop = await serve_upstream()
    setup = GatewaySetup(str(tmp_path), port, quotas={"flood": {"usd_per_day": CAP_USD / 10, "max_concurrent": 32}})
    try:
        async with limited_gateway(setup) as (gateway_port, limits):
            statuses = await flood(gateway_port, 2000, 2.0)
            assert statuses["200"] + statuses["429"] == 2000
            assert statuses["200"] >= 10
            assert 0 < spent_usd(ledger, "flood") <= CAP_USD / 10
            assert set(limits.reserved("flood").values()) == {0}
    finally:
        stop()
        await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.alone
async def test_thirty_thousand_in_twenty_seconds_leave_another_tenant_alone() -> None:
    """P99 beside the flood against P99 in calm, in one run, by answers that take the upstream 0.2 s."""
    found = await measure(Plan(FULL.requests, FULL.flood_s, 6.0, 1))
    assert found.spent_usd <= found.cap_usd
    (one,) = found.rounds
    assert one.statuses["200"] + one.statuses["429"] == FULL.requests
    assert one.flood_p99_ms <= 1.5 * one.calm_p99_ms
