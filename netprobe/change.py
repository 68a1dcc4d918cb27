"""When a window must be dropped, and which transfers say nothing about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from netprobe.window import LEVERAGE, Fit, Pair, has_leverage

Jump = Literal["slower", "faster", "none"]


@frozen
class ChangeRules:
    """Thresholds, all of them ratios or seconds.

    jump_ratio: a transfer this many times slower or faster than expected is a jump.
    jumps: this many jumps in a row the same way are a change point.
    idle_s: after a longer pause the first transfer pays for Wi-Fi power save and TCP slow start.
    stale_s: with nothing newer than this, even a transfer after a pause counts.
    old_s: with nothing newer than this, a single jump is a change point: what is old deserves no second hearing.
    """

    jump_ratio: float = 3.0
    jumps: int = 2
    idle_s: float = 5.0
    stale_s: float = 30.0
    old_s: float = 600.0

    def jumps_after(self, silence_s: float) -> int:
        """How many jumps in a row make a change point when the transfer before was `silence_s` ago."""
        return 1 if silence_s > self.old_s else self.jumps


DEFAULT_RULES = ChangeRules()


def expected(pairs: Sequence[Pair], line: Fit, size_bytes: int) -> tuple[float, float]:
    """Shortest and longest seconds that the window leaves plausible for `size_bytes`.

    With sizes of one kind the floor is unknown: all of the time may be floor, or none of it.
    """
    sizes = [pair.size_bytes for pair in pairs]
    inside = min(sizes) / LEVERAGE <= size_bytes <= max(sizes) * LEVERAGE
    if has_leverage(pairs) or inside:
        seconds = line.seconds_for(size_bytes)
        return seconds, seconds
    mean_s = sum(pair.seconds for pair in pairs) / len(pairs)
    scaled_s = mean_s * size_bytes * len(pairs) / sum(sizes)
    return min(mean_s, scaled_s), max(mean_s, scaled_s)


def jump(pairs: Sequence[Pair], line: Fit, pair: Pair, rules: ChangeRules) -> Jump:
    """How `pair` stands to what the window expects."""
    if not pairs:
        return "none"
    shortest_s, longest_s = expected(pairs, line, pair.size_bytes)
    if pair.seconds > rules.jump_ratio * longest_s:
        return "slower"
    if pair.seconds * rules.jump_ratio < shortest_s:
        return "faster"
    return "none"


def says_nothing(pairs: Sequence[Pair], line: Fit, pair: Pair, idle_before_s: float, rules: ChangeRules) -> bool:
    """True for the first transfer after a pause, which can only be too slow, while fresher ones are known."""
    if idle_before_s <= rules.idle_s or not pairs:
        return False
    if pair.at_s - pairs[-1].at_s > rules.stale_s:
        return False
    _, longest_s = expected(pairs, line, pair.size_bytes)
    return pair.seconds > longest_s
