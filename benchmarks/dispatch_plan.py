"""From raw arrays of 100,000 lengths and TTFTs to a dispatch plan, against numpy.sort of both arrays.

    python -m benchmarks.dispatch_plan --json F [--quick]

Plan and sorts take turns in one run on the same arrays; a ratio is the median of its pairs. The paper gives 14.86 ms
(device-constrained) and 9.08 ms (server-constrained) for 100 K samples on its own machine. The incremental update is
the pure path: one prompt and one TTFT join, the oldest of each leave, and the plan is made anew.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.report import arguments, publish, spread
from gateway.dispatch_arrays import table_of_arrays
from gateway.dispatch_lengths import WINDOW as LENGTHS_KEPT
from gateway.dispatch_lengths import LengthHistory
from gateway.dispatch_table import Regime, make_table
from gateway.ttft import WINDOW as TTFTS_KEPT
from gateway.ttft import TtftWindow

SAMPLES = 100_000
BUDGET, TAIL = 0.3, 0.05
PAPER_MS: Mapping[Regime, float] = {"device_constrained": 14.86, "server_constrained": 9.08}
SEED = 20250217


def arrays(samples: int) -> tuple[Any, Any]:
    """Lengths as Azure's conversations have them (int64) and TTFTs with a heavy tail and some failures (float64)."""
    draw = np.random.default_rng(SEED)
    lengths = np.clip(draw.lognormal(6.7, 0.9, samples), 1, 16_384).astype(np.int64)
    ttfts_s = draw.lognormal(-0.6, 0.8, samples)
    ttfts_s[draw.random(samples) < 0.01] = np.inf
    return lengths, ttfts_s


def seconds(work: Callable[[], object]) -> float:
    """One run of `work`."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def against_sorts(lengths: Any, ttfts_s: Any, runs: int) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of both plans and of the sorts, in turns of random order: who comes after whom changes page faults."""
    work: dict[str, Callable[[], object]] = {
        regime: partial(table_of_arrays, regime, lengths, ttfts_s, BUDGET, TAIL) for regime in PAPER_MS
    }
    work["sorts"] = lambda: (np.sort(lengths), np.sort(ttfts_s))
    names, took = list(work), {name: [0.0] * runs for name in work}
    order = random.Random(SEED)
    for turn in range(runs):
        for name in order.sample(names, len(names)):
            took[name][turn] = seconds(work[name])
    sorts = took.pop("sorts")
    return took, sorts


def update_us(lengths: Any, ttfts_s: Any, kept: tuple[int, int], runs: int) -> list[float]:
    """Microseconds of updates of full windows of `kept` lengths and TTFTs, each with both plans made anew."""
    history, window = LengthHistory(kept[0], ()), TtftWindow(kept[1])
    for tokens in lengths[: kept[0]].tolist():
        history.add(tokens)
    for value in ttfts_s[: kept[1]].tolist():
        window.add(value)
    took = []
    for tokens, value in zip(lengths[:runs].tolist(), ttfts_s[-runs:].tolist(), strict=True):
        begun = time.perf_counter()
        history.add(tokens)
        window.add(value)
        for regime in PAPER_MS:
            make_table(regime, history, window, BUDGET, TAIL)
        took.append((time.perf_counter() - begun) * 1e6)
    return took


def same_plans(lengths: Any, ttfts_s: Any) -> bool:
    """Whether the pure path comes to the same plans from the same samples."""
    history, window = LengthHistory(len(lengths), ()), TtftWindow(len(ttfts_s))
    for tokens in lengths.tolist():
        history.add(tokens)
    for value in ttfts_s.tolist():
        window.add(value)
    return all(
        make_table(regime, history, window, BUDGET, TAIL)
        == table_of_arrays(regime, lengths, ttfts_s, BUDGET, TAIL)[0]
        for regime in PAPER_MS
    )  # fmt: skip


def main() -> int:
    """Command line."""
    options = arguments("From raw arrays to a dispatch plan, against numpy.sort of both.").parse_args()
    runs = 30 if options.quick else 200
    lengths, ttfts_s = arrays(SAMPLES)
    against_sorts(lengths, ttfts_s, 3)
    plans, sorts = against_sorts(lengths, ttfts_s, runs)
    keys: dict[str, object] = {}
    notes = [f"numpy {np.__version__}, {SAMPLES} int64 lengths and float64 TTFTs; sort of both {_ms(sorts)} ms"]
    for name, regime in (("d", "device_constrained"), ("s", "server_constrained")):
        ratios = [one / both for one, both in zip(plans[regime], sorts, strict=True)]
        keys[f"{name}_ratio"] = statistics.median(ratios)
        keys[f"{name}_ms"] = statistics.median(plans[regime]) * 1e3
        notes.append(f"{regime}: {_ms(plans[regime])} ms, ratio {spread(ratios)}; paper {PAPER_MS[regime]} ms")  # type: ignore[index]
    live = update_us(lengths, ttfts_s, (LENGTHS_KEPT, TTFTS_KEPT), 2_000)
    large = update_us(lengths, ttfts_s, (SAMPLES, SAMPLES), 500)
    keys |= {
        "sorts_ms": statistics.median(sorts) * 1e3,
        "update_us": statistics.median(live),
        "update_large_us": statistics.median(large),
        "paths_agree": same_plans(lengths, ttfts_s),
    }
    notes.append(f"update with both plans: windows of {LENGTHS_KEPT} and {TTFTS_KEPT}: {spread(live)} us")
    notes.append(f"update with both plans: windows of {SAMPLES} each: {spread(large)} us")
    publish("dispatch_plan", keys, options.json, notes)
    return 0


def _ms(values: list[float]) -> str:
    return spread([value * 1e3 for value in values])


if __name__ == "__main__":
    raise SystemExit(main())
