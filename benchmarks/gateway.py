"""What a gateway costs between a client and a provider: ours beside LiteLLM's proxy and Portkey's gateway.

`python -m benchmarks.gateway --json F [--quick] [--peers DIR]`: all of them, and the upstream asked directly, take
turns in one run against one fake upstream; each gateway has one worker on core 0, upstream and clients share core 1.
Only answers that are right count. Ours runs with keys, limits in four dimensions over SQLite, routing, privacy,
metrics and audit on, the cache off.

Keys (ours at the top level, each peer's under its name): p50_added_ms, p99_added_ms (one client, over the direct way in
the same round), rps (64 clients), stream_added_ttft_ms (16 streams of 64 tokens at 100 tokens/s, first token over the
direct way), abort_midstream_s, abort_before_first_s, abort_nonstream_s (client leaves to upstream closed; null: not
within the wait), cpu_ms_per_request, rss_mb; rps_direct; rps_ratio_litellm, rps_ratio_portkey (medians of the rounds).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from benchmarks.fake_upstream import Ledger, serve_upstream
from benchmarks.gateway_peers import (
    Ask,
    Running,
    best_loop,
    installed_peers,
    start_litellm,
    start_ours,
    start_portkey,
)
from benchmarks.load import Outcome, Sent, closed_loop, connect, request_bytes
from benchmarks.report import arguments, percentile, publish, spread

DIRECT, OURS = "direct", "ours"
PATH = "/v1/chat/completions"
CLIENTS, STREAMS, STREAM_TOKENS, STREAM_RATE = 64, 16, 64, 100
GATEWAY_CORE, CLIENT_CORE = 0, 1
FORMS = ("midstream", "before_first", "nonstream")


@frozen
class Plan:
    """How long each part of a round takes."""

    rounds: int
    warm_s: float
    alone_s: float
    crowd_s: float
    waves: int
    aborts: int
    abort_wait_s: float


QUICK = Plan(rounds=2, warm_s=0.3, alone_s=0.5, crowd_s=0.8, waves=1, aborts=1, abort_wait_s=0.3)
FULL = Plan(rounds=7, warm_s=2.0, alone_s=2.0, crowd_s=3.0, waves=3, aborts=3, abort_wait_s=2.0)


@define
class Series:
    """One system's figures, an entry per round."""

    p50_ms: list[float] = field(factory=list)
    p99_ms: list[float] = field(factory=list)
    rps: list[float] = field(factory=list)
    cpu_ms: list[float] = field(factory=list)
    ttft_ms: list[float] = field(factory=list)
    rss_mb: list[float] = field(factory=list)
    aborts_s: dict[str, list[float | None]] = field(factory=lambda: {form: [] for form in FORMS})
    wrong: int = 0
    example: str = ""

    def note(self, outcome: Outcome) -> None:
        """Wrong answers of a part."""
        self.wrong += outcome.wrong
        if outcome.example:
            self.example = outcome.example[:200].decode("latin-1")


class Requests:
    """Makes requests, each with a name of its own that the right answer says again."""

    def __init__(self, ask: Ask, prefix: str = "q") -> None:
        self._ask = ask
        self._prefix = prefix
        self._numbers = count()

    def name(self) -> str:
        """A name that no other request of this gateway has; short, for a long number might be taken for a card's."""
        return f"{self._prefix}{next(self._numbers)}x"

    def sent(self, words: str = "", *, stream: bool = False, name: str = "") -> Sent:
        """One request with a system prompt and a question; `words` script the upstream."""
        name = name or self.name()
        document: dict[str, Any] = {
            "model": "fake",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant. Answer briefly and truthfully."},
                {"role": "user", "content": f"n={name} {words} What is the capital of France, and since when?"},
            ],
            "max_tokens": 128,
            "temperature": 0.7,
        }
        if stream:
            document["stream"] = True
        data = request_bytes(PATH, json.dumps(document).encode(), self._ask.headers)
        return Sent(data, f"reply to {name} ".encode())


async def alone(requests: Requests, port: int, seconds: float, series: Series) -> None:
    """One client: latencies."""
    outcome = await closed_loop(port, requests.sent, 1, seconds=seconds)
    series.note(outcome)
    if outcome.seconds:
        series.p50_ms.append(1e3 * percentile(outcome.seconds, 0.5))
        series.p99_ms.append(1e3 * percentile(outcome.seconds, 0.99))


