"""A small progress bar on stderr: silent for the first two seconds, plain lines when stderr is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from protocol.clock import Clock

QUIET_S = 2.0
REDRAW_S = 0.1
# Logs want a line now and then, not a bar.
PLAIN_EVERY_S = 10.0
BAR_CELLS = 28


class ProgressBar:
    """Shows `done` of `total` (bytes unless `unit` says otherwise). Use as a context manager."""

    def __init__(
        self, label: str, *, unit: str = "bytes", out: TextIO | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._label = label
        self._unit = unit
        self._out = sys.stderr if out is None else out
        self._clock = clock
        self._started_s = clock()
        self._drawn_s = 0.0
        self._shown = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._shown and self._out.isatty():
            self._out.write("\n")

    def update(self, done: float, total: float | None) -> None:
        """Report progress; draws at most ten times a second."""
        now_s = self._clock()
        every_s = REDRAW_S if self._out.isatty() else PLAIN_EVERY_S
        if now_s - self._started_s < QUIET_S or (self._shown and now_s - self._drawn_s < every_s):
            return
        self._drawn_s, self._shown = now_s, True
        line = line_for(self._label, done, total, now_s - self._started_s, self._unit)
        self._out.write(f"\r{line}\x1b[K" if self._out.isatty() else line + "\n")
        self._out.flush()


def line_for(label: str, done: float, total: float | None, elapsed_s: float, unit: str) -> str:
    """One line of progress.

    >>> line_for("pull", 50, 100, 5.0, "steps")
    'pull [##############..............]  50 %  50 of 100 steps'
    """
    amount = _amount(done, unit)
    if not total:
        return f"{label}  {amount}"
    ratio = min(1.0, done / total)
    cells = round(ratio * BAR_CELLS)
    bar = "#" * cells + "." * (BAR_CELLS - cells)
    rate = f"  {_amount(done / elapsed_s, unit)}/s" if unit == "bytes" and elapsed_s > 0 else ""
    of = f"{amount} of {_amount(total, unit)}" if unit == "bytes" else f"{done:g} of {total:g} {unit}"
    return f"{label} [{bar}] {ratio:>4.0%}".replace("%", " %") + f"  {of}{rate}"


def _amount(value: float, unit: str) -> str:
    if unit != "bytes":
        return f"{value:g} {unit}"
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:.1f} {name}"
    return f"{value:.0f} B"
