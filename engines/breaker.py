"""When a server that fails is left alone, and how it is tried again. Pure: time is an argument, monotonic seconds.

closed: everything passes. open: nothing does, for a while that doubles with each failed trial. half open: that while is
over, a few requests may try; one success closes, one failure opens again.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Literal

from attrs import define, field, frozen

BreakerState = Literal["closed", "open", "half open"]


@frozen
class BreakerRules:
    """in_a_row: so many failures without a success between open it. ratio, least, window_s: or this share of failures
    among at least `least` requests within the window. first_s, longest_s: how long it stays open. trials: requests at
    once while half open.
    """

    in_a_row: int = 5
    ratio: float = 0.5
    least: int = 20
    window_s: float = 30.0
    first_s: float = 2.0
    longest_s: float = 60.0
    trials: int = 1
    window_most: int = 256


@define
class Breaker:
    """Ask `wait_s`, call `began` when it is 0, and tell how it went; a request that was given up tells `dropped`."""

    rules: BreakerRules = field(factory=BreakerRules)
    _failures: int = 0
    _opened: int = 0
    _open_until_s: float = -inf
    _trying: int = 0
    _half: bool = False
    _outcomes: deque[tuple[float, bool]] = field(factory=deque)

    def state(self, now_s: float) -> BreakerState:
        """What it is at `now_s`."""
        if now_s < self._open_until_s:
            return "open"
        return "half open" if self._half else "closed"

    def wait_s(self, now_s: float) -> float:
        """0: go ahead; else the seconds after which a trial may pass."""
        state = self.state(now_s)
        if state == "open":
            return self._open_until_s - now_s
        if state == "half open" and self._trying >= self.rules.trials:
            return self.rules.first_s
        return 0.0

    def began(self, now_s: float) -> None:
        """A request goes out."""
        if self._half:
            self._trying += 1

    def succeeded(self, now_s: float) -> None:
        """The server answered, be it with a refusal that is the request's own fault."""
        self._failures = 0
        if self._half:
            self._half, self._trying, self._opened = False, 0, 0
            self._outcomes.clear()
        self._note(now_s, True)

    def failed(self, now_s: float) -> None:
        """The server could not be reached, broke off, or failed by itself."""
        self._failures += 1
        self._note(now_s, False)
        if self._half or self._failures >= self.rules.in_a_row or self._mostly_failing():
            self._open(now_s)

    def dropped(self, now_s: float) -> None:
        """The request ended without telling anything, such as by its client."""
        self._trying = max(0, self._trying - 1)

    def _open(self, now_s: float) -> None:
        if now_s < self._open_until_s:
            return  # requests that began before it opened
        seconds = min(self.rules.longest_s, self.rules.first_s * 2.0 ** min(16, self._opened))
        self._opened += 1
        self._open_until_s = now_s + seconds
        self._half, self._trying = True, 0
        self._outcomes.clear()

    def _note(self, now_s: float, good: bool) -> None:
        self._outcomes.append((now_s, good))
        while self._outcomes and (
            self._outcomes[0][0] < now_s - self.rules.window_s or len(self._outcomes) > self.rules.window_most
        ):
            self._outcomes.popleft()

    def _mostly_failing(self) -> bool:
        bad = sum(1 for _, good in self._outcomes if not good)
        return len(self._outcomes) >= self.rules.least and bad >= self.rules.ratio * len(self._outcomes)
