"""A gateway under everything at once, for long: long texts, images, bursts, 429s, stalls, cuts, clients that leave.

The house is a process of its own (benchmarks.soak_house), so that its memory is its own. Each answer must be right, or
be explained by the fault that was asked for or by a limit. What is left afterwards counts as well: places that are
still held, connections that stay open, words of an error in the house's log.

    python -m benchmarks.soak --json soak.json --minutes 30
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import IO

from attrs import asdict, define, field

from benchmarks.fake_upstream import Ledger, Seen, serve_upstream
from benchmarks.load import Connection, connect, request_bytes
from benchmarks.report import arguments, publish
from benchmarks.soak_house import STATE_PATH, HouseSetup
from benchmarks.soak_requests import SMALL, STEADY, Asked, Mix, fault_of

MINUTES = 30.0
QUICK_S = 20.0
WORKERS = 12
PAUSE_S = 0.1
"""Mean pause of a worker between two requests: a soak is long, not fast."""
BURST_EVERY_S = 6.0
BURST = 48
ANSWER_S = 15.0
"""More than the house's own deadline of a request."""
SETTLE_S = 12.0
WARM_SHARE = 0.25
"""Of the run, before memory is looked at: pools fill, code is loaded."""
MAX_EXAMPLES = 20
_BAD_LOG = re.compile(rb"Traceback|never retrieved|was destroyed but|never awaited|Unclosed")


@define
class Soak:
    """What is counted while it runs. rss: (seconds, MiB)."""

    requests: int = 0
    by_kind: Counter[str] = field(factory=Counter)
    unexplained: int = 0
    examples: list[str] = field(factory=list)
    rss: list[tuple[float, float]] = field(factory=list)

    def wrong(self, what: str) -> None:
        """One failure that nothing explains."""
        self.unexplained += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(what)
            print(f"unexplained: {what}", file=sys.stderr, flush=True)


def rss_mb(pid: int) -> float:
    """Resident memory of a process, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def slope_per_h(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of (seconds, value), per hour; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    mean_s = sum(s for s, _ in points) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((s - mean_s) ** 2 for s, _ in points)
    return 3600.0 * sum((s - mean_s) * (value - mean) for s, value in points) / spread if spread else 0.0


class Client:
    """One worker's connection, opened again when it was lost."""

    def __init__(self, port: int, soak: Soak) -> None:
        self._port = port
        self._soak = soak
        self._connection: Connection | None = None

    async def ask(self, asked: Asked) -> None:
        """One request, judged."""
        soak, headers = self._soak, [("authorization", f"Bearer key-{asked.tenant}")]
        soak.requests += 1
        soak.by_kind[asked.kind] += 1
        connection = self._connection or await connect(self._port)
        self._connection = None
        waiting = connection.ask(request_bytes("/v1/chat/completions", asked.body, headers))
        if asked.leaves_s is not None:
            await asyncio.wait({waiting}, timeout=asked.leaves_s)
            connection.abort()
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await waiting
        except TimeoutError:
            soak.wrong(f"{asked.kind}: no answer within {ANSWER_S:.0f} s")
            connection.abort()
            return
        except OSError as err:
            if asked.kind != "too_long":  # the house may hang up on a body that it does not take
                soak.wrong(f"{asked.kind}: the connection was lost: {err!r}")
            return
        if fault := fault_of(asked, answer):
            soak.wrong(fault)
        if b"onnection: close" in answer[:1024]:
            connection.close()
        else:
            self._connection = connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


async def worker(port: int, soak: Soak, mix: Mix, end_s: float, draw: Random) -> None:
    """Requests one after the other, with pauses."""
    client = Client(port, soak)
    while time.monotonic() < end_s:
        await client.ask(mix.next())
        await asyncio.sleep(draw.expovariate(1.0 / PAUSE_S))
    client.close()


async def bursts(port: int, soak: Soak, mix: Mix, end_s: float) -> None:
    """Many at once, every few seconds, each on a connection of its own."""
    while time.monotonic() < end_s:
        clients = [Client(port, soak) for _ in range(BURST)]
        await asyncio.gather(*(client.ask(one) for client, one in zip(clients, mix.burst(BURST), strict=True)))
        for client in clients:
            client.close()
        await asyncio.sleep(BURST_EVERY_S)


