"""Decoding while other programs keep every core busy: threads as on an idle machine, and chosen anew.

`python -m benchmarks.contention --json F [--quick]`: SmolLM2 with one thread per core; a busy process per core runs
beside it. Keys: `idle_tok_s`, `busy_tok_s` (the same threads), `rechosen_tok_s`, `rechosen_threads`, and
`rechosen_ratio` (over `busy_tok_s`; medians of answers that take turns).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from benchmarks.report import arguments, publish, spread
from engines.llama_server import LlamaServerEngine
from engines.port import TextEngine
from engines.rethreaded import RethreadedTextEngine
from engines.store import default_store
from engines.thread_choice import ANSWERS, ThreadChoice
from profiles.facts import usable_cores
from protocol.text import Sampling, TextRequest

MODEL = "smollm2-135m"
TOKENS = 16
MOST_ANSWERS = 9
"""Answers within which the choice has to be made."""


def _burn(parent: int) -> None:
    """Until `parent` is gone."""
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Each of `processes` takes a core for the length of the block."""
    context = multiprocessing.get_context("spawn")
    burners = [context.Process(target=_burn, args=(os.getpid(),), daemon=True) for _ in range(processes)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


async def rate(engine: TextEngine, turn: int) -> float:
    """Tokens a second of one answer, from the times they were made at."""
    continuation = await engine.prepare(
        TextRequest(MODEL, f"{turn}. Once upon a time", Sampling(max_tokens=TOKENS)), 120.0
    )
    times_s = [token.at_s async for token in continuation.start(0, TOKENS + 1) if token.data]
    return 1.0 / statistics.median(later - sooner for sooner, later in pairwise(times_s))


def make(threads: int) -> TextEngine:
    """SmolLM2 with that many threads."""
    return LlamaServerEngine(default_store().path(MODEL), context_tokens=256, threads=threads, slots=1)


async def run(turns: int) -> tuple[dict[str, object], list[str]]:
    """Idle first, then both engines in turn on a busy machine."""
    cores = usable_cores()
    fixed = make(cores)
    idle = [await rate(fixed, turn) for turn in range(turns)]
    # The fastest: whoever else computes meanwhile makes answers slower, never faster.
    choice = ThreadChoice(cores, {cores: 1 / max(idle)})
    chosen = RethreadedTextEngine(make, choice)
    try:
        with busy(cores):
            for turn in range(MOST_ANSWERS):
                await rate(chosen, turn)
                if chosen.threads < cores and turn >= ANSWERS + 1:
                    break
            pairs = [(await rate(fixed, turn), await rate(chosen, turn)) for turn in range(turns)]
    finally:
        await fixed.close()
        await chosen.close()
    plain, anew = [one for one, _ in pairs], [one for _, one in pairs]
    keys: dict[str, object] = {
        "cores": cores,
        "idle_tok_s": max(idle),
        "busy_tok_s": statistics.median(plain),
        "rechosen_tok_s": statistics.median(anew),
        "rechosen_threads": chosen.threads,
        "rechosen_ratio": statistics.median(after / before for before, after in pairs),
    }
    return keys, [f"busy: {spread(plain)}", f"rechosen: {spread(anew)}", f"why: {choice.choice.reason}"]


def main() -> int:
    """Measure and publish."""
    options = arguments(__doc__ or "").parse_args()
    keys, notes = asyncio.run(run(3 if options.quick else 15))
    publish("contention", keys, options.json, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
