"""The curve of the hedging budget: as a PNG where matplotlib is installed, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Curve = Mapping[float, tuple[float, float]]
"""Budget -> mean over the oracle's mean, P99 over the best fixed arm's."""


def as_text(curve: Curve) -> list[str]:
    """One bar per budget."""
    rows = ["budget   mean to oracle   p99 to best fixed"]
    most = max(max(pair) for pair in curve.values())
    for budget, (mean_ratio, p99_ratio) in curve.items():
        bar = "#" * round(30 * p99_ratio / most)
        rows.append(f"{budget:5.0%}    {mean_ratio:10.3f}   {p99_ratio:14.3f}   {bar}")
    return rows


def save(curves: Mapping[str, Curve], file: Path) -> bool:
    """A PNG with one line per class of traces. False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for kind, curve in curves.items():
        budgets = [100 * budget for budget in curve]
        for place in (0, 1):
            axes[place].plot(budgets, [pair[place] for pair in curve.values()], marker="o", label=kind)
    for place, title in enumerate(("mean over the oracle's mean", "P99 over the best fixed arm's P99")):
        axes[place].set_xlabel("hedging budget, % of device seconds")
        axes[place].set_title(title)
    axes[0].legend()
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True
