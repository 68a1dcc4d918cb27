"""Round-trip time from small frames and acknowledgements, kept apart from the window (after RFC 6298, section 2)."""

from __future__ import annotations

from attrs import evolve, frozen

SMALL_BYTES = 2048
"""Transfers below this size say more about the round trip than about the rate."""

_GAIN = 1 / 8
_VARIATION_GAIN = 1 / 4
_FORGET_AFTER_S = 600.0


@frozen
class RoundTrip:
    """Smoothed round trip, its mean deviation and the least seen, in seconds; `samples` 0 means nothing is known."""

    smoothed_s: float = 0.0
    deviation_s: float = 0.0
    least_s: float = 0.0
    samples: int = 0
    at_s: float = float("-inf")

    @property
    def rtt_s(self) -> float | None:
        """The estimate, or None."""
        return self.smoothed_s if self.samples else None

    def with_sample(self, seconds: float, at_s: float) -> RoundTrip:
        """The estimate after one more sample; a pause of ten minutes starts it again."""
        if self.samples == 0 or at_s - self.at_s > _FORGET_AFTER_S:
            return RoundTrip(seconds, seconds / 2, seconds, 1, at_s)
        error_s = seconds - self.smoothed_s
        return RoundTrip(
            smoothed_s=self.smoothed_s + _GAIN * error_s,
            deviation_s=(1 - _VARIATION_GAIN) * self.deviation_s + _VARIATION_GAIN * abs(error_s),
            least_s=min(self.least_s, seconds),
            samples=self.samples + 1,
            at_s=at_s,
        )

    def at_most(self, seconds: float, at_s: float) -> RoundTrip:
        """The estimate after a whole transfer of `seconds`, which holds one round trip and cannot be shorter."""
        if self.samples == 0 or seconds >= self.smoothed_s:
            return self
        return evolve(self, smoothed_s=seconds, least_s=min(self.least_s, seconds), at_s=at_s)
