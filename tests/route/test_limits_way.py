"""Limits by the upstream's own ledger: many at once, clients that leave, faults, a kill, and two processes on Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fake_upstream import PROMPT_TOKENS, Ledger, serve_upstream
from benchmarks.limited_gateway import (
    MODEL,
    USD_PER_MILLION_IN,
    USD_PER_MILLION_OUT,
    GatewayProcess,
    GatewaySetup,
    limited_gateway,
    start_process,
)
from benchmarks.load import Connection, connect, request_bytes
from gateway.audit import verify
from tests.conftest import RedisServer

CAP_USD = 0.02
"""About eighty requests at once by their bound, two hundred by what they take."""


def spent_usd(ledgers: Sequence[Ledger]) -> float:
    """What the upstream would send a bill for: every prompt it took, every piece it sent."""
    seen = [one for ledger in ledgers for one in ledger.seen]
    return sum(PROMPT_TOKENS * USD_PER_MILLION_IN + one.pieces * USD_PER_MILLION_OUT for one in seen) / 1e6


def ask(number: int, words: str = "tokens=8 rate=100", tenant: str = "acme", **more: Any) -> bytes:
    document = {
        "model": MODEL, "messages": [{"role": "user", "content": f"n={number} {words}"}], "max_tokens": 20, **more,
    }  # fmt: skip
    headers = [("authorization", f"Bearer key-{tenant}")]
    return request_bytes("/v1/chat/completions", json.dumps(document).encode(), headers)


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[tuple[int, Ledger]]:
    port, ledger, stop = await serve_upstream()
    try:
        yield port, ledger
    finally:
        stop()
        await asyncio.sleep(0)


class Clients:
    """Keep-alive connections to one or two gateways."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = ports
        self.statuses: list[int] = []
        self.codes: set[str] = set()
        self._asked = 0

    async def burst(self, count: int, words: str = "tokens=8 rate=100", **more: Any) -> list[int]:
        """That many requests at the same moment; status 0: no answer."""
        connections: list[Connection | BaseException] = await asyncio.gather(
            *(connect(self.ports[number % len(self.ports)]) for number in range(count)), return_exceptions=True
        )
        opened = [one for one in connections if isinstance(one, Connection)]
        asked = [self._ask(one, words, more) for one in opened]
        found = await asyncio.gather(*asked)
        self.statuses += found
        for one in opened:
            one.close()
        await asyncio.sleep(0.05)
        return found

    async def _ask(self, connection: Connection, words: str, more: dict[str, Any]) -> int:
        self._asked += 1
        try:
            answer = await connection.ask(ask(self._asked, words, **more))
        except OSError:
            return 0
        status = int(answer[9:12])
        if status == 429:
            self.codes.add(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])
        return status


def setup(folder: Path, upstream_port: int, **more: Any) -> GatewaySetup:
    return GatewaySetup(str(folder), upstream_port, quotas={"acme": {"usd_per_day": CAP_USD}, "other": {}}, **more)


async def spend_all(clients: Clients, ledger: Ledger, count: int = 80) -> None:
    """Bursts until nothing is admitted any more."""
    empty = 0
    for _ in range(20):
        found = await clients.burst(count)
        assert spent_usd([ledger]) <= CAP_USD
        empty = empty + 1 if 200 not in found else 0
        if empty == 2:
            return
        await asyncio.sleep(0.6 * empty)  # what is given back is seen again after half a second
    raise AssertionError("the budget never ended")


async def test_five_hundred_at_once_never_pass_the_cap_and_nothing_stays_reserved(tmp_path: Path) -> None:
    async with upstream() as (upstream_port, ledger), limited_gateway(setup(tmp_path, upstream_port)) as (port, limits):
        clients = Clients([port])
        first = await clients.burst(500, "tokens=8 first=2")  # all of them ask before the first one has its answer
        assert 60 <= first.count(200) <= 80 and first.count(429) == 500 - first.count(200)
        assert clients.codes == {"budget_exceeded"}
        await clients.burst(10, "tokens=8", stream=True)
        left = [await connect(port) for _ in range(6)]
        for number, one in enumerate(left):  # clients that leave in the middle
            waiting = one.ask(ask(10_000 + number, "tokens=20 rate=50", stream=number % 2 == 0))
            waiting.add_done_callback(lambda done: done.exception())
        await asyncio.sleep(0.1)
        for one in left:
            one.abort()
        await spend_all(clients, ledger)
        assert limits.reserved("acme") == {"day": 0, "places": 0}
        assert spent_usd([ledger]) > CAP_USD * 0.7
        assert (await clients.burst(5, tenant="other")).count(200) == 5, "another tenant does not notice"


