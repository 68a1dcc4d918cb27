"""Prefill and decode rates of a text model over thread counts -> protocol.device.Measured.

A schedule (profiles.benchmark) decides which probe runs and when; each is bounded in runs and in seconds. Numbers
come from the engine as it is served (worker process, port), so they hold for what a request sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from attrs import frozen

from engines.port import TextEngine
from protocol.clock import Clock
from protocol.device import Measured
from protocol.errors import EngineError
from protocol.text import Sampling, TextRequest

PREFILL_TOKENS = 192
DECODE_TOKENS = 24
LEAST_TIMES = 16
"""A rate is made of at least this many tokens that came each at a time of its own: tokens that an engine or a
connection held back and gave out together say nothing about decoding."""

RUNS = 3
BUDGET_S = 12.0
_WORDS = ("river", "stone", "cloud", "lamp", "paper", "wheel", "salt", "north")

Rates = tuple[Measured, Measured | EngineError]
"""(prefill, decode): an EngineError when no run gave LEAST_TIMES tokens one after the other."""

MakeEngine = Callable[[int], TextEngine]
"""An engine with that many threads; the probe closes it."""


@frozen
class TextProbe:
    """One measurement to be made. `run` blocks for about `expected_s` seconds and raises MidstreamErrors only.

    It may be called in any thread without an event loop.
    """

    name: str
    expected_s: float
    run: Callable[[], Measured]


def text_probes(
    make: MakeEngine,
    digest: str,
    *,
    model: str,
    engine: str,
    threads: Sequence[int],
    runs: int = RUNS,
    budget_s: float = BUDGET_S,
    clock: Clock = time.perf_counter,
) -> tuple[TextProbe, ...]:
    """Two probes per thread count, `prefill` and `decode`; whichever runs first measures both."""
    probes: list[TextProbe] = []
    for count in threads:
        both = _Both(lambda count=count: _measure_and_close(make, digest, engine, count, runs, budget_s, clock))  # type: ignore[misc]
        for place, what in enumerate(("prefill", "decode")):
            name = f"{model} {engine} {count} threads {what}"
            probes.append(TextProbe(name, budget_s / 4, lambda both=both, place=place: both.take(place)))  # type: ignore[misc]
    return tuple(probes)


class _Both:
    """One measurement that gives two results, each handed out once; the second may be why there is none."""

    def __init__(self, measure_both: Callable[[], Coroutine[Any, Any, Rates]]) -> None:
        self._measure_both = measure_both
        self._kept: dict[int, Measured | EngineError] = {}

    def take(self, place: int) -> Measured:
        if place not in self._kept:
            self._kept = dict(enumerate(asyncio.run(self._measure_both())))
        found = self._kept.pop(place)
        if isinstance(found, EngineError):
            raise found
        return found


async def _measure_and_close(
    make: MakeEngine, digest: str, engine: str, threads: int, runs: int, budget_s: float, clock: Clock
) -> Rates:
    made = make(threads)
    try:
        return await measure(made, digest, engine=engine, threads=threads, runs=runs, budget_s=budget_s, clock=clock)
    finally:
        await made.close()


async def measure(
    made: TextEngine,
    digest: str,
    *,
    engine: str,
    threads: int,
    runs: int = RUNS,
    budget_s: float = BUDGET_S,
    clock: Clock = time.perf_counter,
) -> Rates:
    """Rates of a ready engine: at most `runs` runs after warming up, no new one after `budget_s` seconds.

    A run is cut at twice the budget.
    """
    await made.capabilities()
    end_s = clock() + budget_s
    await _one(made, 0, 16, 4, clock, end_s, budget_s)
    prefills: list[tuple[float, int]] = []
    decodes: list[tuple[float, int]] = []
    refused = ""
    for turn in range(1, runs + 1):
        if turn > 1 and clock() > end_s:
            break
        prefill, times_s = await _one(made, turn, PREFILL_TOKENS, DECODE_TOKENS, clock, end_s, budget_s)
        prefills.append(prefill)
        refused = why_no_rate(times_s)
        if not refused:
            decodes.append((times_s[-1] - times_s[0], len(times_s) - 1))
    prefill_rate = _measured(prefills, digest, engine, threads, "prefill")
    if not decodes:
        why = f"the decode speed cannot be measured: {refused}"
        return prefill_rate, EngineError(why, next_step="measure again on an idle machine")
    return prefill_rate, _measured(decodes, digest, engine, threads, "decode")


async def _one(
    made: TextEngine, turn: int, words: int, count: int, clock: Clock, end_s: float, budget_s: float
) -> tuple[tuple[float, int], list[float]]:
    """((prefill seconds, tokens), when each token was made) of one generation with a beginning of its own.

    Past `end_s` it stops as soon as it has enough tokens, past that and `budget_s` with what it has.
    """
    # Another first word in each turn: nothing of the prompt may be in a cache.
    text = " ".join([f"{turn}{_WORDS[turn % len(_WORDS)]}", *(_WORDS[i % len(_WORDS)] for i in range(words))])
    began_s = clock()
    continuation = await made.prepare(TextRequest("", text, Sampling(max_tokens=count)), 120.0)
    ready_s = clock()
    times_s: list[float] = []
    try:
        async for token in continuation.start(0, count + 1):
            now_s = clock()
            if token.data:
                times_s.append(token.at_s or now_s)
            if now_s > end_s + (0.0 if len(times_s) > LEAST_TIMES else budget_s):
                break
    finally:
        await continuation.close()
    evaluated = max(1, continuation.prompt_tokens - continuation.cached_tokens)
    await asyncio.sleep(0)
    return (ready_s - began_s, evaluated), times_s


def why_no_rate(times_s: Sequence[float]) -> str:
    """Why no decode rate may be made of tokens that came at these times; empty when one may."""
    own = len(set(times_s))
    if len(times_s) < LEAST_TIMES:
        return f"the answer ended after {len(times_s)} tokens, {LEAST_TIMES} are needed"
    if own < LEAST_TIMES or any(later < sooner for sooner, later in pairwise(times_s)):
        return f"{len(times_s)} tokens came at {own} different times: they were held back somewhere"
    return ""


def _measured(samples: Sequence[tuple[float, int]], digest: str, engine: str, threads: int, what: str) -> Measured:
    seconds = [s for s, _ in samples]
    per_token = [s / tokens for s, tokens in samples]
    cuts = quantiles(seconds, n=4) if len(seconds) > 1 else [0.0, 0.0, 0.0]
    return Measured(
        digest=digest,
        engine=engine,
        threads=threads,
        what=what,
        median_s=median(seconds),
        spread_s=(cuts[2] - cuts[0]) / 2,
        per_token_s=median(per_token),
    )
