"""The benchmark of this device: probes that the ways bring, run in a thread, results kept beside the state."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.health import Health
from engines.registry import installed_engines
from profiles.benchmark import (
    Basis,
    BenchmarkDocument,
    Probe,
    Progress,
    decode_benchmark,
    encode_benchmark,
    run_benchmark,
)
from profiles.facts import Facts, cpu_identity
from protocol.clock import Clock
from protocol.durable import read_durable, write_durable
from protocol.errors import MidstreamError

log = logging.getLogger("midstream.agent.profile")

# Long enough for every cut of two small models on a Pi, short enough that nobody waits for a lunch break.
BUDGET_S = 120.0


class Benchmark:
    """Runs at most once at a time. `probes` is asked when it runs, `digests` when it compares."""

    def __init__(
        self,
        path: Path,
        probes: Callable[[], Sequence[Probe]],
        digests: Callable[[], frozenset[str]],
        clock: Clock,
        health: Health,
        budget_s: float = BUDGET_S,
        slowdown: float = 1.0,
    ) -> None:
        self._path = path
        self._slowdown = slowdown
        self._probes = probes
        self._digests = digests
        self._clock = clock
        self._health = health
        self._budget_s = budget_s

    def kept(self, facts: Facts) -> BenchmarkDocument | None:
        """The kept document if it is complete and nothing it depends on has changed."""
        held = read_durable(self._path, decode_benchmark)
        return held if held is not None and held.complete and held.key == self._basis(facts).key else None

    async def run(self, facts: Facts) -> BenchmarkDocument:
        """Measure what is missing; blocks a thread of its own, never the loop. Cancelling ends it after one probe."""
        stop = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(None, self._measure, facts, stop)
        try:
            found = await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])
            raise
        for name, why in found.failed.items():
            log.warning("not measured: %s: %s", name, why)
        return found

    def _measure(self, facts: Facts, stop: threading.Event) -> BenchmarkDocument:
        held = read_durable(self._path, decode_benchmark)
        found = run_benchmark(
            self._probes(),
            held,
            self._basis(facts),
            self._budget_s,
            self._clock,
            progress=_log_progress,
            cancelled=stop.is_set,
        )
        if held != found:
            try:
                write_durable(self._path, encode_benchmark(found))
            except MidstreamError as err:
                self._health.warn("profile", f"measurements were not kept: {err.message}", err.next_step)
        return found

    def _basis(self, facts: Facts) -> Basis:
        # A declared slow-down makes another device of it: nothing measured at one factor holds at another.
        slowed = f" slowed {self._slowdown:g}x" if self._slowdown > 1.0 else ""
        return Basis(self._digests(), installed_engines(), cpu_identity(facts) + slowed)


def _log_progress(step: Progress) -> None:
    if step.name:
        log.info("measuring %d of %d: %s", step.done + 1, step.total, step.name)