@pytest.mark.parametrize("fault", ["cut=3", "status=503", "fail=4", "garble=2"])
async def test_answers_that_fail_are_paid_at_most_and_leave_nothing_reserved(tmp_path: Path, fault: str) -> None:
    async with upstream() as (upstream_port, ledger), limited_gateway(setup(tmp_path, upstream_port)) as (port, limits):
        clients = Clients([port])
        for stream in (False, True):
            for _ in range(3):
                await clients.burst(60, f"tokens=20 {fault}", stream=stream)
        assert spent_usd([ledger]) <= CAP_USD
        assert limits.reserved("acme") == {"day": 0, "places": 0}
        assert 0 not in clients.statuses and ledger.requests >= 5


async def test_a_kill_in_the_middle_forfeits_and_never_passes_the_cap(tmp_path: Path) -> None:
    async with upstream() as (upstream_port, ledger):
        gateway = await asyncio.to_thread(start_process, setup(tmp_path, upstream_port))
        clients = Clients([gateway.port])
        running = asyncio.create_task(clients.burst(500, "tokens=20 rate=20"))
        async with asyncio.timeout(10):
            while sum(one.pieces for one in ledger.seen) < 200:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(gateway.kill)
        found = await running
        assert found.count(0) >= 50, "killed while answers ran"
        again = await asyncio.to_thread(start_process, setup(tmp_path, upstream_port))
        try:
            clients.ports = [again.port]
            await spend_all(clients, ledger)
        finally:
            await asyncio.to_thread(again.stop)
        assert spent_usd([ledger]) <= CAP_USD
    assert verify(tmp_path / "audit").fault is None


async def test_places_of_a_killed_process_are_free_for_the_next(tmp_path: Path) -> None:
    async with upstream() as (upstream_port, ledger):
        wish = GatewaySetup(str(tmp_path), upstream_port, quotas={"acme": {"max_concurrent": 10}})
        gateway = await asyncio.to_thread(start_process, wish)
        clients = Clients([gateway.port])
        running = asyncio.create_task(clients.burst(30, "tokens=2 first=6"))  # held by the upstream until the kill
        async with asyncio.timeout(10):
            while len(ledger.seen) < 10:
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # the others have been refused by now
        await asyncio.to_thread(gateway.kill)
        assert (await running).count(429) == 20 and len(ledger.seen) == 10
        again = await asyncio.to_thread(start_process, wish)
        try:
            clients.ports = [again.port]
            assert (await clients.burst(10, "tokens=2")).count(200) == 10
        finally:
            await asyncio.to_thread(again.stop)


async def test_two_processes_on_redis_share_one_cap_even_if_one_is_killed(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with upstream() as (upstream_port, ledger):
        wishes = [setup(tmp_path / name, upstream_port, redis=redis_server.url) for name in ("a", "b")]
        gateways: list[GatewayProcess] = [await asyncio.to_thread(start_process, wish) for wish in wishes]
        try:
            clients = Clients([gateway.port for gateway in gateways])
            first = await clients.burst(500, "tokens=8 first=2")
            assert 40 <= first.count(200) <= 80 and clients.codes == {"budget_exceeded"}
            assert spent_usd([ledger]) <= CAP_USD
            running = asyncio.create_task(clients.burst(200, "tokens=20 rate=20"))
            await asyncio.sleep(0.4)
            await asyncio.to_thread(gateways.pop(0).kill)
            await running
            clients.ports = [gateways[0].port]
            await spend_all(clients, ledger)
        finally:
            for gateway in gateways:
                await asyncio.to_thread(gateway.stop)
        assert CAP_USD * 0.3 < spent_usd([ledger]) <= CAP_USD


@pytest.mark.parametrize(
    "limit",
    [
        "max_concurrent",
        pytest.param("requests_per_s", marks=pytest.mark.slow),
        pytest.param("tokens_per_min", marks=pytest.mark.slow),
    ],
)
async def test_two_processes_do_not_double_a_limit(tmp_path: Path, limit: str) -> None:
    """Counters of each worker multiplied every limit by the number of workers."""
    most = {"requests_per_s": 10.0, "max_concurrent": 10, "tokens_per_min": 400}[limit]
    async with upstream() as (upstream_port, ledger):
        wish = GatewaySetup(str(tmp_path), upstream_port, quotas={"acme": {limit: most}})
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:  # one ledger, an audit for each
            folder.mkdir()
            (folder / "ledger").symlink_to(tmp_path / "ledger")
        (tmp_path / "ledger").mkdir()
        started = [
            await asyncio.to_thread(start_process, GatewaySetup(str(f), upstream_port, quotas=wish.quotas))
            for f in folders
        ]
        try:
            clients = Clients([one.port for one in started])
            await clients.burst(60, "tokens=4 first=0.3")
            admitted = len(ledger.seen)
            assert clients.codes == {"rate_limit_exceeded"}
        finally:
            for one in started:
                await asyncio.to_thread(one.stop)
    # A prompt of this kind is estimated at 9 tokens; 20 more may be answered.
    assert {"requests_per_s": 8, "max_concurrent": 8, "tokens_per_min": 8}[limit] <= admitted
    assert admitted <= {"requests_per_s": 20, "max_concurrent": 10, "tokens_per_min": 16}[limit]
