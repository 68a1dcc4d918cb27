"""What a transfer that has not ended says of the link already."""

from __future__ import annotations

from netprobe.window import Fit
from protocol.events import TransferSample

PRIOR_SHARE = 0.15
"""The rate so far is trusted as if this share of the transfer had moved at the predicted rate before it began."""

HOLE_EXPONENT = 1.5
"""What is wrong with a link lasts on in proportion to how long it has lasted already (Pareto, as holes do)."""


def projected_s(line: Fit, running: TransferSample) -> float:
    """Seconds that `running` will have taken, at the least.

    Without a count of what has moved that is its age. With one it is its age plus what is left at the rate so far: a
    transfer that keeps the pace of `line` is projected to end when `line` says, one that stalls to end later and later.
    One that has moved whole waits for the far end's work, which says nothing of the link.
    """
    age_s = running.seconds
    if arrived(running):
        return min(age_s, line.seconds_for(running.size_bytes))
    if running.moved_bytes is None or age_s <= line.floor_s or line.samples == 0:
        return age_s
    prior_bytes = PRIOR_SHARE * running.size_bytes
    seconds_per_byte = (age_s - line.floor_s + prior_bytes / line.bytes_per_s) / (running.moved_bytes + prior_bytes)
    return age_s + (running.size_bytes - running.moved_bytes) * seconds_per_byte


def arrived(running: TransferSample) -> bool:
    """Whether all of a transfer that has not been answered is known to have crossed."""
    return running.moved_bytes is not None and running.moved_bytes >= running.size_bytes


def held_down(line: Fit, running: TransferSample | None) -> Fit:
    """`line` with its rate at most what the transfer under way still allows."""
    if running is None or line.samples == 0:
        return line
    seconds = projected_s(line, running)
    if seconds <= line.seconds_for(running.size_bytes):
        return line
    return Fit(line.floor_s, running.size_bytes / (seconds - line.floor_s), line.samples)


def doubted(line: Fit, given_up: TransferSample, bad_s: float, ago_s: float) -> Fit:
    """`line` after a transfer that was given up `ago_s` before and has been followed by none that ended.

    bad_s: how long the link had been seen to be so slow. That it still is, is the less likely the longer nothing was
    sent, so that one late transfer does not speak for the link for good, and a hole is believed for as long as it was.
    """
    held = held_down(line, given_up)
    if held == line or bad_s <= 0:
        return line
    still = 1.0 - recovered(bad_s, ago_s)
    seconds_per_byte = still / held.bytes_per_s + (1.0 - still) / line.bytes_per_s
    return Fit(line.floor_s, 1.0 / seconds_per_byte, line.samples)


def recovered(lasted_s: float, ago_s: float) -> float:
    """Chance that a link is not any more as it was `ago_s` before, when it had been so for `lasted_s`."""
    lasted_s, ago_s = max(0.0, lasted_s), max(0.0, ago_s)
    if lasted_s + ago_s <= 0.0:
        return 0.0
    still: float = (lasted_s / (lasted_s + ago_s)) ** HOLE_EXPONENT
    return 1.0 - still
