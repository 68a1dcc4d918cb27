"""`midstream split explain|status|replay`: what each arm costs, why one is held, and what a network would have done."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import quote

from agent.cli.ask import agent_url, get_json
from agent.cli.plot import png_plot, terminal_plot
from protocol.decode import check_schema, decode, plain
from protocol.errors import ConfigError
from split_models.arm_cost import ArmCost
from split_models.explain import (
    MBIT,
    REPORT_SCHEMA,
    Curve,
    LinkShown,
    SplitReport,
    bandwidths,
    best_at,
    curves,
    now,
    spans,
)
from split_models.planner import Ranked

MAX_REPORT_BYTES = 4 << 20
POINTS = 121
ROWS = 24


def split(argv: list[str]) -> int:
    """Explain the arms of a model, show which is held, or replay a network trace over its costs."""
    parser = argparse.ArgumentParser(prog="midstream split", description="where requests of a model are cut, and why")
    parser.add_argument("--url", help="the agent's address (default: from the configuration)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    explain = verbs.add_parser("explain", help="every arm: bytes, milliseconds, and latency against bandwidth")
    explain.add_argument("model")
    explain.add_argument("--floor-ms", type=float, help="milliseconds that no byte costs (default: as measured)")
    explain.add_argument("--from-mbit", type=float, default=0.5)
    explain.add_argument("--to-mbit", type=float, default=500.0)
    explain.add_argument("--png", type=Path, help="draw into this file instead of the terminal")
    status = verbs.add_parser("status", help="the held arm of every model, and the links")
    replay = verbs.add_parser("replay", help="the model's arms and ours over a network trace")
    replay.add_argument("model")
    replay.add_argument("--trace", type=Path, required=True, help="CSV; see docs/operators-guide.md for the columns")
    replay.add_argument("--every-ms", type=float, default=500.0, help="a request comes every so many milliseconds")
    replay.add_argument("--seconds", type=float, default=600.0, help="at most this much of the trace")
    for verb in (explain, status, replay):
        verb.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    return {"explain": _explain, "status": _status, "replay": _replay}[options.verb](options)


def _explain(options: argparse.Namespace) -> int:
    if not 0 < options.from_mbit < options.to_mbit:
        raise ConfigError("--from-mbit must be above 0 and below --to-mbit", field="--from-mbit")
    report = _report(options, options.model)
    rates = bandwidths(options.from_mbit * MBIT, options.to_mbit * MBIT, POINTS)
    floor_s = None if options.floor_ms is None else options.floor_ms / 1e3
    drawn = curves(report, rates, floor_s)
    if options.json:
        best = [str(arm) if arm else None for arm in best_at(drawn)]
        shown = [{"arm": str(c.arm), "excluded": c.excluded, "seconds": _finite(c.seconds)} for c in drawn]
        print(json.dumps({"report": plain(report), "bytes_per_s": rates, "curves": shown, "best": best}))
        return 0
    print("\n".join(explain_lines(report, drawn, rates)))
    if options.png is not None:
        png_plot(drawn, rates, f"{report.model} on this device", options.png)
        print(f"drawn into {options.png}")
    else:
        print("\n".join(["", *terminal_plot(drawn, rates)]))
    return 0


def _status(options: argparse.Namespace) -> int:
    found = asyncio.run(get_json(agent_url(options.url), "/midstream/v1/status"))
    reports = [_report(options, name) for name in found.get("arms", {})]
    if options.json:
        print(json.dumps([plain(report) for report in reports]))
    else:
        print("\n".join(line for report in reports for line in status_lines(report)) or "no model has arms")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from split_models.replay import Load, Outcome, replay, replay_fixed, replay_oracle
    from split_models.replay_trace import read_trace

    if options.every_ms <= 0 or options.seconds <= 0:
        raise ConfigError("--every-ms and --seconds must be above 0", field="--every-ms")
    report = _report(options, options.model)
    trace = read_trace(options.trace)
    load = Load.over(trace, options.every_ms / 1e3, options.seconds)
    costs = _one_link(report)
    runs: dict[str, Outcome] = {str(cost.arm): replay_fixed(trace, cost, load) for cost in costs}
    runs["midstream"] = replay(trace, costs, report.policy, load)
    runs["oracle"] = replay_oracle(trace, costs, load)
    if options.json:
        print(
            json.dumps({"trace": trace.name, "requests": load.count, "runs": {n: _figures(o) for n, o in runs.items()}})
        )
    else:
        print("\n".join(replay_lines(trace.name, load.count, {n: _figures(o) for n, o in runs.items()})))
    return 0


def _one_link(report: SplitReport) -> Sequence[ArmCost]:
    """The costs of the device and of the first link's arms, as a replay takes them: everything loaded."""
    from attrs import evolve

    from split_models.replay import LINK

    name = report.links[0].name if report.links else None
    mine = [cost for cost in report.costs if cost.arm.link in (None, name)]
    return [evolve(c, loaded=True, arm=evolve(c.arm, link=LINK if c.arm.link else None)) for c in mine]


