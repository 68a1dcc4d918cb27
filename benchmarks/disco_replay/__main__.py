"""Dispatch against random routing at equal budget, on recorded lengths, arrivals and TTFTs.

    python -m benchmarks.disco_replay --json F [--quick] [--traces DIR] [--processes N]

Services x workloads x devices x regimes x budgets x arrival scales. Every cell replays the product's own decisions,
from a cold start, and random routing that spends as much. Prices and the worth of a joule are fixed in prices.toml.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.disco_replay.cases import SETTINGS, Service, Workload, devices, services, workloads
from benchmarks.disco_replay.costs import Saved, closest, dear_side, saved
from benchmarks.disco_replay.grid import Place, cell
from benchmarks.disco_replay.keys import SHORT, against_paper, keys_of, rows_of, savings, worst_of
from benchmarks.report import arguments, publish
from gateway.dispatch_table import Regime

REGIMES: tuple[Regime, ...] = ("device_constrained", "server_constrained")
BUDGETS = tuple(tenth / 10 for tenth in range(1, 10))
SCALES = (0.1, 1.0, 10.0)
REQUESTS, QUICK_REQUESTS = 1_500, 400


def places(found: Sequence[Service], works: Sequence[Workload], quick: bool) -> list[Place]:
    """The grid; a quick one has one device, three budgets and scales 1 and 10."""
    names = list(devices())[:1] if quick else list(devices())
    budgets = BUDGETS[::4] if quick else BUDGETS
    return [
        Place(service, work, device, regime, scale, budget)
        for service in (found[:3] if quick else found)
        for work in works
        for device in names
        for regime in REGIMES
        for scale in (SCALES[1:] if quick else SCALES)
        for budget in budgets
    ]


def savings_of(
    found: Sequence[Service], work: Workload, quick: bool, pool: ProcessPoolExecutor
) -> tuple[list[Saved], list[str]]:
    """Every named configuration by regime, budget and factor; and regimes that the product would not choose."""
    near = closest(found) or [(found[0], next(iter(devices())))]
    jobs = [
        (Place(service, work, device, regime, 1.0, budget), factor)
        for service, device in near
        for regime in REGIMES
        for budget in BUDGETS[:: 4 if quick else 1]
        for factor in ((1.0,) if quick else SETTINGS["sweep"]["factors"])
    ]
    wrong = [
        f"{service.name} on {device} at the worth for {regime}: the product would choose the other regime"
        for service, device in near
        for regime in REGIMES
        if dear_side(service, work, device, SETTINGS["money_per_joule"][regime]) != regime
    ]
    return list(pool.map(saved, *zip(*jobs, strict=True), chunksize=4)), wrong


def main() -> int:
    """Command line."""
    parser = arguments("Dispatch against random routing at equal budget.")
    parser.add_argument("--traces", type=Path, help="folder of traces; without it seeded synthetic ones are made")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    began_s = time.monotonic()
    found = services(options.traces)
    works = workloads(options.traces, QUICK_REQUESTS if options.quick else REQUESTS)
    with ProcessPoolExecutor(max(1, options.processes)) as pool:
        cells = list(pool.map(cell, places(found, works, options.quick), chunksize=4))
        money, wrong = savings_of(found, works[0], options.quick, pool)
    paper_keys, paper_rows = against_paper(cells)
    money_keys, money_rows = savings(money)
    keys = {
        **keys_of(cells), **paper_keys, **money_keys, "regimes_not_derived": len(wrong),
        "seconds": time.monotonic() - began_s, "rows": rows_of(cells),
    }  # fmt: skip
    shown = {name: value for name, value in keys.items() if name != "rows"}
    notes = [*worst_of(cells), *paper_rows, *money_rows, *wrong, _what(options.traces)]
    publish("disco_replay", keys if options.json else shown, options.json, notes)
    return 0


def _what(traces: Path | None) -> str:
    short = ", ".join(f"{name} = {regime}" for regime, name in SHORT.items())
    made = "recorded" if traces else "synthetic, seeded"
    return (
        f"{short}; traces: {made}; alpaca-like lengths are drawn to published statistics; budget_run_over: what runs "
        "spent beyond the budget by chance, by a cold start, and for servers that were silent for 5 s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
