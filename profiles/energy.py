"""What generating text costs a device in joules, and what a joule is worth now. Pure.

Energy is linear in FLOPs, as DiSCo has it (arXiv 2502.11417 lists that as a limitation), with a rate of its own for
prefill and for decoding, since decoding waits for memory. Where the device's power can be read the rates are fitted to
what was used; the prior only holds in directions that nothing was seen of.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from protocol.device import Power
from protocol.policy import DispatchPolicy

FLOPS_PER_PARAMETER = 2.0
"""One multiplication and one addition a token; attention over the context is left out (under 10 % below 2 k tokens at
the sizes of models that devices run)."""

USUAL_PARAMETERS = 1.0e9
"""Of a model whose size nobody told."""

KEPT_SPANS = 64
RIDGE = 0.02
"""Weight of the prior against all kept spans together."""

LEAST_RATIO, MOST_RATIO = 0.05, 20.0
"""A fit outside of these times the prior is a meter that sees something else."""

WARM_K = 15.0
"""From this headroom on heat begins to count."""


@frozen
class EnergyRates:
    """Joules per FLOP of both phases, and watts that are used anyway (never charged to a request).

    The defaults are of phone and board processors: about 4 W at 70 GFLOP/s of prefill and 30 GFLOP/s of decoding.
    """

    prefill_j: float = 6e-11
    decode_j: float = 1.3e-10
    idle_w: float = 2.0


@frozen
class Span:
    """Work between two readings of the meter."""

    joules: float
    seconds: float
    prefill_flops: float
    decode_flops: float


@frozen
class EnergyModel:
    """Rates with the spans they were fitted to. `calibrated` once a span with work was read."""

    prior: EnergyRates = EnergyRates()
    rates: EnergyRates = EnergyRates()
    spans: tuple[Span, ...] = ()

    @property
    def calibrated(self) -> bool:
        return any(span.prefill_flops + span.decode_flops > 0 for span in self.spans)

    def joules(self, flops_per_token: float, prefill_tokens: float, decode_tokens: float) -> float:
        """What this many tokens cost beyond idling."""
        work = prefill_tokens * self.rates.prefill_j + decode_tokens * self.rates.decode_j
        return flops_per_token * work

    def observed(self, span: Span) -> EnergyModel:
        """With one more span. Readings without time, or that count backwards, tell nothing."""
        if span.seconds <= 0 or span.joules < 0:
            return self
        spans = (*self.spans, span)[-KEPT_SPANS:]
        return evolve(self, spans=spans, rates=_fitted(spans, self.prior))


def flops_per_token(parameters: float | None) -> float:
    """FLOPs of one token of a dense model."""
    return FLOPS_PER_PARAMETER * (parameters or USUAL_PARAMETERS)


def _fitted(spans: Sequence[Span], prior: EnergyRates) -> EnergyRates:
    """Least squares with a ridge towards the prior, in multiples of the prior."""
    rows = [
        (s.prefill_flops * prior.prefill_j, s.decode_flops * prior.decode_j, s.seconds * prior.idle_w) for s in spans
    ]
    normal = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    right = [sum(row[i] * span.joules for row, span in zip(rows, spans, strict=True)) for i in range(3)]
    ridge = RIDGE * max(normal[i][i] for i in range(3)) + 1e-12
    for i in range(3):
        normal[i][i] += ridge
        right[i] += ridge
    prefill, decode, idle = (min(MOST_RATIO, max(LEAST_RATIO, ratio)) for ratio in _solved(normal, right))
    return EnergyRates(prior.prefill_j * prefill, prior.decode_j * decode, prior.idle_w * idle)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss-Jordan; the ridge keeps the (3, 3) matrix positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        pivot = rows[i][i]
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(len(rows)):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] for row in rows]


@frozen
class PowerState:
    """Where power comes from now. charge: 0 to 1. headroom_k: kelvin until the device throttles. None: unknown."""

    power: Power | None = None
    charge: float | None = None
    headroom_k: float | None = None


def money_per_joule(policy: DispatchPolicy, state: PowerState) -> float:
    """lambda now: the policy's rate, dearer on battery, dearer still as it empties, and as the device gets hot.

    >>> money_per_joule(DispatchPolicy(money_per_joule=1.0, empty_factor=3.0), PowerState("battery", 0.5))
    2.0
    """
    rate = policy.money_per_joule
    if state.power == "battery":
        empty = 1.0 - state.charge if state.charge is not None else 0.0
        rate *= policy.battery_factor * (1.0 + (policy.empty_factor - 1.0) * empty)
    if state.headroom_k is not None:
        heat = min(1.0, max(0.0, 1.0 - state.headroom_k / WARM_K))
        rate *= 1.0 + (policy.hot_factor - 1.0) * heat
    return rate
