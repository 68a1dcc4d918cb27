"""One cell of the grid: the product's dispatch and random routing at equal budget, on the same requests."""

from __future__ import annotations

import random

from attrs import frozen

from benchmarks.disco_replay.cases import SEED, Service, Workload, devices, recording
from gateway.dispatch_table import Regime
from gateway.replay import (
    Outcome,
    Recording,
    learnt,
    least_quantile_s,
    oracle_mean_s,
    quantile_s,
    routed,
)
from protocol.policy import DispatchPolicy

TAIL = 0.99
CHANCE_RATIO = 0.02
"""A run of some thousand long-tailed prompts misses its budget by up to so much by chance."""

RANDOM_RUNS = 4
"""Random routing is the mean over so many runs, since luck is large on long-tailed lengths."""


@frozen
class Place:
    """Where a cell lies."""

    service: Service
    work: Workload
    device: str
    regime: Regime
    scale: float
    budget: float


@frozen
class Cell:
    """Figures of one cell. over_plan: worst excess of a plan's expectation; over_run: of what the run really spent."""

    service: str
    kind: str
    work: str
    device: str
    regime: Regime
    scale: float
    budget: float
    mean_s: float
    tail_s: float
    random_mean_s: float
    random_tail_s: float
    oracle_s: float
    least_tail_s: float
    over_plan: float
    over_run: float

    @property
    def mean_reduction(self) -> float:
        return 1.0 - self.mean_s / self.random_mean_s

    @property
    def tail_reduction(self) -> float:
        return 1.0 - self.tail_s / self.random_tail_s

    @property
    def tail_bound(self) -> float:
        """No dispatch within the budget can reduce the tail by more, by an oracle without a queue."""
        return 1.0 - self.least_tail_s / self.random_tail_s

    @property
    def oracle_ratio(self) -> float:
        return self.mean_s / self.oracle_s


def cell(place: Place) -> Cell:
    """Replay one place. The baseline and the oracle may spend what ours really spent."""
    found = recording(place.service, place.work, devices()[place.device], place.scale)
    draws = _draws(place, "ours", len(found.requests))
    outcome, over_plan = learnt(found, place.regime, DispatchPolicy(budget_ratio=place.budget), draws)
    over_run = outcome.spent_ratio(found.requests, device=place.regime == "device_constrained") - place.budget
    # Chance of a finite run is evened out both ways; what ours saved on purpose is not taken from the baseline.
    budget = place.budget + (over_run if over_run > -CHANCE_RATIO else 0.0)
    runs = [routed(found, place.regime, budget, _draws(place, f"random {n}", len(draws))) for n in range(RANDOM_RUNS)]
    ordered = sorted(outcome.ttfts_s)
    return Cell(
        service=place.service.name,
        kind=place.service.kind,
        work=place.work.name,
        device=place.device,
        regime=place.regime,
        scale=place.scale,
        budget=place.budget,
        mean_s=sum(ordered) / len(ordered),
        tail_s=quantile_s(ordered, TAIL),
        random_mean_s=_random_mean_s(found, runs, place.regime, budget),
        random_tail_s=sum(quantile_s(sorted(run.ttfts_s), TAIL) for run in runs) / len(runs),
        oracle_s=oracle_mean_s(found, place.regime, budget),
        least_tail_s=least_quantile_s(found, TAIL, place.regime, budget),
        over_plan=over_plan,
        over_run=over_run,
    )


def _draws(place: Place, what: str, count: int) -> list[float]:
    draw = random.Random(f"{SEED} {what} {place.service.name} {place.work.name} {place.budget}")
    return [draw.random() for _ in range(count)]


def _random_mean_s(found: Recording, runs: list[Outcome], regime: Regime, budget: float) -> float:
    """The exact expectation without queues, and the queues as they were in the runs: luck of long prompts is out."""
    count = len(found.requests)
    server = [min(ttft_s, found.given_up_s) for ttft_s in found.ttfts_s]
    device = [found.device.prefill_s(asked.prompt_tokens) for asked in found.requests]
    share = budget if regime == "device_constrained" else 1.0 - budget
    expected_s = (share * sum(device) + (1.0 - share) * sum(server)) / count
    waited_s = [
        ttft_s - alone_s
        for run in runs
        for ttft_s, alone_s, won in zip(run.ttfts_s, device, run.device_won, strict=True)
        if won
    ]
    return expected_s + sum(waited_s) / (count * len(runs))
