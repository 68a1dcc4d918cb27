"""With how many threads a model decodes while other programs want the cores too. Pure: rates and time come in.

Threads of one decode step wait for each other at every operation, so a core that somebody else uses holds all of them
up: with every core busy, decoding by all cores was seen to fall from 76 to 4 tokens a second, and fewer threads are
faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from attrs import frozen

SLOW_RATIO = 2.0
"""This many times the usual time per token is contention; less may be heat or a longer context."""

EASY_RATIO = 1.3
"""Within this of what fewer threads take on an idle machine, nobody else wants the cores."""

BETTER_RATIO = 0.9
"""Fewer threads stay only if a token takes at most this part of its time before."""

ANSWERS = 3
HOLD_S = 30.0
MOST_HOLD_S = 1800.0


@frozen
class Choice:
    """How many threads, and why."""

    threads: int
    reason: str


class ThreadChoice:
    """Watches answers and says how many threads the next ones should have.

    Args:
        usual: threads on an idle machine, as the benchmark chose them.
        token_s: seconds a token by thread count on an idle machine, as far as measured.
    """

    def __init__(self, usual: int, token_s: Mapping[int, float] | None = None) -> None:
        if usual < 1:
            raise ValueError("usual is a number of threads, above 0")
        self._usual = usual
        self._idle_s: dict[int, float] = dict(token_s or {})
        self._seen: deque[float] = deque(maxlen=ANSWERS)
        self._before: tuple[int, float] | None = None
        self._hold_s = HOLD_S
        self._hold_until_s = 0.0
        self.choice = Choice(usual, "as measured")

    def expect(self, token_s: Mapping[int, float]) -> None:
        """Newer measurements of an idle machine."""
        self._idle_s.update(token_s)

    def answered(self, token_s: float, now_s: float) -> Choice:
        """An answer decoded at `token_s` seconds a token with the chosen threads; returns the choice from now on."""
        self._seen.append(token_s)
        if len(self._seen) < ANSWERS:
            return self.choice
        seen_s, threads = median(self._seen), self.choice.threads
        usual_s = self._expected_s(threads)
        if usual_s is None or seen_s < usual_s:
            self._idle_s[threads] = seen_s
            usual_s = seen_s
        if self._before is not None and seen_s > BETTER_RATIO * self._before[1]:
            self._back_off(now_s)
            self._change(self._before[0], f"{threads} threads were no faster", now_s)
        elif seen_s >= SLOW_RATIO * usual_s and threads > 1 and now_s >= self._hold_until_s:
            self._change(max(1, threads // 2), f"a token takes {seen_s / usual_s:.1f} times as long as usual", now_s)
            self._before = (threads, seen_s)
        elif self._pays_to_rise(threads, seen_s, usual_s) and now_s >= self._hold_until_s:
            self._change(min(self._usual, threads * 2), "the cores are free again", now_s)
        else:
            self._before = None
        return self.choice

    def _pays_to_rise(self, threads: int, seen_s: float, usual_s: float) -> bool:
        """Whether nobody else wants the cores, and more threads were ever faster than these are now."""
        if threads >= self._usual or seen_s > EASY_RATIO * usual_s:
            return False
        more_s = self._expected_s(min(self._usual, threads * 2))
        return more_s is not None and more_s < BETTER_RATIO * seen_s

    def _change(self, threads: int, reason: str, now_s: float) -> None:
        self.choice = Choice(threads, reason)
        self._seen.clear()
        self._before = None
        self._hold_until_s = max(self._hold_until_s, now_s + self._hold_s)

    def _back_off(self, now_s: float) -> None:
        """A change that did not pay is tried again ever more seldom."""
        self._hold_s = min(MOST_HOLD_S, 2 * self._hold_s)
        self._hold_until_s = now_s + self._hold_s

    def _expected_s(self, threads: int) -> float | None:
        """Seconds a token on an idle machine; for fewer threads than measured, as if each did its equal share."""
        if threads in self._idle_s:
            return self._idle_s[threads]
        usual_s = self._idle_s.get(self._usual)
        return None if usual_s is None else usual_s * self._usual / threads