async def crowd(requests: Requests, port: int, seconds: float, series: Series, running: Running | None) -> None:
    """64 clients: requests a second, CPU per request, memory."""
    before_s = running.cpu_s() if running is not None else 0.0
    outcome = await closed_loop(port, requests.sent, CLIENTS, seconds=seconds)
    series.note(outcome)
    series.rps.append(outcome.per_s)
    if running is not None and outcome.seconds:
        series.cpu_ms.append(1e3 * (running.cpu_s() - before_s) / len(outcome.seconds))
        series.rss_mb.append(running.rss_mb())


async def wave(requests: Requests, port: int, series: Series) -> None:
    """16 streams at once: the first token's time of each."""
    connections = [await connect(port) for _ in range(STREAMS)]

    async def one(number: int) -> float | None:
        words = f"tokens={STREAM_TOKENS} rate={STREAM_RATE}"
        sent = requests.sent(words, stream=True)
        began_s = time.monotonic()
        answer = await asyncio.wait_for(connections[number].ask(sent.data), 30.0)
        right = sent.wanted in answer and f'"w{STREAM_TOKENS - 1} "'.encode() in answer and b"data: [DONE]" in answer
        return 1e3 * (connections[number].pieces_s[0] - began_s) if right else None

    found = await asyncio.gather(*(one(number) for number in range(STREAMS)), return_exceptions=True)
    good = [value for value in found if isinstance(value, float)]
    series.wrong += STREAMS - len(good)
    series.ttft_ms += good
    for connection in connections:
        connection.close()


async def abort(requests: Requests, port: int, ledger: Ledger, form: str, wait_s: float) -> float | None:
    """Seconds from the client's leaving until the upstream's connection closed; None: not within `wait_s`."""
    name = requests.name()
    words = f"tokens={int(100 * (wait_s + 3))} rate=100" if form == "midstream" else f"first={wait_s + 3}"
    connection = await connect(port)
    connection.ask(requests.sent(words, stream=form != "nonstream", name=name).data)
    try:
        if form == "midstream":
            await _until(lambda: len(connection.pieces_s) > 2, 5.0)
        else:
            await _until(lambda: name in ledger.by_name, 5.0)
            await asyncio.sleep(0.1)
    finally:
        left_s = time.monotonic()
        connection.abort()
    seen = ledger.by_name.get(name)
    await _until(lambda: seen is not None and seen.closed_s is not None, wait_s)
    return max(0.0, seen.closed_s - left_s) if seen is not None and seen.closed_s is not None else None


