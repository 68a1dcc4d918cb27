"""LinkView: what a decision may know about one transport in one direction."""

from __future__ import annotations

from attrs import frozen

from protocol.events import TransferSample

MAX_RESIDUALS = 32


@frozen
class LinkView:
    """seconds(bytes) = floor_s + bytes / bytes_per_s, as learnt from the last ten transfers.

    `samples` is how many transfers stand behind it (0: nothing known), `age_s` the time since the newest,
    `under_way` a transfer that has not ended yet, with the seconds it has taken so far. `in_doubt`: the newest
    transfer contradicts the window, and one more like it will drop the window; or the window is of an earlier time, and
    no transfer has confirmed it yet. `residuals`: seconds taken over seconds
    predicted just before, of the last transfers in this direction, newest last, at most MAX_RESIDUALS; one that was
    given up late counts with the time it had taken. `expected`: the same for a transfer that begins now: one that was
    late by a ratio when less was predicted is expected no later than it was. `likely`: these as far as the link is
    believed to be as it was last; the longer nothing was sent, the more of them are of its transfers at any time.
    """

    floor_s: float
    bytes_per_s: float
    rtt_s: float | None
    samples: int
    age_s: float
    under_way: TransferSample | None = None
    in_doubt: bool = False
    residuals: tuple[float, ...] = ()
    expected: tuple[float, ...] | None = None
    likely: tuple[float, ...] | None = None

    def seconds_for(self, size_bytes: int) -> float:
        """Predicted seconds to move `size_bytes`; infinite when nothing is known or the rate is zero."""
        if self.samples == 0 or self.bytes_per_s <= 0:
            return float("inf")
        return self.floor_s + size_bytes / self.bytes_per_s


UNKNOWN_LINK = LinkView(floor_s=0.0, bytes_per_s=0.0, rtt_s=None, samples=0, age_s=float("inf"))
"""A link nobody has used yet."""
