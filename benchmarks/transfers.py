"""Transfers to learn from: public traces where their folder is given, seeded synthetic ones elsewhere.

Lumos (Lv et al., IEEE INFOCOM 2022): one file per session, one row per transfer; `chunk_size` is in kilobit, as
throughput = chunk_size / delivery_time shows. NYU-METS (Mei et al., Computer Networks 182, 2020): one row per second of
TCP throughput, each with its own unit.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

CLASSES = ("wifi-strong", "wifi-weak", "4g-strong", "4g-weak")
LUMOS = "wifi_4g_lumos"
LTE = "lte_nyu_mets"

_BYTES_PER_KILOBIT = 125
_BITS = {"Mbits/sec": 1e6, "Kbits/sec": 1e3, "bits/sec": 1.0}
_LONGEST_S = 60.0


@frozen
class Transfer:
    """size_bytes took `seconds` and ended at `at_s`."""

    size_bytes: int
    seconds: float
    at_s: float


Session = Sequence[Transfer]


@frozen
class Kind:
    """A synthetic link: seconds = (floor_s + bytes / bytes_per_s) x noise; the rate drifts, and stalls now and then."""

    floor_s: float
    bytes_per_s: float
    noise: float
    drift: float
    stall_ratio: float


_SYNTHETIC = {
    "wifi-strong": Kind(0.05, 6.5e6, 0.03, 0.02, 0.01),
    "wifi-weak": Kind(0.15, 1.0e6, 0.25, 0.25, 0.05),
    "4g-strong": Kind(0.12, 4.0e6, 0.10, 0.08, 0.02),
    "4g-weak": Kind(0.20, 0.6e6, 0.25, 0.20, 0.05),
}


def sessions(traces: Path | None, seed: int = 1) -> tuple[Mapping[str, Sequence[tuple[Session, Session]]], bool]:
    """By class the pairs of sessions with small and with large transfers; True when they are real."""
    if traces is not None and (traces / LUMOS).is_dir():
        return {name: _lumos(traces / LUMOS, name) for name in CLASSES}, True
    return {name: _synthetic(_SYNTHETIC[name], random.Random(f"{seed} {name}")) for name in CLASSES}, False


def interleaved(small: Session, large: Session, chance: random.Random | None = None) -> Session:
    """Both sessions in their own order, in turn or, with `chance`, in an order drawn from it; stamped anew."""
    left, right = list(small), list(large)
    mixed: list[Transfer] = []
    while left and right:
        turn = len(mixed) % 2 == 0 if chance is None else chance.random() * (len(left) + len(right)) < len(left)
        mixed.append((left if turn else right).pop(0))
    rest = [] if chance is None else [*left, *right]
    return _stamped((t.size_bytes, t.seconds) for t in [*mixed, *rest])


def lte_rates(traces: Path | None, seed: int = 1) -> Mapping[str, Sequence[float]]:
    """Bytes per second for each second of each LTE trace."""
    if traces is not None and (traces / LTE).is_dir():
        return {path.stem: _rates(path) for path in sorted((traces / LTE).glob("*.csv"))}
    return {f"synthetic-{number}": _faded(random.Random(f"{seed} {number}")) for number in range(4)}


def sent_over(rates: Sequence[float], period_s: float, sizes: Sequence[int], rtt_s: float, seed: int = 1) -> Session:
    """Transfers of random `sizes` over a link with these rates, one begun each period unless the last still runs."""
    chance = random.Random(seed)
    begin_s, done = 0.0, []
    while begin_s < len(rates):
        size_bytes = chance.choice(sizes)
        seconds = moving_s(rates, begin_s + rtt_s, size_bytes) + rtt_s
        done.append(Transfer(size_bytes, seconds, begin_s + seconds))
        begin_s = max(begin_s + seconds, begin_s + period_s)
    return done


def moving_s(rates: Sequence[float], begin_s: float, size_bytes: float) -> float:
    """Seconds that `size_bytes` take from `begin_s` on; the trace begins again at its end."""
    now_s, left = begin_s, size_bytes
    while left > 0 and now_s - begin_s < _LONGEST_S:
        second = math.floor(now_s)
        rate = rates[second % len(rates)]
        room = (second + 1 - now_s) * rate
        if room >= left and rate > 0:
            return now_s + left / rate - begin_s
        left, now_s = left - room, second + 1.0
    return now_s - begin_s


def moved_bytes(rates: Sequence[float], begin_s: float, end_s: float) -> float:
    """What moves between two moments."""
    moved, now_s = 0.0, begin_s
    while now_s < end_s:
        next_s = min(end_s, math.floor(now_s) + 1.0)
        moved, now_s = moved + rates[math.floor(now_s) % len(rates)] * (next_s - now_s), next_s
    return moved


def _lumos(folder: Path, name: str) -> Sequence[tuple[Session, Session]]:
    files = sorted(folder.glob(f"*-{name}-*.csv"))
    return [(_session(small), _session(large)) for small, large in zip(files[::2], files[1::2], strict=True)]


def _session(file: Path) -> Session:
    with file.open(newline="") as rows:
        return _stamped(
            (int(row["chunk_size"]) * _BYTES_PER_KILOBIT, float(row["delivery_time"])) for row in csv.DictReader(rows)
        )


def _stamped(rows: Iterable[tuple[int, float]]) -> Session:
    at_s, done = 0.0, []
    for size_bytes, seconds in rows:
        at_s += seconds
        done.append(Transfer(size_bytes, seconds, at_s))
    return done


def _rates(file: Path) -> Sequence[float]:
    with file.open(newline="") as rows:
        return [float(value) * _BITS[unit] / 8 for value, unit in csv.reader(rows)]


def _synthetic(kind: Kind, chance: random.Random, runs: int = 3) -> Sequence[tuple[Session, Session]]:
    return [_drawn(kind, chance) for _ in range(runs)]


def _drawn(kind: Kind, chance: random.Random, transfers: int = 150) -> tuple[Session, Session]:
    """Two sessions over the same minutes of the same link, whose rate drifts under both."""
    drift, rows = 0.0, []
    for turn in range(2 * transfers):
        drift = 0.95 * drift + chance.gauss(0, kind.drift)
        size = int((600_000, 2_200_000)[turn % 2] * math.exp(chance.gauss(0, 0.3)))
        seconds = (kind.floor_s + size / (kind.bytes_per_s * math.exp(drift))) * math.exp(chance.gauss(0, kind.noise))
        rows.append((size, seconds * (5.0 if chance.random() < kind.stall_ratio else 1.0)))
    return _stamped(rows[::2]), _stamped(rows[1::2])


def _faded(chance: random.Random, seconds: int = 1500) -> Sequence[float]:
    """Log-normal with a memory of some ten seconds, like a moving LTE client."""
    level, rates = 0.0, []
    for _ in range(seconds):
        level = 0.93 * level + chance.gauss(0, 0.3)
        rates.append(7e5 * math.exp(level))
    return rates
