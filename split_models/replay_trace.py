"""Network traces from files: four kinds of CSV, told apart by their first line.

- `seconds,up_bytes_per_s,down_bytes_per_s,delay_s`: ours; one row per step, evenly spaced.
- `value,unit` without a header: one second of throughput per row (NYU-METS); taken for both directions.
- Lumos: one row per finished transfer; played back to back, so that thinking times are left out.
- Starlink on the Autobahn: one row per second, both directions; holes in the recording are left out.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from protocol.errors import ConfigError
from split_models.replay_link import LinkTrace

MAX_BYTES = 64 << 20
LTE_DELAY_S = 0.025
"""One way; the recordings say nothing of it. Half of an LTE round trip of 50 ms."""

STARLINK_DELAY_S = 0.022
FINE_STEP_S = 0.1

UNEVEN_RATIO = 0.01
"""Steps of our own traces may differ by this much: times are written with few digits."""

_UNITS = {"bits/sec": 1 / 8, "Kbits/sec": 1e3 / 8, "Mbits/sec": 1e6 / 8, "Gbits/sec": 1e9 / 8}
_MBIT = 1e6 / 8
_LUMOS_BYTES = 125.0
"""A chunk's size is in kilobit."""

Rows = Sequence[Sequence[str]]


def read_trace(file: Path) -> LinkTrace:
    """The trace in `file`. Raises ConfigError that names the row when it is none of the four kinds."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{file.name} is over {MAX_BYTES >> 20} MiB", next_step="cut the trace into parts")
        with file.open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        why = (err.strerror if isinstance(err, OSError) else None) or err
        raise ConfigError(f"cannot read the trace {file}: {why}", next_step="give a CSV file") from err
    if not rows:
        raise ConfigError(f"the trace {file.name} is empty", next_step="give a file with rows")
    return _kind(rows, file.name)(file.stem, rows)


def _kind(rows: Rows, name: str) -> Callable[[str, Rows], LinkTrace]:
    first = rows[0]
    if first[:3] == ["seconds", "up_bytes_per_s", "down_bytes_per_s"]:
        return _own
    if "delivery_time" in first and "chunk_size" in first:
        return _lumos
    if "upload" in first and "download" in first:
        return _both_ways
    if len(first) == 2 and first[1].strip() in _UNITS:
        return _seconds_of_throughput
    raise ConfigError(
        f"{name} is not a trace that is known",
        next_step="begin it with seconds,up_bytes_per_s,down_bytes_per_s,delay_s, "
        f"or give rows of value,unit without a header, the unit one of {', '.join(_UNITS)}",
    )


def _own(name: str, rows: Rows) -> LinkTrace:
    columns = _columns(name, rows, ("seconds", "up_bytes_per_s", "down_bytes_per_s"))
    seconds = columns["seconds"]
    step_s = seconds[1] - seconds[0] if len(seconds) > 1 else 1.0
    if step_s <= 0:
        raise ConfigError(f"{name}: the seconds do not grow", field="seconds")
    for place, (before, after) in enumerate(pairwise(seconds), 3):
        if abs(after - before - step_s) > UNEVEN_RATIO * step_s:
            raise ConfigError(
                f"{name}, row {place}: {after - before:g} s after the row before it, not {step_s:g} s",
                next_step="write one row for each step, evenly spaced", field="seconds",
            )  # fmt: skip
    delays = _columns(name, rows, ("delay_s",))["delay_s"] if "delay_s" in rows[0] else (LTE_DELAY_S,) * len(seconds)
    return LinkTrace(name, step_s, columns["up_bytes_per_s"], columns["down_bytes_per_s"], delays)


def _seconds_of_throughput(name: str, rows: Rows) -> LinkTrace:
    rates = tuple(_number(name, place, row[0]) * _unit(name, place, row) for place, row in enumerate(rows))
    return LinkTrace(name, 1.0, rates, rates, (LTE_DELAY_S,) * len(rates))


def _both_ways(name: str, rows: Rows) -> LinkTrace:
    columns = _columns(name, rows, ("upload", "download"))
    up, down = (tuple(_MBIT * rate for rate in columns[way]) for way in ("upload", "download"))
    return LinkTrace(name, 1.0, up, down, (STARLINK_DELAY_S,) * len(up))


def _lumos(name: str, rows: Rows) -> LinkTrace:
    """The shortest transfer's time is the round trip; the rest of each transfer's time moves its bytes."""
    columns = _columns(name, rows, ("chunk_size", "delivery_time"))
    sizes = [_LUMOS_BYTES * size for size in columns["chunk_size"]]
    round_trip_s = min(columns["delivery_time"])
    moves = [
        (size, seconds - round_trip_s)
        for size, seconds in zip(sizes, columns["delivery_time"], strict=True)
        if seconds - round_trip_s > 1e-3
    ]
    rates = _binned(moves)
    if not rates:
        raise ConfigError(f"{name}: no transfer took longer than the shortest", field="delivery_time")
    return LinkTrace(name, FINE_STEP_S, rates, rates, (round_trip_s / 2,) * len(rates))


def _binned(moves: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Transfers back to back as one rate per FINE_STEP_S."""
    moved = [0.0] * (int(sum(seconds for _, seconds in moves) / FINE_STEP_S) + 1)
    at_s = 0.0
    for size, seconds in moves:
        ends_s = at_s + seconds
        while at_s < ends_s - 1e-9:
            step = min(int(at_s / FINE_STEP_S + 1e-9), len(moved) - 1)
            part_s = min(ends_s, (step + 1) * FINE_STEP_S) - at_s
            part_s = part_s if part_s > 0 else ends_s - at_s
            moved[step] += size * part_s / seconds
            at_s += part_s
    return tuple(size / FINE_STEP_S for size in moved[:-1])


def _columns(name: str, rows: Rows, names: Sequence[str]) -> Mapping[str, tuple[float, ...]]:
    places = {}
    for wanted in names:
        if wanted not in rows[0]:
            raise ConfigError(f"{name} has no column {wanted}", field=wanted)
        places[wanted] = rows[0].index(wanted)
    return {
        wanted: tuple(_number(name, row, cells[place]) if place < len(cells) else 0.0 for row, cells in _numbered(rows))
        for wanted, place in places.items()
    }


def _numbered(rows: Rows) -> list[tuple[int, Sequence[str]]]:
    return list(enumerate(rows))[1:]


def _number(name: str, row: int, text: str) -> float:
    try:
        value = float(text or 0.0)
    except ValueError as err:
        raise ConfigError(f"{name}, row {row + 1}: {text[:40]!r} is not a number") from err
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"{name}, row {row + 1}: {text[:40]} is not a rate")
    return value


def _unit(name: str, row: int, cells: Sequence[str]) -> float:
    factor = _UNITS.get(cells[1].strip()) if len(cells) > 1 else None
    if factor is None:
        raise ConfigError(f"{name}, row {row + 1}: the unit is not one of {', '.join(_UNITS)}")
    return factor
