"""`midstream dispatch replay`: recorded requests over the agent's own dispatch, beside simpler ones and an oracle."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from agent.cli.dispatch_plot import png_plot, terminal_plot
from agent.cli.dispatch_trace import read_events, read_requests, read_ttfts
from gateway.dispatch_table import Regime
from gateway.replay import Asked, Outcome, Recording, Speed, learnt, only, oracle_mean_s, quantile_s, routed
from protocol.errors import ConfigError
from protocol.policy import DispatchPolicy

REGIMES: Mapping[str, tuple[Regime, ...]] = {
    "device": ("device_constrained",),
    "server": ("server_constrained",),
    "both": ("device_constrained", "server_constrained"),
}
BUDGETS = "0.1,0.3,0.5,0.7,0.9"


@frozen
class Figures:
    """One way of dispatching: seconds, and shares of prompt tokens that each side was asked to prefill."""

    name: str
    budget: float | None
    mean_s: float
    p50_s: float | None = None
    p99_s: float | None = None
    device_ratio: float | None = None
    server_ratio: float | None = None


def dispatch(argv: list[str]) -> int:
    """Replay recorded requests over dispatch."""
    parser = argparse.ArgumentParser(prog="midstream dispatch", description="where text answers begin")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("replay", help="recorded requests over the agent's dispatch, random routing and an oracle")
    verb.add_argument("--requests", type=Path, help="CSV: arrival_s, prompt_tokens, answer_tokens; or Azure's columns")
    verb.add_argument("--ttfts", type=Path, help="CSV with the server's ttft_s; empty: a failure")
    verb.add_argument("--service", help="only rows of the TTFTs with this `model`")
    verb.add_argument("--events", type=Path, help="an agent's --events file instead of both")
    verb.add_argument("--prefill", type=float, default=50.0, help="tokens/s that the device prefills (default 50)")
    verb.add_argument("--decode", type=float, default=15.0, help="tokens/s that it decodes (default 15)")
    verb.add_argument("--slots", type=int, default=2, help="answers that it works on at once (default 2)")
    verb.add_argument("--regime", choices=sorted(REGIMES), default="both", help="which side the budget spares")
    verb.add_argument("--budgets", default=BUDGETS, help=f"shares of prompt tokens (default {BUDGETS})")
    verb.add_argument("--tail-ratio", type=float, default=DispatchPolicy().tail_ratio)
    verb.add_argument("--scale", type=float, default=1.0, help="arrivals this many times as fast")
    verb.add_argument("--seed", type=int, default=1)
    verb.add_argument("--png", type=Path, help="draw TTFT against budget and distributions into this file")
    verb.add_argument("--json", action="store_true")
    return _replay(parser.parse_args(argv))


def _replay(options: argparse.Namespace) -> int:
    recording = _recording(options)
    budgets = _budgets(options.budgets)
    draw = random.Random(options.seed)
    draws = [[draw.random() for _ in recording.requests] for _ in range(2)]
    fixed = [
        _figures(recording, "device only", None, only(recording, device=True)),
        _figures(recording, "server only", None, only(recording, device=False)),
    ]
    rows: dict[str, list[Figures]] = {}
    cdfs: dict[str, dict[str, Sequence[float]]] = {}
    for regime in REGIMES[options.regime]:
        rows[regime], cdfs[regime] = [], {}
        for budget in budgets:
            policy = DispatchPolicy(budget_ratio=budget, tail_ratio=options.tail_ratio)
            ours, _ = learnt(recording, regime, policy, draws[0])
            other = routed(recording, regime, budget, draws[1])
            rows[regime] += [
                _figures(recording, "midstream", budget, ours),
                _figures(recording, "random", budget, other),
                Figures("oracle", budget, oracle_mean_s(recording, regime, budget)),
            ]
            if budget == budgets[len(budgets) // 2]:
                cdfs[regime] = {f"midstream, {budget:g}": ours.ttfts_s, f"random, {budget:g}": other.ttfts_s}
    _show(options, recording, fixed, rows)
    if options.png is not None:
        png_plot({regime: _curves(found) for regime, found in rows.items()}, cdfs, options.png)
    return 0


def _show(
    options: argparse.Namespace, recording: Recording, fixed: Sequence[Figures], rows: Mapping[str, Sequence[Figures]]
) -> None:
    if options.json:
        runs = {regime: [_plain(one) for one in found] for regime, found in rows.items()}
        print(json.dumps({"requests": len(recording.requests), "fixed": [_plain(one) for one in fixed], "runs": runs}))
        return
    print(f"{len(recording.requests)} requests, {len(set(recording.ttfts_s))} different TTFTs")
    print("\n".join(["", *_table(fixed)]))
    for regime, found in rows.items():
        print("\n".join(["", regime.replace("_", "-"), *_table(found)]))
        if options.png is None:
            print("\n".join(["", *terminal_plot(_curves(found), "mean TTFT against budget")]))
    if options.png is not None:
        print(f"drawn into {options.png}")


def _recording(options: argparse.Namespace) -> Recording:
    if min(options.prefill, options.decode, options.scale, options.slots) <= 0:
        raise ConfigError("--prefill, --decode, --slots and --scale must be above 0", field="--prefill")
    requests: Sequence[Asked] = ()
    ttfts: Sequence[float] = ()
    if options.events is not None:
        requests, ttfts = read_events(options.events, "device")
    if options.requests is not None:
        requests = read_requests(options.requests)
    if options.ttfts is not None:
        ttfts = read_ttfts(options.ttfts, options.service)
    if not requests or not ttfts:
        missing = "--requests" if not requests else "--ttfts"
        raise ConfigError(
            "a replay needs requests and TTFTs of a server",
            next_step="give --requests and --ttfts, or --events with answers that began at a server",
            field=missing,
        )
    draw = random.Random(options.seed)
    begun_s = requests[0].at_s
    scaled = [evolve(asked, at_s=(asked.at_s - begun_s) / options.scale) for asked in requests]
    speed = Speed(options.prefill, options.decode, slots=options.slots)
    return Recording(scaled, [draw.choice(ttfts) for _ in scaled], speed)


def _budgets(text: str) -> Sequence[float]:
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError as err:
        raise ConfigError(f"--budgets {text[:64]!r} is no list of numbers", field="--budgets") from err
    if not 0 <= found[0] <= found[-1] < 1:
        raise ConfigError("budgets are shares from 0 to below 1", field="--budgets")
    return found


def _figures(recording: Recording, name: str, budget: float | None, outcome: Outcome) -> Figures:
    ordered = sorted(outcome.ttfts_s)
    return Figures(
        name,
        budget,
        sum(ordered) / len(ordered),
        quantile_s(ordered, 0.5),
        quantile_s(ordered, 0.99),
        outcome.spent_ratio(recording.requests, device=True),
        outcome.spent_ratio(recording.requests, device=False),
    )


def _curves(found: Sequence[Figures]) -> dict[str, list[tuple[float, float]]]:
    """Mean TTFT over the budget, and the P99 of those that have one."""
    names = dict.fromkeys(one.name for one in found)
    return {name: [(one.budget or 0.0, one.mean_s) for one in found if one.name == name] for name in names}


def _table(found: Sequence[Figures]) -> list[str]:
    lines = [f"{'':12}{'budget':>7}{'mean s':>9}{'P50 s':>9}{'P99 s':>9}{'device':>9}{'server':>9}"]
    for one in found:
        cells = [f"{value:9.3f}" if value is not None else f"{'-':>9}" for value in (one.mean_s, one.p50_s, one.p99_s)]
        shares = [f"{v:9.1%}" if v is not None else f"{'-':>9}" for v in (one.device_ratio, one.server_ratio)]
        budget = "" if one.budget is None else f"{one.budget:g}"
        lines.append(f"{one.name:12}{budget:>7}{''.join(cells + shares)}")
    return lines


def _plain(one: Figures) -> dict[str, Any]:
    return asdict(one)
