"""Seconds predicted from a profile's measurements, corrected by what live runs show of heat and load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from attrs import evolve, field, frozen

from protocol.device import Measured

WINDOW = 5
"""A change shows after three of five requests, one outlier changes nothing."""

LEAST_FACTOR, MOST_FACTOR = 0.1, 1000.0


@frozen
class Slowdown:
    """How much slower one engine runs now than it was measured: the median of the last five ratios; 1 at first."""

    ratios: tuple[float, ...] = ()

    @property
    def factor(self) -> float:
        return median(self.ratios) if self.ratios else 1.0

    def observed(self, predicted_s: float, measured_s: float) -> Slowdown:
        """With one live run added. Runs without a prediction or of no measurable length tell nothing."""
        if not (0 < predicted_s < float("inf") and 0 < measured_s < float("inf")):
            return self
        ratio = min(MOST_FACTOR, max(LEAST_FACTOR, measured_s / predicted_s))
        return evolve(self, ratios=(*self.ratios, ratio)[-WINDOW:])


@frozen
class Slowdowns:
    """One Slowdown per engine of this device, fed by tensor and text requests alike."""

    by_engine: Mapping[str, Slowdown] = field(factory=dict)

    def factor(self, engine: str) -> float:
        """1 for an engine that nobody has watched yet."""
        found = self.by_engine.get(engine)
        return 1.0 if found is None else found.factor

    def observed(self, engine: str, predicted_s: float, measured_s: float) -> Slowdowns:
        """With one live run of `engine` added; predictions are without the factor."""
        before = self.by_engine.get(engine, Slowdown())
        return Slowdowns({**self.by_engine, engine: before.observed(predicted_s, measured_s)})


@frozen
class Rates:
    """Predictions from measurements. None: not measured, and then nothing is predicted."""

    measured: tuple[Measured, ...] = ()

    def whole_s(self, digest: str, engine: str, threads: int | None = None) -> float | None:
        """One run of the whole tensor model."""
        return self._best(digest, engine, "whole", threads)

    def head_s(self, digest: str, engine: str, cut: str, codec: str, threads: int | None = None) -> float | None:
        """One run of the head of a cut."""
        return self._best(digest, engine, f"head:{cut}:{codec}", threads)

    def load_s(self, digest: str, engine: str) -> float | None:
        """Loading the model from disk."""
        return self._best(digest, engine, "load", None)

    def prefill_s(self, digest: str, engine: str, tokens: int, threads: int | None = None) -> float | None:
        """Prefilling `tokens` prompt tokens."""
        per_token_s = self._best(digest, engine, "prefill", threads)
        return None if per_token_s is None else per_token_s * tokens

    def decode_tokens_per_s(self, digest: str, engine: str, threads: int | None = None) -> float | None:
        """Generated tokens per second."""
        per_token_s = self._best(digest, engine, "decode", threads)
        return 1.0 / per_token_s if per_token_s else None

    def ttft_s(
        self, digest: str, engine: str, uncached_tokens: int, queue_s: float, slowdown: float = 1.0
    ) -> float | None:
        """Time to the first token: queue wait + prefill of what is not cached x slow-down."""
        prefill_s = self.prefill_s(digest, engine, uncached_tokens)
        return None if prefill_s is None else queue_s + prefill_s * slowdown

    def _best(self, digest: str, engine: str, what: str, threads: int | None) -> float | None:
        found = [
            m.median_s if m.per_token_s is None else m.per_token_s
            for m in self.measured
            if (m.digest, m.engine, m.what) == (digest, engine, what) and threads in (None, m.threads)
        ]
        return min(found, default=None)


def rates(measured: Sequence[Measured]) -> Rates:
    """Rates over a profile's measurements."""
    return Rates(tuple(measured))
