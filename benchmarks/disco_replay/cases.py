"""What is replayed: services by their TTFTs, workloads by lengths and gaps, devices by the price list."""

from __future__ import annotations

import csv
import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any

from attrs import frozen

from gateway.replay import Asked, Recording, Speed

SEED = 20250217
BUSY_AT_SCALE_1 = 0.05
"""Arrivals at scale 1: a device that did everything alone would be this busy; 0.5 at scale 10."""

SETTINGS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("prices.toml").read_text(encoding="utf-8"))


@frozen
class Service:
    """TTFTs of one service, infinite for failures. kind: key of the price list and of the paper's tables."""

    name: str
    kind: str
    ttfts_s: tuple[float, ...]


@frozen
class Workload:
    """(prompt tokens, answer tokens) and gaps between arrivals with mean 1."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    gaps: tuple[float, ...]


def services(traces: Path | None) -> Sequence[Service]:
    """Recorded ones, or two synthetic ones with a light and a heavy tail."""
    if traces is None:
        draw = random.Random(SEED)
        light = [draw.lognormvariate(-0.6, 0.45) for _ in range(300)]
        heavy = [draw.lognormvariate(0.0, 1.3) for _ in range(297)] + [inf] * 3
        return [Service("synthetic light", "gpt", tuple(light)), Service("synthetic heavy", "llama", tuple(heavy))]
    fastest: dict[str, list[float]] = {}
    for row in csv.DictReader((traces / "thefastest_ai/ttft_services_a.csv").open(encoding="utf-8")):
        fastest.setdefault(row["model"], []).append(float(row["ttft_s"]))
    llama = [value for name, values in fastest.items() if "llama-3-70b" in name for value in values]
    leaderboard = traces / "llmperf_leaderboard"
    return [
        Service("gpt-4-turbo", "gpt", tuple(fastest["openai/gpt-4-turbo"])),
        Service("command-r", "command", tuple(fastest["cohere/command-r"])),
        Service("llama-3-70b", "llama", tuple(llama)),
        Service("gemini-1.5-pro", "other", tuple(fastest["google/gemini-1.5-pro-preview-0409"])),
        Service("replicate 70b", "other", _leaderboard(leaderboard / "replicate_70b.json")),
        Service("perplexity 70b", "other", _leaderboard(leaderboard / "perplexity_70b.json")),
    ]


def _leaderboard(file: Path) -> tuple[float, ...]:
    rows = json.loads(file.read_text(encoding="utf-8"))
    return tuple(inf if row["error_code"] or row["ttft_s"] is None else float(row["ttft_s"]) for row in rows)


def workloads(traces: Path | None, count: int) -> Sequence[Workload]:
    """Short instructions like Alpaca's, and Azure's conversations and code where their traces are."""
    draw = random.Random(SEED + 1)
    # AlpacaEval has means of 37 and 309 tokens, medians of 23 and 287, a P99 of 251 for prompts.
    short = [
        (max(1, round(draw.lognormvariate(3.135, 1.0))), max(1, round(draw.lognormvariate(5.66, 0.45))))
        for _ in range(count)
    ]
    if traces is None:
        long = [
            (max(1, round(draw.lognormvariate(6.75, 0.85))), max(1, round(draw.lognormvariate(5.3, 0.7))))
            for _ in range(count)
        ]
        poisson = _normal([draw.expovariate(1.0) for _ in range(count)])
        bursty = _normal([draw.gammavariate(0.2, 1.0) for _ in range(count)])
        return [Workload("alpaca-like", tuple(short), bursty), Workload("conversation-like", tuple(long), poisson)]
    found = [Workload("alpaca-like", tuple(short), _cycled(_burst_gaps(traces), count))]
    for name in ("conv", "code"):
        rows = list(csv.DictReader((traces / f"azure2023/{name}_part1.csv").open(encoding="utf-8")))
        lengths = [(max(1, int(r["ContextTokens"])), max(1, int(r["GeneratedTokens"]))) for r in rows]
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
        gaps = [max(0.0, after - before) for before, after in pairwise(times)]
        found.append(Workload(f"azure {name}", _cycled(lengths, count), _cycled(_normal(gaps), count)))
    return found


def _burst_gaps(traces: Path) -> Sequence[float]:
    rows = csv.DictReader((traces / "burstgpt/burstgpt_1_slice.csv").open(encoding="utf-8"))
    times = [float(row["Timestamp"]) for row in rows]
    gaps = sorted(max(0.0, after - before) for before, after in pairwise(times))
    # The night is no gap between requests of one sitting.
    kept = gaps[: int(0.98 * len(gaps))]
    random.Random(SEED + 2).shuffle(kept)
    return _normal(kept)


def _normal(gaps: Sequence[float]) -> tuple[float, ...]:
    mean = sum(gaps) / len(gaps)
    return tuple(gap / mean for gap in gaps)


def _cycled(items: Sequence[Any], count: int) -> tuple[Any, ...]:
    return tuple(items[place % len(items)] for place in range(count))


def devices() -> Mapping[str, Speed]:
    """By name, as the price list has them."""
    return {name: Speed(found["prefill"], found["decode"]) for name, found in SETTINGS["devices"].items()}


def recording(service: Service, work: Workload, device: Speed, scale: float) -> Recording:
    """Requests at `scale`; each one's TTFT is drawn from the service's, the same for every device, budget and scale.

    Between two recorded values it is interpolated: some have 64 values, of which the largest alone would be every P99.
    """
    draw = random.Random(f"{SEED} {service.name} {work.name}")
    ordered = sorted(service.ttfts_s)
    ttfts_s = [_between(ordered, draw.random()) for _ in work.lengths]
    busy_s = sum(device.prefill_s(a) + b / device.decode_tokens_per_s for a, b in work.lengths) / len(work.lengths)
    gap_s, at_s, requests = busy_s / BUSY_AT_SCALE_1 / scale, 0.0, []
    for (prompt_tokens, answer_tokens), gap in zip(work.lengths, work.gaps, strict=True):
        at_s += gap * gap_s
        requests.append(Asked(at_s, prompt_tokens, answer_tokens))
    return Recording(requests, ttfts_s, device)


def _between(ordered: Sequence[float], share: float) -> float:
    """The quantile of a share in [0, 1), linear between neighbours; a failure is not mixed with anything."""
    place = share * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[min(len(ordered) - 1, int(place) + 1)]
    return low + (high - low) * (place - int(place)) if isfinite(high) else low if isfinite(low) else inf