def _figures(outcome: Any) -> dict[str, Any]:
    seconds = sorted(outcome.latencies_s)
    return {
        "mean_s": mean(seconds) if isfinite(seconds[-1]) else None,
        "p50_s": _quantile(seconds, 0.5),
        "p99_s": _quantile(seconds, 0.99),
        "switches": outcome.switches,
        "hedges": outcome.hedges,
        "arms": dict(outcome.arms),
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return value if isfinite(value) else None


def _report(options: argparse.Namespace, model: str) -> SplitReport:
    found = asyncio.run(get_json(agent_url(options.url), "/midstream/v1/split/" + quote(model, safe="")))
    report = decode(SplitReport, json.dumps(found).encode(), what="split report", max_bytes=MAX_REPORT_BYTES)
    check_schema(report.schema, REPORT_SCHEMA)
    return report


# -- words ---------------------------------------------------------------------------------------------------------


def explain_lines(report: SplitReport, drawn: Sequence[Curve], rates: Sequence[float]) -> list[str]:
    """The table of arms at this moment, best first, and the best arm by bandwidth."""
    lines = [
        f"{report.model} ({report.digest[:8]}), {report.single_cuts} places to cut",
        *_link_lines(report.links),
        "",
    ]
    costs = {cost.arm: cost for cost in report.costs}
    lines.append(f"{'arm':<24} {'device':>9} {'up':>9} {'down':>9} {'server':>9} {'error':>7} {'total now':>10}")
    lines += [_row(entry, costs[entry.arm]) for entry in now(report)[:ROWS]]
    lines += ["", f"held: {report.held}" + (f" ({report.reason})" if report.reason else ""), ""]
    for arm, low, high in spans(best_at(drawn), rates):
        lines.append(f"from {low / MBIT:8.3g} to {high / MBIT:8.3g} Mbit/s: {arm or 'no arm'}")
    return lines


def status_lines(report: SplitReport) -> list[str]:
    """One model in a few lines."""
    share = report.hedged_s / report.requested_s if report.requested_s > 0 else 0.0
    return [
        f"{report.model}: {report.held}" + (f" ({report.reason})" if report.reason else ""),
        *("  " + line for line in _link_lines(report.links)),
        f"  hedges: {share:.1%} of device seconds, at most {report.policy.hedge_ratio:.0%}",
    ]


def replay_lines(trace: str, requests: int, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Arms by mean latency, ours and the oracle's among them."""
    lines = [f"{trace}: {requests} requests", f"{'arm':<24} {'mean':>10} {'p50':>10} {'p99':>10}  switches"]
    for name, figures in sorted(runs.items(), key=lambda item: item[1]["mean_s"] or float("inf")):
        cells = " ".join(f"{_ms(figures[key]):>10}" for key in ("mean_s", "p50_s", "p99_s"))
        lines.append(f"{name:<24} {cells}  {figures['switches'] or ''}".rstrip())
    return lines


def _row(entry: Ranked, cost: ArmCost) -> str:
    total = entry.excluded or _ms(entry.predicted_s)
    return (
        f"{entry.arm!s:<24} {_ms(cost.device_s):>9} {_kb(cost.up_bytes):>9} {_kb(cost.down_bytes):>9} "
        f"{_ms(cost.server_s):>9} {cost.error_ratio:>7.2%} {total:>10}"
    )


def _link_lines(links: Sequence[LinkShown]) -> list[str]:
    if not links:
        return ["no link: everything runs here"]
    return [_link_line(link) for link in links]


def _link_line(link: LinkShown) -> str:
    if not link.known:
        return f"link {link.name}: no transfer seen yet"
    age = "" if link.age_s is None else f", the newest {link.age_s:.0f} s ago"
    rate = f"{link.bytes_per_s / MBIT:.3g} Mbit/s + {link.floor_s * 1e3:.0f} ms"
    return f"link {link.name}: {rate}, {link.samples} transfers{age}"


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None or not isfinite(seconds) else f"{seconds * 1e3:.1f} ms"


def _kb(size_bytes: int) -> str:
    return f"{size_bytes / 1e3:.1f} kB" if size_bytes else "-"


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]