async def watch(pid: int, soak: Soak, began_s: float, end_s: float) -> None:
    """Memory, once a second."""
    while time.monotonic() < end_s:
        soak.rss.append((time.monotonic() - began_s, rss_mb(pid)))
        await asyncio.sleep(1.0)


async def settled(port: int, soak: Soak, ledgers: Sequence[Ledger]) -> None:
    """Nothing may be held when everybody has left, and no provider may still wait for us."""
    end_s, held, running, waiting = time.monotonic() + SETTLE_S, -1, -1, list[Seen]()
    while time.monotonic() < end_s:
        connection = await connect(port)
        answer = await connection.ask(request_bytes(STATE_PATH, b"{}"))
        connection.close()
        state = json.loads(answer.partition(b"\r\n\r\n")[2])
        held = sum(count for one in state["reserved"].values() for count in one.values())
        running = state["running"]
        seen = [one for ledger in ledgers for one in ledger.seen]
        waiting = [one for one in seen if one.ended_s is None and one.closed_s is None]
        if not held and not running and not waiting:
            return
        await asyncio.sleep(0.25)
    soak.wrong(
        f"{held} units are still reserved, {running} answers still run, {len(waiting)} calls still open: {waiting[:3]}"
    )


def start_house(setup: HouseSetup, log: IO[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    """Waits until it listens; for threads."""
    command = [sys.executable, "-m", "benchmarks.soak_house", json.dumps(asdict(setup))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the house did not start")
    return process, int(line)


def end_house(process: subprocess.Popen[bytes], soak: Soak, log: Path) -> None:
    """In order, and its log looked at."""
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code:
        soak.wrong(f"the house ended with {code}")
    for line in log.read_bytes().splitlines():
        if _BAD_LOG.search(line):
            soak.wrong(f"the house's log: {line[:300]!r}")
    if process.stdout is not None:
        process.stdout.close()


async def measure(seconds: float, seed: int = 7) -> Soak:
    """One run."""
    soak, mix, draw = Soak(), Mix(seed), Random(seed)
    good_port, good, stop_good = await serve_upstream(ledger=Ledger(sane=True))
    shaky_port, shaky, stop_shaky = await serve_upstream()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "house.log"
        with log.open("wb") as err:
            quotas = {STEADY: {}, SMALL: {"requests_per_s": 5.0, "max_concurrent": 8, "tokens_per_min": 40_000}}
            setup = HouseSetup(folder, good_port, shaky_port, quotas=quotas)
            process, port = await asyncio.to_thread(start_house, setup, err)
        try:
            began_s = time.monotonic()
            end_s = began_s + seconds
            await asyncio.gather(
                watch(process.pid, soak, began_s, end_s),
                bursts(port, soak, mix, end_s),
                *(worker(port, soak, mix, end_s, draw) for _ in range(WORKERS)),
            )
            await settled(port, soak, (good, shaky))
            soak.rss.append((time.monotonic() - began_s, rss_mb(process.pid)))
        finally:
            await asyncio.to_thread(end_house, process, soak, log)
            stop_good()
            stop_shaky()
    return soak


def main() -> None:
    parser = arguments("a gateway under every fault at once, for long; what fails without a reason, and memory")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    seconds = QUICK_S if options.quick else 60.0 * options.minutes
    soak = asyncio.run(measure(seconds, options.seed))
    warm = [point for point in soak.rss if point[0] >= WARM_SHARE * seconds]
    keys = {
        "unexplained_failures": soak.unexplained,
        "requests": soak.requests,
        "rss_start_mb": warm[0][1],
        "rss_end_mb": warm[-1][1],
        "rss_slope_mb_per_h": slope_per_h(warm),
        "seconds": seconds,
        "rss_mb_by_minute": [round(mb, 1) for at_s, mb in soak.rss if at_s % 60 < 1],
        **{f"requests_{kind}": count for kind, count in sorted(soak.by_kind.items())},
    }
    publish("soak", keys, options.json, ["memory from a quarter of the run on", *soak.examples])


if __name__ == "__main__":
    main()
