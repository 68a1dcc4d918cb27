"""Traces to replay: recorded ones from a folder, handovers composed of their stretches, seeded synthetic ones without.

Direction: a cut needs the way up. The Starlink recording has both. The LTE recordings (NYU-METS) do not say theirs and
are taken for both ways. Lumos holds downlink transfers and is taken for both ways too: fair on Wi-Fi, whose air both
directions share, and kind to 4G, whose uplink is slower.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from attrs import evolve, frozen

from split_models.replay_link import LinkTrace
from split_models.replay_trace import read_trace

SEED = 20_260
HANDOVERS = 4
HANDOVER_S = 1_800.0
STRETCH_S = (20.0, 120.0)
"""A handover trace jumps after so long, uniformly drawn."""

STEP_S = 0.1
_MBIT = 1e6 / 8


@frozen
class Scene:
    """One trace of one class. wifi: its Wi-Fi stretches alone, for handover traces."""

    kind: str
    trace: LinkTrace
    wifi: LinkTrace | None = None


def scenes(folder: Path | None) -> Sequence[Scene]:
    """Recorded traces where there is a folder, synthetic ones otherwise, and handovers of either."""
    plain = recorded(folder) if folder is not None else synthetic()
    return (*plain, *handovers(plain))


def recorded(folder: Path) -> Sequence[Scene]:
    """Every CSV below `folder` that is a trace."""
    return [Scene(_kind(file), read_trace(file)) for file in sorted(folder.rglob("*.csv"))]


def _kind(file: Path) -> str:
    name = file.stem.lower()
    if "wifi" in name:
        return "wifi"
    if "4g" in name:
        return "4g"
    return "starlink" if "throughput_reduced" in name else "lte"


def synthetic(seconds: float = 900.0) -> Sequence[Scene]:
    """Wi-Fi and LTE as autoregressive log rates with fades and holes; the same for one seed."""
    made = []
    for number in range(3):
        rng = random.Random(SEED + number)
        made.append(Scene("wifi", _walk(f"wifi-{number}", rng, seconds, 30.0, 0.25, 0.012, hole_s=0.0)))
        made.append(Scene("lte", _walk(f"lte-{number}", rng, seconds, 6.0, 0.5, 0.025, hole_s=120.0)))
    return made


def _walk(
    name: str, rng: random.Random, seconds: float, mbit: float, spread: float, delay_s: float, hole_s: float
) -> LinkTrace:
    """hole_s: mean time between holes of 2 to 15 s without any rate; 0: none."""
    rates, level, hole_left_s = [], 0.0, 0.0
    for _ in range(int(seconds)):
        level = 0.9 * level + rng.gauss(0.0, spread * math.sqrt(1 - 0.81))
        if hole_left_s <= 0 and hole_s and rng.random() < 1 / hole_s:
            hole_left_s = rng.uniform(2.0, 15.0)
        hole_left_s -= 1.0
        rates.append(0.0 if hole_left_s > 0 else mbit * _MBIT * math.exp(level))
    return LinkTrace(name, 1.0, tuple(rates), tuple(rates), (delay_s,) * len(rates))


def handovers(plain: Sequence[Scene]) -> Sequence[Scene]:
    """Wi-Fi and cellular stretches in turn, each from a place and a recording drawn from the seed."""
    wifi = [scene.trace for scene in plain if scene.kind == "wifi"]
    cellular = [scene.trace for scene in plain if scene.kind == "lte"]
    if not wifi or not cellular:
        return []
    return [
        _handover(f"handover-{number}", random.Random(SEED + number), wifi, cellular) for number in range(HANDOVERS)
    ]


def _handover(name: str, rng: random.Random, wifi: Sequence[LinkTrace], cellular: Sequence[LinkTrace]) -> Scene:
    parts: list[LinkTrace] = []
    while sum(part.seconds for part in parts) < HANDOVER_S:
        source = rng.choice((wifi, cellular)[len(parts) % 2])
        parts.append(_stretch(source, rng.uniform(0.0, source.seconds), rng.uniform(*STRETCH_S)))
    return Scene("handover", joined(name, parts), joined(f"{name} on Wi-Fi", parts[::2]))


def _stretch(trace: LinkTrace, from_s: float, seconds: float) -> LinkTrace:
    """A part of a trace in steps of STEP_S; one that is too short is repeated."""
    places = [
        int((from_s + step * STEP_S) / trace.step_s) % len(trace.up_bytes_per_s)
        for step in range(int(seconds / STEP_S))
    ]
    return LinkTrace(
        trace.name,
        STEP_S,
        tuple(trace.up_bytes_per_s[place] for place in places),
        tuple(trace.down_bytes_per_s[place] for place in places),
        tuple(trace.delays_s[place] for place in places),
    )


def joined(name: str, parts: Sequence[LinkTrace]) -> LinkTrace:
    """Parts of one step length, one after the other."""
    return evolve(
        parts[0],
        name=name,
        up_bytes_per_s=tuple(chain.from_iterable(part.up_bytes_per_s for part in parts)),
        down_bytes_per_s=tuple(chain.from_iterable(part.down_bytes_per_s for part in parts)),
        delays_s=tuple(chain.from_iterable(part.delays_s for part in parts)),
    )
