"""A link in a test: transfers of a stated pace, told to a probe."""

from __future__ import annotations

from netprobe.probe import LinkProbe
from protocol.clock import FakeClock
from protocol.events import Direction, TransferSample


class Link:
    """Feeds a probe with the transfers of an ideal link."""

    def __init__(self, floor_s: float = 0.04, rate: float = 1e6) -> None:
        self.clock = FakeClock(100.0)
        self.probe = LinkProbe(self.clock)
        self.floor_s, self.rate = floor_s, rate

    def send(
        self, size: int, *, idle_s: float = 0.0, direction: Direction = "up", extra_s: float = 0.0, link: str = "cloud"
    ) -> TransferSample:
        seconds = self.floor_s + size / self.rate + extra_s
        self.clock.advance(idle_s + seconds)
        sample = TransferSample(
            at_s=self.clock(), link=link, direction=direction, size_bytes=size, seconds=seconds, idle_before_s=idle_s
        )
        self.probe.add(sample)
        return sample

    def predicted(self, size: int) -> float:
        return self.probe.view("cloud", "up", self.clock()).seconds_for(size)

    def truth(self, size: int) -> float:
        return self.floor_s + size / self.rate


def steady(link: Link) -> None:
    for size in (80_000, 100_000, 120_000) * 4:
        link.send(size)


def give_up(link: Link, seconds: float) -> None:
    link.clock.advance(seconds)
    link.probe.add(
        TransferSample(
            at_s=link.clock(), link="cloud", direction="up", size_bytes=100_000, seconds=seconds, complete=False
        )
    )