async def _until(what: Any, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while not what() and time.monotonic() < end_s:
        await asyncio.sleep(0.002)


async def measure(plan: Plan, running: Sequence[Running], direct: Ask, ledger: Ledger) -> Mapping[str, Series]:
    """All rounds; every other round goes through the systems the other way round."""
    asks: dict[str, tuple[Ask, Running | None]] = {DIRECT: (direct, None)}
    asks |= {one.name: (one.ask, one) for one in running}
    found = {name: Series() for name in asks}
    makers = {name: Requests(ask, name[0]) for name, (ask, _) in asks.items()}
    for name, (ask, _) in asks.items():
        await closed_loop(ask.port, makers[name].sent, 16, seconds=plan.warm_s)
    for number in range(plan.rounds):
        order = list(asks) if number % 2 == 0 else list(reversed(asks))
        for name in order:
            ask, one = asks[name]
            await alone(makers[name], ask.port, plan.alone_s, found[name])
        for name in order:
            ask, one = asks[name]
            await crowd(makers[name], ask.port, plan.crowd_s, found[name], one)
        for name in order:
            for _ in range(plan.waves):
                await wave(makers[name], asks[name][0].port, found[name])
        ledger.clear()
    for name in asks:
        for form in FORMS:
            for _ in range(plan.aborts if name != DIRECT else 0):
                found[name].aborts_s[form].append(
                    await abort(makers[name], asks[name][0].port, ledger, form, plan.abort_wait_s)
                )
    return found


def figures(series: Series, direct: Series) -> dict[str, Any]:
    """The keys of one gateway."""
    added50 = [mine - theirs for mine, theirs in zip(series.p50_ms, direct.p50_ms, strict=False)]
    added99 = [mine - theirs for mine, theirs in zip(series.p99_ms, direct.p99_ms, strict=False)]
    keys: dict[str, Any] = {
        "p50_added_ms": _median(added50),
        "p99_added_ms": _median(added99),
        "rps": _median(series.rps),
        "stream_added_ttft_ms": _median(series.ttft_ms, direct.ttft_ms),
    }
    for form in FORMS:
        seconds = series.aborts_s[form]
        keys[f"abort_{form}_s"] = None if None in seconds or not seconds else max(s for s in seconds if s is not None)
    keys |= {"cpu_ms_per_request": _median(series.cpu_ms), "rss_mb": _median(series.rss_mb), "wrong": series.wrong}
    return keys


def _median(values: Sequence[float], less: Sequence[float] = (0.0,)) -> float | None:
    return statistics.median(values) - statistics.median(less) if values and less else None


def _ratios(ours: Series, peer: Series) -> list[float]:
    return [mine / theirs for mine, theirs in zip(ours.rps, peer.rps, strict=False) if theirs]


async def run(plan: Plan, peers: Mapping[str, Path]) -> tuple[dict[str, object], list[str]]:
    """Start everything, measure, end everything."""
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {CLIENT_CORE})
    ledger = Ledger()
    upstream, _, stop = await serve_upstream(ledger=ledger)
    with tempfile.TemporaryDirectory(prefix="midstream-gateway-") as folder:
        starts = [start_ours(upstream, Path(folder) / OURS, GATEWAY_CORE)]
        if "litellm" in peers:
            starts.append(start_litellm(upstream, Path(folder), GATEWAY_CORE, peers["litellm"]))
        if "portkey" in peers:
            starts.append(start_portkey(upstream, Path(folder), GATEWAY_CORE, peers["portkey"]))
        started = await asyncio.gather(*starts, return_exceptions=True)
        running = [one for one in started if isinstance(one, Running)]
        notes = [f"a gateway did not start: {one}" for one in started if isinstance(one, BaseException)]
        try:
            found = await measure(plan, running, Ask(upstream), ledger)
        finally:
            await asyncio.gather(*(one.stop() for one in running))
            stop()
    return summary(found, notes)


def summary(found: Mapping[str, Series], notes: list[str]) -> tuple[dict[str, object], list[str]]:
    """Keys and what a reader should know."""
    ours, direct = found[OURS], found[DIRECT]
    keys: dict[str, object] = {**figures(ours, direct), "rps_direct": _median(direct.rps)}
    for name, series in found.items():
        if name in (DIRECT, OURS):
            continue
        keys[name] = figures(series, direct)
        ratios = _ratios(ours, series)
        keys[f"rps_ratio_{name}"] = _median(ratios)
        notes.append(f"{name}: {json.dumps(keys[name])}; rps ratio {spread(ratios)}")
    notes.append(f"rps {spread(ours.rps)}, direct {spread(direct.rps)}; p50 alone {spread(ours.p50_ms)} ms")
    notes += [f"{name} gave wrong answers, such as {s.example!r}" for name, s in found.items() if s.wrong]
    notes.append(f"event loop of ours: {best_loop()} (uvloop is the extra fast; LiteLLM runs on it too)")
    notes.append(f"load average of the machine: {os.getloadavg()[0]:.1f} (the bench alone makes about 2)")
    return keys, notes


def main() -> int:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="where the peers are installed")
    parser.add_argument("--rounds", type=int, help="rounds (default 7, 2 with --quick)")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    options = parser.parse_args()
    peers, notes = installed_peers(options.peers, install=not options.quick) if not options.alone else ({}, [])
    plan = QUICK if options.quick else FULL
    if options.rounds:
        from attrs import evolve

        plan = evolve(plan, rounds=options.rounds)
    keys, more = asyncio.run(run(plan, peers))
    publish("gateway", keys, options.json, [*notes, *more])
    return 0


if __name__ == "__main__":
    sys.exit(main())
