"""Keys of the whole run, and what to say about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.disco_replay.cases import SETTINGS
from benchmarks.disco_replay.costs import Saved
from benchmarks.disco_replay.grid import Cell

SHORT = {"device_constrained": "d", "server_constrained": "s"}


def keys_of(cells: Sequence[Cell]) -> dict[str, object]:
    """Extremes over all cells."""
    keys: dict[str, object] = {
        "cells": len(cells),
        "budget_violation_worst": max(one.over_plan for one in cells),
        "budget_run_over_mean": sum(one.over_run for one in cells) / len(cells),
        "budget_run_over_worst": max(one.over_run for one in cells),
    }
    for regime, short in SHORT.items():
        mine = [one for one in cells if one.regime == regime]
        for what in ("mean", "tail"):
            values = [getattr(one, f"{what}_reduction") for one in mine]
            keys[f"{what}_reduction_{short}_min"] = min(values)
            keys[f"{what}_reduction_{short}_max"] = max(values)
            keys[f"{what}_reduction_{short}_not_positive"] = sum(value <= 0 for value in values)
    keys["oracle_ratio_worst"] = max(one.oracle_ratio for one in cells)
    keys["oracle_ratio_median"] = sorted(one.oracle_ratio for one in cells)[len(cells) // 2]
    return keys


def against_paper(cells: Sequence[Cell]) -> tuple[dict[str, object], list[str]]:
    """The mean tail reduction over budgets at scale 1 on short instructions, beside the paper's cell."""
    rows, least = [], []
    for kind, by_device in SETTINGS["paper"].items():
        for device, reported in by_device.items():
            for regime, short in SHORT.items():
                mine = [
                    one
                    for one in cells
                    if (one.kind, one.device, one.regime, one.scale) == (kind, device, regime, 1.0)
                    and one.work.startswith("alpaca")
                ]
                if not mine:
                    continue
                ours = sum(one.tail_reduction for one in mine) / len(mine)
                bound = sum(one.tail_bound for one in mine) / len(mine)
                least.append(ours - reported[short])
                where = f"{mine[0].service} on {device}, {regime}"
                rows.append(f"P99, {where}: {ours:.1%}, paper {reported[short]:.1%}, bound {bound:.1%}")
    return ({"tail_over_paper_worst": min(least)} if least else {}), rows


def savings(found: Sequence[Saved]) -> tuple[dict[str, object], list[str]]:
    """The best of the fixed price list per regime, and the sweep."""
    keys: dict[str, object] = {}
    rows = []
    for regime, short in SHORT.items():
        mine = [one for one in found if one.regime == regime]
        fixed = max((one for one in mine if one.factor == 1.0), key=lambda one: one.saving)
        keys[f"migration_cost_saving_{short}"] = fixed.saving
        keys[f"migration_cost_bound_{short}"] = fixed.bound
        rows.append(
            f"best {regime}: {fixed.service} on {fixed.device}, budget {fixed.budget}, {fixed.moved_ratio:.0%} moved"
        )
        for factor in sorted({one.factor for one in mine}):
            best = max((one for one in mine if one.factor == factor), key=lambda one: one.saving)
            least = min((one for one in mine if one.factor == factor), key=lambda one: one.saving)
            span = f"{least.saving:.1%}..{best.saving:.1%}, bound {best.bound:.1%}"
            rows.append(f"{regime}, a joule at {factor:g} times: saves {span}")
    return keys, rows


def worst_of(cells: Sequence[Cell]) -> list[str]:
    """The weakest cells by name."""
    found = []
    for what in ("mean_reduction", "tail_reduction", "oracle_ratio", "over_run"):
        one = (max if what in ("oracle_ratio", "over_run") else min)(cells, key=lambda c: getattr(c, what))
        found.append(f"worst {what} {getattr(one, what):.4f}: {line_of(one)}")
    return found


def line_of(one: Cell) -> str:
    """A cell in one line."""
    return (
        f"{one.service}, {one.work}, {one.device}, {SHORT[one.regime]}, scale {one.scale:g}, budget {one.budget}: "
        f"mean {one.mean_s:.2f} s ({one.mean_reduction:+.1%}), P99 {one.tail_s:.2f} s ({one.tail_reduction:+.1%}), "
        f"oracle {one.oracle_s:.2f} s, spent {one.over_run:+.3f}"
    )


def rows_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """By service, workload, device and regime: reductions over budgets and scales."""
    groups: dict[tuple[str, str, str, str], list[Cell]] = {}
    for one in cells:
        groups.setdefault((one.service, one.work, one.device, SHORT[one.regime]), []).append(one)
    rows = []
    for (service, work, device, regime), mine in groups.items():
        row: dict[str, Any] = {"service": service, "work": work, "device": device, "regime": regime}
        for what in ("mean_reduction", "tail_reduction", "oracle_ratio"):
            values = [getattr(one, what) for one in mine]
            row[what] = [round(value, 4) for value in (min(values), sum(values) / len(values), max(values))]
        rows.append(row)
    return rows
