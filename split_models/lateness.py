"""Pure: an account of answers that came later than the device alone would have given them, and what the next may cost.

A 99th percentile bears one late answer in a hundred, whatever the mean gains by it. Each answer earns LATE_SHARE of a
late one, a late one costs a whole; what is owed puts a price on the chance of another (drift plus penalty, as hedge).
Where the link alone would have been the better choice for all requests its own late answers are the measure, and none
of ours is later than those: then nothing is owed. So two runs are kept in mind that never were, each with one arm for
all requests.
"""

from __future__ import annotations

from attrs import evolve, field, frozen

LATE_RATIO = 1.2
"""An answer that takes this much longer than the device alone would have taken is late."""

LATE_SHARE = 0.005
"""Share of answers that may be late: half of what a 99th percentile bears."""

MOST_OWED = 4.0
"""Late answers that are remembered: a link that was bad for an hour is no reason to shun it for the rest of the day."""

OWED_RUNS = 2.0
"""Device runs that a late answer costs, for each one that is owed."""

NEARLY_RATIO = 0.97
"""A link that would have been better by less than this is none that was: then the device's tail is the measure."""

MEMORY = 500
"""Requests over which the runs that never were are compared; those before fade."""

MOST_WAIT_RUNS = 30.0
"""Device runs that a request of such a run waits at the most: a link that was dead for a day is not so for another."""


@frozen
class Alone:
    """A run that has one arm for all requests, one after the other. wait_s: until the newest one has its answer."""

    wait_s: float = 0.0
    mean_s: float = 0.0
    count: int = 0

    def asked(self, run_s: float, gap_s: float, most_s: float) -> Alone:
        """One more request, `gap_s` after the one before, that takes `run_s` when it is its turn."""
        wait_s = min(most_s, max(0.0, self.wait_s - gap_s) + run_s)
        count = min(MEMORY, self.count + 1)
        return Alone(wait_s, self.mean_s + (wait_s - self.mean_s) / count, count)


@frozen
class Lateness:
    """owed: late answers over the share that may be late; never negative, so that a good hour excuses no bad minute."""

    owed: float = 0.0
    link: Alone = field(factory=Alone)
    device: Alone = field(factory=Alone)
    asked_s: float = 0.0

    def asked(self, link_s: float, device_s: float, now_s: float) -> Lateness:
        """One more request: what its best link arm and the device are expected to take."""
        gap_s, most_s = now_s - self.asked_s, MOST_WAIT_RUNS * device_s
        return evolve(
            self,
            link=self.link.asked(link_s, gap_s, most_s),
            device=self.device.asked(device_s, gap_s, most_s),
            asked_s=now_s,
        )

    def answered(self, took_s: float, device_s: float) -> Lateness:
        """One more answer, after `took_s`; the device alone would have taken `device_s`, its queue included."""
        late = 0.0 < LATE_RATIO * device_s < took_s
        return evolve(self, owed=min(MOST_OWED, max(0.0, self.owed + late - LATE_SHARE)))

    def price_s(self, device_s: float) -> float:
        """Seconds that a late answer costs over the time it takes; 0 where the link alone is clearly better."""
        better = self.link.mean_s <= NEARLY_RATIO * self.device.mean_s
        return 0.0 if better else self.owed * OWED_RUNS * device_s
