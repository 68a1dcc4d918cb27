"""From cells to the keys of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from benchmarks.split_replay.compare import CHOSEN, Cell
from split_models.arm_cost import DEVICE_ARM

CONTESTED = 0.99
"""A cell whose oracle answers less than this share on the device leaves something to decide."""


def keys_of(cells: Sequence[Cell]) -> dict[str, object]:
    """At the chosen budget."""
    to_oracle = [one.ours[CHOSEN].mean_s / one.oracle.mean_s for one in cells]
    to_best = [one.ours[CHOSEN].mean_s / one.fixed[one.best].mean_s for one in cells]
    p99_to_best = [one.ours[CHOSEN].p99_s / one.fixed[one.best].p99_s for one in cells]
    slow = [one.ours[CHOSEN].mean_s / one.flagship.mean_s for one in cells if one.flagship is not None]
    contested = [r for r, one in zip(to_oracle, cells, strict=True) if one.oracle_on_device < CONTESTED]
    keys: dict[str, object] = {
        "mean_ratio_to_oracle_mean": mean(to_oracle),
        "mean_ratio_to_oracle_worst": max(to_oracle),
        "mean_ratio_to_best_static_worst": max(to_best),
        "p99_ratio_to_best_static_worst": max(p99_to_best),
        **_handover(cells),
        "slow_device_ratio_to_flagship_static": mean(slow) if slow else None,
        "switches": sum(one.switches for one in cells),
        "contested_mean_ratio_to_oracle_mean": mean(contested) if contested else None,
        "mean_ratio_to_best_static_mean": mean(to_best),
        "p99_ratio_to_best_static_mean": mean(p99_to_best),
        **_bounds(cells),
        "hedged_share_worst": max(one.hedged_share for one in cells),
        "cells": len(cells),
        "contested_cells": len(contested),
    }
    return keys


def _bounds(cells: Sequence[Cell]) -> Mapping[str, object]:
    """What bounds ours: the same figures of one who knows the link exactly as it was one request ago, and does not
    hedge; how late the hedge of a cut is whose head has run first, in the cell with the worst P99; and the P99 there of
    ours when every device second may be hedged.
    """
    worst = max(cells, key=lambda one: one.ours[CHOSEN].mean_s / one.oracle.mean_s)
    late = max(cells, key=lambda one: one.ours[CHOSEN].p99_s / one.fixed[one.best].p99_s)
    return {
        "informed_mean_ratio_to_oracle_mean": mean(one.informed.mean_s / one.oracle.mean_s for one in cells),
        "informed_mean_ratio_to_oracle_worst": max(one.informed.mean_s / one.oracle.mean_s for one in cells),
        "informed_mean_ratio_to_oracle_of_our_worst": worst.informed.mean_s / worst.oracle.mean_s,
        "informed_mean_ratio_to_best_static_worst": max(
            one.informed.mean_s / one.fixed[one.best].mean_s for one in cells
        ),
        "informed_p99_ratio_to_best_static_worst": max(one.informed.p99_s / one.fixed[one.best].p99_s for one in cells),
        "late_cut_ratio_of_our_worst_p99": late.late_cut_ratio,
        "informed_p99_ratio_to_best_static_of_our_worst": late.informed.p99_s / late.fixed[late.best].p99_s,
        "unbounded_p99_ratio_to_best_static_of_our_worst": late.ours[1.0].p99_s / late.fixed[late.best].p99_s,
    }


def _handover(cells: Sequence[Cell]) -> Mapping[str, object]:
    """Over the cells whose best arm on Wi-Fi needs the link: one that stays on the device has nothing to hand over."""
    moved = [one for one in cells if one.wifi_arm and one.wifi_arm != str(DEVICE_ARM)]
    if not moved:
        return {"handover_p99_ratio_to_wifi_static": None, "handover_spread_ratio_to_wifi_static": None}
    static = [one.fixed[one.wifi_arm] for one in moved]
    pairs = list(zip(moved, static, strict=True))
    return {
        "handover_p99_ratio_to_wifi_static": mean(one.ours[CHOSEN].p99_s / fix.p99_s for one, fix in pairs),
        "handover_spread_ratio_to_wifi_static": mean(one.ours[CHOSEN].spread_s / fix.spread_s for one, fix in pairs),
        "handover_p99_ratio_of_the_oracle": mean(one.oracle.p99_s / fix.p99_s for one, fix in pairs),
        "handover_spread_ratio_of_the_oracle": mean(one.oracle.spread_s / fix.spread_s for one, fix in pairs),
        "handover_cells": len(moved),
    }


def worst_of(cells: Sequence[Cell]) -> list[str]:
    """Which cells the worst figures are of."""

    def named(one: Cell, figure: float) -> str:
        return f"{figure:.2f} {one.model} {one.speed} on {one.scene}"

    oracle = max(cells, key=lambda one: one.ours[CHOSEN].mean_s / one.oracle.mean_s)
    best = max(cells, key=lambda one: one.ours[CHOSEN].mean_s / one.fixed[one.best].mean_s)
    p99 = max(cells, key=lambda one: one.ours[CHOSEN].p99_s / one.fixed[one.best].p99_s)
    bound = p99.oracle.p99_s / p99.fixed[p99.best].p99_s
    return [
        f"worst mean to the oracle: {named(oracle, oracle.ours[CHOSEN].mean_s / oracle.oracle.mean_s)}",
        f"worst mean to the best fixed arm: {named(best, best.ours[CHOSEN].mean_s / best.fixed[best.best].mean_s)}",
        f"worst P99 to the best fixed arm: {named(p99, p99.ours[CHOSEN].p99_s / p99.fixed[p99.best].p99_s)} "
        f"(the oracle there: {bound:.2f})",
    ]
