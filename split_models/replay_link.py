"""Pure: a link that follows a trace of rates, for replays: transfers share each direction evenly, in virtual time."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from attrs import define, frozen


@frozen
class LinkTrace:
    """Rates of both directions and the one-way delay, one figure of each per `step_s` seconds. Loops at its end."""

    name: str
    step_s: float
    up_bytes_per_s: tuple[float, ...]
    down_bytes_per_s: tuple[float, ...]
    delays_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Length until it begins again."""
        return self.step_s * len(self.up_bytes_per_s)

    def delay_s(self, at_s: float) -> float:
        """One-way delay of what is sent then."""
        return self.delays_s[int(at_s / self.step_s) % len(self.delays_s)]


class Line:
    """One direction of a trace: how many bytes have passed by a moment, and the moment by which so many have."""

    def __init__(self, rates: Sequence[float], step_s: float) -> None:
        self._rates = rates
        self._step_s = step_s
        self._sums = [0.0, *accumulate(rate * step_s for rate in rates)]
        self._total = self._sums[-1]
        self._period_s = step_s * len(rates)

    def passed(self, at_s: float) -> float:
        """Bytes that a transfer without pause since 0 has moved by `at_s`."""
        turns, rest_s = divmod(at_s, self._period_s)
        step = min(int(rest_s / self._step_s), len(self._rates) - 1)
        return turns * self._total + self._sums[step] + (rest_s - step * self._step_s) * self._rates[step]

    def when(self, size_bytes: float) -> float:
        """The first moment by which that many have passed; infinite on a line that never moves."""
        if self._total <= 0:
            return inf if size_bytes > 0 else 0.0
        turns, rest = divmod(size_bytes, self._total)
        step = bisect_left(self._sums, rest)
        if step == 0:
            return turns * self._period_s
        before = step - 1
        return turns * self._period_s + before * self._step_s + (rest - self._sums[before]) / self._rates[before]

    def ends_s(self, began_s: float, size_bytes: float) -> float:
        """When a transfer that has the line to itself ends."""
        return max(began_s, self.when(self.passed(began_s) + size_bytes))


@define(eq=False)
class Timer:
    """Something that happens at `at_s`; `cancel` makes it not happen."""

    at_s: float
    act: Callable[[], None] | None

    def cancel(self) -> None:
        self.act = None


class Agenda:
    """Virtual time: what is due, in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Timer]] = []
        self._count = 0

    def at(self, at_s: float, act: Callable[[], None]) -> Timer:
        """Do `act` at `at_s`, never when that is infinite; what is due at one moment happens in the order given."""
        timer = Timer(max(at_s, self.now_s), act)
        if at_s < inf:
            self._count += 1
            heapq.heappush(self._due, (timer.at_s, self._count, timer))
        return timer

    def run(self) -> None:
        """Until nothing is due."""
        while self._due:
            at_s, _, timer = heapq.heappop(self._due)
            if timer.act is not None:
                self.now_s = at_s
                act, timer.act = timer.act, None
                act()


@define(eq=False)
class Moving:
    """One transfer on a pipe; `due` is the share of the line by which it is done."""

    due: float
    done: Callable[[], None]
    size_bytes: float = 0.0


class Pipe:
    """Transfers under way in one direction; each gets an even share of the rate."""

    def __init__(self, line: Line, agenda: Agenda) -> None:
        self._line = line
        self._agenda = agenda
        self._moving: list[Moving] = []
        self._share = 0.0
        self._passed = 0.0
        self._next: Timer | None = None

    def start(self, size_bytes: float, done: Callable[[], None]) -> Moving:
        """Begin now; `done` is called when the last byte has left."""
        self._advance()
        moving = Moving(self._share + size_bytes, done, size_bytes)
        self._moving.append(moving)
        self._plan()
        return moving

    def cancel(self, moving: Moving) -> None:
        """Take it off the line; what has been sent has been sent."""
        if moving in self._moving:
            self._advance()
            self._moving.remove(moving)
            self._plan()

    def acknowledged(self, moving: Moving, round_trip_s: float) -> float:
        """Bytes of it whose arrival the sender knows of: those that had left one round trip ago."""
        if moving not in self._moving:
            return moving.size_bytes
        self._advance()
        now_s = self._agenda.now_s
        lately = self._passed - self._line.passed(max(0.0, now_s - round_trip_s))
        left = moving.due - self._share + lately / len(self._moving)
        return max(0.0, moving.size_bytes - left)

    def _advance(self) -> None:
        passed = self._line.passed(self._agenda.now_s)
        if self._moving:
            self._share += (passed - self._passed) / len(self._moving)
        self._passed = passed

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._moving:
            first = min(self._moving, key=lambda moving: moving.due)
            left = max(0.0, first.due - self._share) * len(self._moving)
            self._next = self._agenda.at(self._line.when(self._passed + left), lambda: self._end(first))

    def _end(self, moving: Moving) -> None:
        self._advance()
        self._moving.remove(moving)
        self._plan()
        moving.done()
