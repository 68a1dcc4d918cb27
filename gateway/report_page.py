"""A report as one HTML page without scripts or foreign addresses, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from time import gmtime, strftime

from gateway.report import Period, Prices, Report, series
from gateway.report_shadow import COLUMNS

WIDTH, HEIGHT, MARGIN = 720, 180, 40
BARS = 20
"""Rows of a bar chart; the rest is left to the CSV."""

STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}svg{background:#fafafa;border:1px solid #eee}"
    "text{font:11px system-ui,sans-serif;fill:#555}"
)
TITLES = {
    "requests": "requests",
    "own_tokens_ratio": "answered on own machines (share of answer tokens)",
    "cost_usd": "cost, $",
    "all_cloud_usd": "cost had all gone to paid targets, $",
    "saved_ratio": "saved against all cloud",
    "mean_ttft_s": "mean time to first token, s",
    "p50_ttft_s": "median time to first token, s",
    "p99_ttft_s": "99 % of first tokens within, s",
    "cache_hit_ratio": "answered from the cache",
    "handed_over_ratio": "answers that changed sides (fallback or migration)",
    "failed_ratio": "failed",
    "ttft_moves_ratio": "spread of the periods' mean TTFT over its mean",
    "compression_saved_tokens": "prompt tokens saved by compression",
    "redacted_ratio": "sent with placeholders",
    "local_only_ratio": "kept on this machine",
    "shadow_requests": "requests asked twice (shadow)",
    "shadow_agreement_ratio": "of those that both paths answered, alike",
    "shadow_cost_usd": "cost of second answers (not in the cost above), $",
}


def page(report: Report, prices: Prices) -> str:
    """The whole page. Names out of the log are escaped."""
    periods = series(report)
    span = (
        f"{_when(periods[0].begins_s)} to {_when(periods[-1].begins_s + report.period_s)} UTC" if periods else "empty"
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>midstream report</title>",
        f"<style>{STYLE}</style><h1>midstream report</h1><p>{span}</p>",
        _table(report.headline(prices)),
        _lines("Requests and failures", periods, {"requests": lambda p: p.requests, "failed": lambda p: p.failed}),
        _lines("Mean time to first token, s", periods, {"TTFT": lambda p: p.mean_ttft_s}),
        _lines("Cost, $", periods, {"$": lambda p: p.usd}),
        _lines("Answer tokens", periods, {"own": lambda p: p.own_tokens, "paid": lambda p: p.paid_tokens}),
        _bars("Answer tokens by target", report.tokens_by_target),
        _bars("Requests by model", report.by_model),
        _bars("Requests by tenant", report.by_tenant),
        _bars("Requests by level of routing", report.by_level),
        _bars("How requests ended", report.ended),
        _bars("Private values found", report.found),
        _differences(report),
        "</html>\n",
    ]
    return "\n".join(parts)


def as_csv(report: Report) -> str:
    """One row per period, with a header."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["begins_utc", "requests", "failed", "usd", "own_tokens", "paid_tokens", "mean_ttft_s"])
    for p in series(report):
        ttft = "" if p.mean_ttft_s is None else f"{p.mean_ttft_s:.4f}"
        writer.writerow([_when(p.begins_s), p.requests, p.failed, f"{p.usd:.6f}", p.own_tokens, p.paid_tokens, ttft])
    return out.getvalue()


def text(report: Report, prices: Prices) -> list[str]:
    """The headline for a terminal, and what shadows showed."""
    lines = [f"{TITLES[name]:52} {_number(name, value)}" for name, value in report.headline(prices).items()]
    rows = [[_cell(name, row[name]) for name in COLUMNS] for row in report.shadow.rows()]
    if not rows:
        return lines
    table = [list(COLUMNS), *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(COLUMNS))]
    shown = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return [*lines, "", "old path and other path (shadow):", *shown]


def shadow_csv(report: Report) -> str:
    """The difference report, one row per intent, level and model, with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(report.shadow.rows())
    return out.getvalue()


def _when(unix_s: float) -> str:
    return strftime("%Y-%m-%d %H:%M", gmtime(unix_s))


def _number(name: str, value: float | int | None) -> str:
    if value is None:
        return "unknown"
    if name.endswith("_ratio") and name != "ttft_moves_ratio":
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(headline: Mapping[str, float | int | None]) -> str:
    rows = (f"<tr><td>{TITLES[name]}<td class=n>{_number(name, value)}" for name, value in headline.items())
    return f"<table>{''.join(rows)}</table>"


def _differences(report: Report) -> str:
    """Both paths side by side; empty without shadows."""
    rows = report.shadow.rows()
    if not rows:
        return ""
    head = "".join(f"<th>{name}" for name in COLUMNS)
    cells = ("".join(f"<td>{escape(_cell(name, row[name]))}" for name in COLUMNS) for row in rows[:BARS])
    body = "".join(f"<tr>{row}" for row in cells)
    return f"<h2>Old path and other path (shadow)</h2><table><tr>{head}{body}</table>"


def _cell(name: str, value: str | float | int | None) -> str:
    return value if isinstance(value, str) else _number(name, value)


def _lines(title: str, periods: Sequence[Period], curves: Mapping[str, Callable[[Period], float | int | None]]) -> str:
    """Curves over time; a period without a value breaks its curve."""
    values = [value for of in curves.values() for p in periods if (value := of(p)) is not None]
    if len(periods) < 2 or not values:
        return ""
    top, first_s, last_s = max(values) or 1.0, periods[0].begins_s, periods[-1].begins_s
    drawn = []
    for (name, of), colour in zip(curves.items(), ("#1668b0", "#c0392b"), strict=False):
        points = [
            f"{MARGIN + (WIDTH - 2 * MARGIN) * (p.begins_s - first_s) / (last_s - first_s):.1f},"
            f"{HEIGHT - 25 - (HEIGHT - 45) * value / top:.1f}"
            for p in periods
            if (value := of(p)) is not None
        ]
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(points)}"/>')
        drawn.append(
            f'<text x="{WIDTH - MARGIN}" y="{15 * len(drawn) // 2}" style="fill:{colour}">{escape(name)}</text>'
        )
    axes = (
        f'<text x="2" y="20">{top:.4g}</text><text x="2" y="{HEIGHT - 25}">0</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 6}">{_when(first_s)}</text>'
        f'<text x="{WIDTH - MARGIN - 95}" y="{HEIGHT - 6}">{_when(last_s)}</text>'
    )
    return f'<h2>{escape(title)}</h2><svg width="{WIDTH}" height="{HEIGHT}">{"".join(drawn)}{axes}</svg>'


def _bars(title: str, counts: Mapping[str, int]) -> str:
    rows = sorted(counts.items(), key=lambda item: -item[1])[:BARS]
    if not rows or not rows[0][1]:
        return ""
    drawn = [_bar(place, name, count, (WIDTH - 300) * count / rows[0][1]) for place, (name, count) in enumerate(rows)]
    return f'<h2>{escape(title)}</h2><svg width="{WIDTH}" height="{8 + 20 * len(rows)}">{"".join(drawn)}</svg>'


def _bar(place: int, name: str, count: int, width: float) -> str:
    top = 20 * place
    return (
        f'<rect x="200" y="{top + 4}" width="{width:.1f}" height="14" fill="#1668b0"/>'
        f'<text x="4" y="{top + 15}">{escape(name[:34])}</text>'
        f'<text x="{205 + width:.1f}" y="{top + 15}">{count:,}</text>'
    )
