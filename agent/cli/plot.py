"""Latency against bandwidth for every arm: in the terminal, or as a PNG with matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, log10
from pathlib import Path

from protocol.errors import ConfigError
from protocol.extras import install_step
from split_models.explain import MBIT, Curve

MARKS = "ox+*#@%&=~"
MAX_SECONDS = 100.0
"""Above this nobody waits: curves leave the plot."""


def terminal_plot(curves: Sequence[Curve], rates: Sequence[float], width: int = 72, height: int = 18) -> list[str]:
    """Lines of text, both scales logarithmic; the legend follows. Where there are more curves than marks, those are
    drawn that come nearest to the best one somewhere; the others, and those without a finite point, are named only.
    """
    nearest = sorted((curve for curve in curves if _points(curve)), key=lambda curve: _behind(curve, curves))
    drawn = [curve for curve in curves if curve in nearest[: len(MARKS)]]
    if not drawn:
        return ["no arm can be drawn"]
    low, high = _range(drawn)
    grid = [[" "] * width for _ in range(height)]
    for mark, curve in reversed(list(zip(MARKS, drawn, strict=False))):
        for place in range(width):
            seconds = curve.seconds[round(place / (width - 1) * (len(rates) - 1))]
            if isfinite(seconds) and low <= seconds <= high:
                row = round((log10(high) - log10(seconds)) / max(1e-9, log10(high) - log10(low)) * (height - 1))
                grid[row][place] = mark
    lines = [f"{_label(row, low, high, height):>9} |{''.join(cells)}" for row, cells in enumerate(grid)]
    lines.append(" " * 10 + "+" + "-" * width)
    ends = f"{rates[0] / MBIT:g} Mbit/s", f"{rates[-1] / MBIT:g} Mbit/s"
    lines.append(" " * 11 + ends[0] + " " * max(1, width - len(ends[0]) - len(ends[1])) + ends[1])
    lines += [f"  {mark} {curve.arm}{_why(curve)}" for mark, curve in zip(MARKS, drawn, strict=False)]
    return lines + [f"    {curve.arm}: not drawn" for curve in curves if curve not in drawn]


def png_plot(curves: Sequence[Curve], rates: Sequence[float], title: str, file: Path) -> None:
    """Write `file`. Raises ConfigError when matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ConfigError("a PNG needs matplotlib", next_step=f"{install_step('plot')}, or leave --png out") from err
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        seconds = [1e3 * s if isfinite(s) else float("nan") for s in curve.seconds]
        style = ":" if curve.excluded else "-"
        axes.plot([rate / MBIT for rate in rates], seconds, style, label=f"{curve.arm}{_why(curve)}")
    axes.set(xscale="log", yscale="log", xlabel="bandwidth, Mbit/s", ylabel="predicted latency, ms", title=title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as err:
        raise ConfigError(f"cannot write {file}: {err.strerror}", next_step="name another file", field="--png") from err


def _points(curve: Curve) -> list[float]:
    return [s for s in curve.seconds if isfinite(s) and 0 < s <= MAX_SECONDS]


def _behind(curve: Curve, curves: Sequence[Curve]) -> tuple[bool, float]:
    """What may be taken comes first; then by how many times slower than the best it is where it does best."""
    best = [min(moment) for moment in zip(*(one.seconds for one in curves), strict=True)]
    ratios = [own / least for own, least in zip(curve.seconds, best, strict=True) if isfinite(own) and least > 0]
    return bool(curve.excluded), min(ratios, default=inf)


def _range(curves: Sequence[Curve]) -> tuple[float, float]:
    points = [s for curve in curves for s in _points(curve)]
    return min(points) / 1.1, max(points) * 1.1


def _label(row: int, low: float, high: float, height: int) -> str:
    if row % 4 and row != height - 1:
        return ""
    seconds = 10 ** (log10(high) - row / (height - 1) * (log10(high) - log10(low)))
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def _why(curve: Curve) -> str:
    return f" ({curve.excluded})" if curve.excluded else ""
