"""One key floods a gateway with identical requests: what it can spend, and what another tenant notices of it.

30,000 identical requests come in 20 seconds with one key whose budget is 2 cents a day. Meanwhile another tenant asks
20 times a second for answers that take the upstream a fifth of a second. The gateway is a process of its own, so is the
flood; the upstream's own ledger tells what was spent. Calm times lie before and after each flood, in one run.

    python -m benchmarks.limits_flood --json flood.json
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import define, field, frozen

from benchmarks.fake_upstream import PROMPT_TOKENS, Ledger, serve_upstream
from benchmarks.limited_gateway import (
    MODEL,
    USD_PER_MILLION_IN,
    USD_PER_MILLION_OUT,
    GatewaySetup,
    start_process,
)
from benchmarks.load import Connection, connect, request_bytes
from benchmarks.report import arguments, percentile, publish, spread

CAP_USD = 0.02
FLOOD_CONNECTIONS = 64
OTHER_PER_S = 20.0
OTHER_WORDS = "tokens=4 first=0.2"
FLOOD_WORDS = "n=flood tokens=8 first=0.2"
SETTLE_S = 2.0


@frozen
class Plan:
    """requests in flood_s seconds, with calm_s seconds before and after, rounds times."""

    requests: int
    flood_s: float
    calm_s: float
    rounds: int


FULL = Plan(30_000, 20.0, 12.0, 3)
QUICK = Plan(6_000, 4.0, 6.0, 2)


@define
class Round:
    """One flood. p99s in milliseconds; statuses of the flood's answers."""

    calm_p99_ms: float
    flood_p99_ms: float
    flood_s: float
    statuses: dict[str, int] = field(factory=dict)


@frozen
class Outcome:
    """spent_usd: by the upstream's ledger, the flooding key alone."""

    rounds: Sequence[Round]
    spent_usd: float
    cap_usd: float


def chat(words: str, tenant: str) -> bytes:
    """One request; identical ones are identical to the byte."""
    turn = {"role": "user", "content": words}
    body = json.dumps({"model": MODEL, "messages": [turn], "max_tokens": 20, "temperature": 1.0}).encode()
    return request_bytes("/v1/chat/completions", body, [("authorization", f"Bearer key-{tenant}")])


def spent_usd(ledger: Ledger, name: str) -> float:
    """What the upstream would bill for the requests of this name."""
    mine = [seen for seen in ledger.seen if seen.name == name]
    pieces = sum(seen.pieces for seen in mine)
    return (len(mine) * PROMPT_TOKENS * USD_PER_MILLION_IN + pieces * USD_PER_MILLION_OUT) / 1e6


async def flood(port: int, requests: int, seconds: float) -> dict[str, int]:
    """Send them spread over the time, over as many connections as it takes; statuses and how often."""
    request, statuses = chat(FLOOD_WORDS, "flood"), Counter[str]()
    connections = [await connect(port) for _ in range(FLOOD_CONNECTIONS)]
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for one in connections:
        free.put_nowait(one)
    began_s, running = time.monotonic(), set[asyncio.Task[None]]()

    async def ask(connection: Connection) -> None:
        answer = await connection.ask(request)
        statuses[answer[9:12].decode()] += 1
        free.put_nowait(connection)

    for number in range(requests):
        wait_s = began_s + number * seconds / requests - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(ask(await free.get()))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for one in connections:
        one.close()
    return {**statuses, "seconds": round(time.monotonic() - began_s)}


