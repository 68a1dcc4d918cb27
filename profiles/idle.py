"""How much of the CPU was idle since the last look, from /proc/stat."""

from __future__ import annotations

from pathlib import Path

from profiles.files import read_text

_IDLE, _IO_WAIT = 3, 4
_COUNTED = 8
"""user, nice, system, idle, iowait, irq, softirq, steal; guest time is in user already (proc(5))."""


class CpuIdle:
    """Idle share of all CPUs of this machine between two calls; waiting for a disk counts as idle."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = root / "proc" / "stat"
        self._last: tuple[int, int] | None = None

    def ratio(self) -> float | None:
        """0..1 since the call before; None at the first one, without /proc, and when no time has passed."""
        now, last = self._read(), self._last
        self._last = now
        if now is None or last is None or now[1] <= last[1]:
            return None
        return min(1.0, max(0.0, (now[0] - last[0]) / (now[1] - last[1])))

    def _read(self) -> tuple[int, int] | None:
        fields = (read_text(self._file) or "").partition("\n")[0].split()
        try:
            ticks = [int(field) for field in fields[1 : 1 + _COUNTED]]
        except ValueError:
            return None
        if fields[:1] != ["cpu"] or len(ticks) <= _IO_WAIT:
            return None
        return ticks[_IDLE] + ticks[_IO_WAIT], sum(ticks)
