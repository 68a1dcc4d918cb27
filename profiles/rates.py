"""How much slower the engines of this device run now than they were measured, from heat and load. Pure.

One factor per engine name of one device. All models of an engine feed its factor, so that a hot device is seen by
models that have not run since; engines of different names (a tensor runtime, a text engine) say nothing of each other.
"""

from __future__ import annotations

from statistics import median

from attrs import evolve, frozen

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


class Slowdowns:
    """The engines of one device by name. The device's house makes one and gives it to both ways; for one thread."""

    def __init__(self) -> None:
        self._by_engine: dict[str, Slowdown] = {}

    def factor(self, engine: str) -> float:
        """1 for an engine that nobody has watched yet."""
        found = self._by_engine.get(engine)
        return 1.0 if found is None else found.factor

    def observe(self, engine: str, predicted_s: float, measured_s: float) -> None:
        """Take one live run of `engine`; the prediction is the one without the factor."""
        self._by_engine[engine] = self._by_engine.get(engine, Slowdown()).observed(predicted_s, measured_s)
