"""What a transfer that has not ended says of the link already."""

from __future__ import annotations

from netprobe.window import Fit
from protocol.events import TransferSample

PRIOR_SHARE = 0.25
"""The rate so far is trusted as if this share of the transfer had moved at the predicted rate before it began."""


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
