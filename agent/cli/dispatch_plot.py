"""TTFT against budget in the terminal; with matplotlib (extra `plot`) also the distributions, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from protocol.errors import ConfigError
from protocol.extras import install_step

WIDTH, HEIGHT = 60, 14
MARKS = "o+x*"

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, seconds) by name."""


def terminal_plot(series: Series, title: str) -> list[str]:
    """Lines of text: seconds over the budget, linear; a later name is drawn below an earlier one."""
    points = [point for line in series.values() for point in line]
    if not points:
        return [f"{title}: nothing to draw"]
    top = max(seconds for _, seconds in points) or 1.0
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, line in reversed(list(zip(MARKS, series.values(), strict=False))):
        for budget, seconds in line:
            grid[round((1 - seconds / top) * (HEIGHT - 1))][round(budget * (WIDTH - 1))] = mark
    lines = [title]
    for row, cells in enumerate(grid):
        label = f"{top * (1 - row / (HEIGHT - 1)):.3g} s" if row in (0, HEIGHT // 2, HEIGHT - 1) else ""
        lines.append(f"{label:>9} |{''.join(cells)}")
    lines.append(" " * 10 + "+" + "-" * WIDTH)
    lines.append(" " * 11 + "budget 0" + " " * (WIDTH - 9) + "1")
    return lines + [f"  {mark} {name}" for mark, name in zip(MARKS, series, strict=False)]


def png_plot(curves: Mapping[str, Series], cdfs: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> None:
    """Per regime: TTFT against budget on the left, distributions on the right. Raises ConfigError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ConfigError("a PNG needs matplotlib", next_step=f"{install_step('plot')}, or leave --png out") from err
    figure = Figure(figsize=(11, 4.2 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(curves), 2, squeeze=False)
    for (left, right), (regime, series) in zip(axes, curves.items(), strict=True):
        for name, points in series.items():
            left.plot([x for x, _ in points], [y for _, y in points], "o-", label=name, markersize=3)
        left.set(xlabel="budget", ylabel="mean TTFT, s", title=regime, yscale="log")
        for name, values in cdfs[regime].items():
            ordered = sorted(values)
            right.plot(ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], label=name)
        right.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log")
        for one in (left, right):
            one.grid(True, which="both", alpha=0.3)
            one.legend(fontsize="small")
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as err:
        raise ConfigError(f"cannot write {file}: {err.strerror}", next_step="name another file", field="--png") from err
