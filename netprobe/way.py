"""One direction of one transport: takes its transfers one by one and answers with the line that they make."""

from __future__ import annotations

from collections import deque
from math import inf

from attrs import define, evolve, field

from netprobe.change import ChangeRules, Jump, jump, says_nothing
from netprobe.floor import Floor
from netprobe.under_way import recovered
from netprobe.view import MAX_RESIDUALS
from netprobe.window import Fit, Pair, Window
from protocol.events import TransferSample

_LEAST_S = 1e-9


@define(eq=False)
class Way:
    """What one direction of one transport has shown.

    unfinished: the last transfer, if it was given up. bad_since_s: when the first of those given up in a row began.
    jumps: the newest transfers, if they all contradict the window the same way (`kind`). doubted: the last transfer
    was too slow by far and joined no window, since it was given up, or came after a pause. after_pause: the last
    transfer came after one. recalled: all of the window is of an earlier time. residuals: seconds taken over seconds
    predicted; a change point keeps them, they are what the link does. measured: the transfers of the newest of them.
    since_s: when the link began to be as the window says. floor: what is known of it besides the window.
    """

    window: Window = field(factory=Window)
    unfinished: TransferSample | None = None
    bad_since_s: float = 0.0
    residuals: deque[float] = field(factory=lambda: deque(maxlen=MAX_RESIDUALS))
    measured: deque[Pair] = field(factory=lambda: deque(maxlen=MAX_RESIDUALS))
    jumps: list[Pair] = field(factory=list)
    kind: Jump = "none"
    doubted: bool = False
    after_pause: bool = False
    recalled: bool = False
    since_s: float = inf
    floor: Floor = field(factory=Floor)

    def line(self, rtt_s: float | None) -> Fit:
        """The window's. rtt_s: stands in for the floor where sizes do not tell it; without it what they told before."""
        return self.window.line(self.floor.seconds if rtt_s is None else rtt_s)

    @property
    def in_doubt(self) -> bool:
        """The newest transfer contradicts the window, or none has confirmed what was recalled."""
        return self.recalled or bool(self.jumps)

    def likely_at(self, line: Fit, now_s: float) -> tuple[float, ...]:
        """The residuals for a transfer that begins at `now_s`. The longer the link was silent, over how long it had
        been as it was last, the larger is the share of them that says what its transfers took at any time.
        """
        kept = self.residuals_at(line)
        usual = sorted(pair.seconds / max(line.seconds_for(pair.size_bytes), _LEAST_S) for pair in self.measured)
        changed = round(self._changed(now_s) * len(kept)) if usual else 0
        if not changed:
            return kept
        step, newer = len(usual) / changed, kept[changed:]
        return (*newer, *(usual[int((place + 0.5) * step)] for place in range(changed)))

    def _changed(self, now_s: float) -> float:
        """Chance that the link is not any more as it was when it was last seen."""
        if not self.window.pairs:
            return 0.0
        first, seen_s = self.window.pairs[0], self.window.pairs[-1].at_s
        since_s = min(self.since_s, first.at_s - first.seconds)
        if self.unfinished is not None:
            since_s, seen_s = self.bad_since_s, self.unfinished.at_s
        return recovered(seen_s - since_s, now_s - seen_s)

    def residuals_at(self, line: Fit) -> tuple[float, ...]:
        """The residuals for a transfer that `line` predicts: one that was late by a ratio when a fast link was expected
        is not later by that ratio again where a slow one is, only as late as it was.
        """
        before = len(self.residuals) - len(self.measured)  # those of an earlier time tell no more than their ratio
        kept = list(self.residuals)
        for place, pair in enumerate(self.measured, before):
            as_late = pair.seconds / max(line.seconds_for(pair.size_bytes), _LEAST_S)
            kept[place] = min(kept[place], max(1.0, as_late))
        return tuple(kept)

    def left(self, sample: TransferSample) -> None:
        """Remember a transfer that was given up, until one ends."""
        if not sample.complete and self.unfinished is None:
            self.bad_since_s = sample.at_s - sample.seconds
        self.unfinished = None if sample.complete else sample

    def take(self, pair: Pair, idle_before_s: float, rtt_s: float | None, rules: ChangeRules) -> bool:
        """A transfer ended. True at a change point: everything before it is forgotten, but for the residuals."""
        pairs, line = self.window.pairs, self.line(rtt_s)
        self.recalled = False
        kind = jump(pairs, line, pair, rules)
        excused = not self.doubted and not self.after_pause and says_nothing(pairs, line, pair, idle_before_s, rules)
        self.after_pause = idle_before_s > rules.idle_s
        if excused:
            self.doubted = kind == "slower"
            return False
        self._note(line, pair)
        return self._join(pair, kind, rules)

    def give_up(self, pair: Pair, rtt_s: float | None, rules: ChangeRules, whole_s: float | None = None) -> None:
        """A transfer was given up: it joins no window, since it would have taken longer, but it may raise doubts.

        whole_s: what it would have taken at the pace that it had.
        """
        line = self.line(rtt_s)
        self.recalled = False
        self.doubted = self.doubted or jump(self.window.pairs, line, pair, rules) == "slower"
        if pair.seconds > line.seconds_for(pair.size_bytes):
            self._note(line, pair, whole_s)

    def _join(self, pair: Pair, kind: Jump, rules: ChangeRules) -> bool:
        if kind != self.kind:
            self.jumps.clear()
        self.kind = kind
        if kind != "none":
            self.jumps.append(pair)
        doubts = len(self.jumps) + (self.doubted and kind == "slower")
        self.doubted = False
        if kind == "none" or doubts < rules.jumps_after(pair.at_s - self.window.pairs[-1].at_s):
            self._add(pair, rules)
            return False
        self.since_s = self.jumps[0].at_s - self.jumps[0].seconds
        self.window.restart(self.jumps)
        self.jumps.clear()
        self.kind = "none"
        return True

    def _add(self, pair: Pair, rules: ChangeRules) -> None:
        self.since_s = min(self.since_s, pair.at_s - pair.seconds)
        if self.window.pairs:
            self.floor.take(self.window.pairs[-1], pair, rules.idle_s)
        self.window.add(pair)
        self.floor.settle((*self.measured, *self.window.pairs))

    def _note(self, line: Fit, pair: Pair, whole_s: float | None = None) -> None:
        """Keep how `pair` stood to what was predicted before it; without pairs nothing was."""
        if line.samples:
            self.residuals.append(pair.seconds / max(line.seconds_for(pair.size_bytes), _LEAST_S))
            self.measured.append(pair if whole_s is None else evolve(pair, seconds=max(pair.seconds, whole_s)))