async def flood_process(port: int, plan: Plan) -> tuple[dict[str, int], float]:
    """The flood in a process of its own: its work must not slow the clock that the other tenant is measured by."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.limits_flood", "--flood", f"{port},{plan.requests},{plan.flood_s}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("the flood failed")
    found: dict[str, int] = json.loads(out)
    return found, time.monotonic() - began_s


class Other:
    """The tenant that nobody limits: one request every 50 ms, each on a connection that is free."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Connection] = []
        self._running: set[asyncio.Task[None]] = set()
        self.took_s: list[float] = []
        self.wrong = 0

    async def ask_for(self, seconds: float | None, until: asyncio.Task[Any] | None = None) -> list[float]:
        """Ask for `seconds`, or until a task has ended; the seconds of the answers."""
        self.took_s, number, began_s = [], 0, time.monotonic()

        def over() -> bool:
            return until.done() if until is not None else time.monotonic() >= began_s + (seconds or 0.0)

        while not over():
            task = asyncio.create_task(self._ask())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            number += 1
            await asyncio.sleep(max(0.0, began_s + number / OTHER_PER_S - time.monotonic()))
        await asyncio.gather(*self._running)
        return self.took_s

    async def _ask(self) -> None:
        connection = self._free.pop() if self._free else await connect(self._port)
        began_s = time.perf_counter()
        answer = await connection.ask(chat(OTHER_WORDS, "other"))
        self.took_s.append(time.perf_counter() - began_s)
        self.wrong += not answer.startswith(b"HTTP/1.1 200")
        self._free.append(connection)

    def close(self) -> None:
        for one in self._free:
            one.close()


async def measure(plan: Plan) -> Outcome:
    """All rounds against one gateway; the budget is one for all of them."""
    port, ledger, stop = await serve_upstream()
    with tempfile.TemporaryDirectory() as folder:
        quotas = {"flood": {"usd_per_day": CAP_USD, "max_concurrent": 32}, "other": {}}
        gateway = await asyncio.to_thread(start_process, GatewaySetup(folder, port, quotas=quotas))
        other = Other(gateway.port)
        try:
            await other.ask_for(2.0)  # connections are made, code is warm
            rounds = [await one_round(gateway.port, other, plan) for _ in range(plan.rounds)]
        finally:
            other.close()
            await asyncio.to_thread(gateway.stop)
            stop()
        if other.wrong:
            raise RuntimeError(f"{other.wrong} answers of the other tenant were wrong")
        return Outcome(rounds, spent_usd(ledger, "flood"), CAP_USD)


async def one_round(port: int, other: Other, plan: Plan) -> Round:
    calm_s = list(await other.ask_for(plan.calm_s))
    flooding = asyncio.create_task(flood_process(port, plan))
    flooded_s = list(await other.ask_for(None, flooding))
    statuses, seconds = flooding.result()
    await asyncio.sleep(SETTLE_S)
    calm_s += await other.ask_for(plan.calm_s)
    return Round(percentile(calm_s, 0.99) * 1000, percentile(flooded_s, 0.99) * 1000, seconds, statuses)


def main() -> None:
    parser = arguments("one key floods a gateway; what it spends, and what another tenant notices")
    parser.add_argument("--flood", help="PORT,REQUESTS,SECONDS: be the flood only")
    options = parser.parse_args()
    if options.flood:
        port, requests, seconds = options.flood.split(",")
        print(json.dumps(asyncio.run(flood(int(port), int(requests), float(seconds)))))
        return
    plan = QUICK if options.quick else FULL
    found = asyncio.run(measure(plan))
    ratios = [one.flood_p99_ms / one.calm_p99_ms for one in found.rounds]
    statuses = Counter[str]()
    for one in found.rounds:
        statuses.update({name: count for name, count in one.statuses.items() if name != "seconds"})
    keys = {
        "p99_ratio": statistics.median(ratios),
        "p99_ratio_spread": spread(ratios),
        "p99_calm_ms": statistics.median(one.calm_p99_ms for one in found.rounds),
        "p99_flood_ms": statistics.median(one.flood_p99_ms for one in found.rounds),
        "requests_per_flood": plan.requests,
        "flood_s": statistics.median(float(one.statuses["seconds"]) for one in found.rounds),
        "answered": statuses["200"],
        "refused": statuses["429"],
        "spent_usd": found.spent_usd,
        "cap_usd": found.cap_usd,
    }
    publish("limits_flood", keys, options.json, ["spent by the upstream's own ledger"])


if __name__ == "__main__":
    main()
