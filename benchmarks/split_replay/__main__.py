"""Ours against every fixed arm and an oracle, over real network traces.

Requests come at a fixed rate, two a second, less often where the whole model would keep the device busy for more than
half of the time; a late one delays those behind it. Every trace is replayed in virtual time with the product's own
decisions, for three models on two devices eight times apart in speed; what their parts take is measured on real engines
first. One run through a shaped link in real time must agree with its replay.

    python -m benchmarks.split_replay --json split.json --traces DIR
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.report import arguments, publish
from benchmarks.split_replay import plot
from benchmarks.split_replay.cases import CLS, DET, MINILM, Case, cases
from benchmarks.split_replay.compare import BUDGETS, Cell, cell, curve, line_of
from benchmarks.split_replay.keys import keys_of, worst_of
from benchmarks.split_replay.live import agreement
from benchmarks.split_replay.measured import load, save
from benchmarks.split_replay.traces import Scene, scenes
from protocol.policy import SplitPolicy

FULL_REQUESTS = (1_200, 4_000)
QUICK_REQUESTS = (80, 160)
QUICK_PER_KIND = 1
MODELS = (DET, CLS, MINILM)
QUICK_MODELS = (DET, CLS)


def main() -> None:
    """Command line."""
    parser = arguments("Ours against every fixed arm and an oracle, over real network traces.")
    parser.add_argument("--traces", type=Path, help="folder of traces; without it seeded synthetic ones are made")
    parser.add_argument("--bundles", type=Path, default=Path("~/.cache/midstream/bench-bundles"), help="kept there")
    parser.add_argument("--plot", type=Path, help="PNG of the hedging curve (default: beside the JSON file)")
    parser.add_argument("--costs", type=Path, help="measured costs: read from this file, or written to it")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    began_s, policy = time.monotonic(), SplitPolicy()
    chosen = _chosen(scenes(options.traces), options.quick)
    folder = options.bundles.expanduser() / ("quick" if options.quick else "full")
    measured = _measured(options.costs, folder, options.quick, policy)
    _say_costs(measured)
    live, live_rows = asyncio.run(agreement(folder, policy, options.quick))
    cells = _cells(chosen, measured, policy, QUICK_REQUESTS if options.quick else FULL_REQUESTS, options.processes)
    for one in cells:
        print(line_of(one))
    curves = {kind: curve([one for one in cells if one.kind == kind]) for kind in dict.fromkeys(c.kind for c in cells)}
    print("\n".join([*live_rows, "", "all traces", *plot.as_text(curve(cells))]))
    image = options.plot or (options.json.with_suffix(".png") if options.json else None)
    drawn = image is not None and plot.save(curves, image)
    keys = {
        **keys_of(cells),
        "live_agreement_worst": live,
        "curve": _rows(cells),
        "seconds": time.monotonic() - began_s,
    }
    sample = [f"a sample: {len(cells)} cells of short runs; the figures are those of the full run"]
    notes = [
        *(sample if options.quick else ()),
        *worst_of(cells),
        *_notes(measured, options.traces is not None),
        *live_rows,
    ]
    publish("split_replay", keys, options.json, [*notes, f"curve drawn: {drawn}"])


def _measured(kept: Path | None, folder: Path, quick: bool, policy: SplitPolicy) -> Sequence[Case]:
    if kept is not None and kept.is_file():
        return load(kept)
    found = cases(QUICK_MODELS if quick else MODELS, folder, quick, policy)
    if kept is not None:
        save(found, kept)
    return found


def _chosen(found: Sequence[Scene], quick: bool) -> Sequence[Scene]:
    if not quick:
        return found
    kinds = dict.fromkeys(scene.kind for scene in found)
    return [scene for kind in kinds for scene in [s for s in found if s.kind == kind][:QUICK_PER_KIND]]


def _cells(
    chosen: Sequence[Scene], measured: Sequence[Case], policy: SplitPolicy, requests: tuple[int, int], processes: int
) -> Sequence[Cell]:
    fast = {case.model: case for case in measured if case.speed == "fast"}
    work = [(scene, case, fast[case.model], policy, requests) for scene in chosen for case in measured]
    with ProcessPoolExecutor(max(1, processes)) as pool:
        return list(pool.map(cell, *zip(*work, strict=True), chunksize=2))


def _rows(cells: Sequence[Cell]) -> dict[str, list[float]]:
    found = curve(cells)
    return {f"{budget:g}": [round(value, 4) for value in found[budget]] for budget in BUDGETS}


def _say_costs(measured: Sequence[Case]) -> None:
    for case in measured:
        print(f"{case.model} on a {case.device_class}: {len(case.costs)} arms, one request every {case.every_s:.2f} s")
        for cost in sorted(case.costs, key=lambda c: c.up_bytes)[:4]:
            print(
                f"    {cost.arm!s:24} device {1e3 * cost.device_s:7.1f} ms  up {cost.up_bytes:8}  "
                f"down {cost.down_bytes:8}  server {1e3 * cost.server_s:6.1f} ms"
            )


def _notes(measured: Sequence[Case], recorded: bool) -> list[str]:
    rates = ", ".join(f"{case.model} {case.speed} {case.every_s:.2f} s" for case in measured)
    return [
        f"seconds between requests: {rates}",
        "best fixed arm: the least mean on that trace, known only afterwards; its P99 is what P99s are compared with",
        "Wi-Fi-static: cells where that arm is the device are left out, since nothing is handed over there",
        "traces: recorded" if recorded else "traces: synthetic, seeded",
        "Lumos is downlink, NYU-METS does not say: both are used for both ways; Starlink has both",
    ]


if __name__ == "__main__":
    main()
