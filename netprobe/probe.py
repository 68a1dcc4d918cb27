"""LinkProbe: routes each transfer that happened anyway to a window or a round trip and answers with LinkViews."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

from attrs import evolve

from netprobe.change import DEFAULT_RULES, ChangeRules
from netprobe.past import past_of, round_trip_of, ways_of
from netprobe.round_trip import SMALL_BYTES, RoundTrip
from netprobe.under_way import arrived, doubted, held_down, projected_s
from netprobe.view import UNKNOWN_LINK, LinkView
from netprobe.way import Way
from netprobe.window import Fit, Pair
from protocol.clock import Clock
from protocol.events import Direction, TransferSample
from protocol.link_memory import PastLink

MAX_LINKS = 64

UnderWay = Callable[[], TransferSample | None]


class LinkProbe:
    """Knows every link of this process from its samples alone; sends nothing.

    Not thread-safe: feed it from one event loop.

    Args:
        clock: monotonic seconds, the same that stamps the samples.
        rules: change points and pauses.
    """

    def __init__(self, clock: Clock, rules: ChangeRules = DEFAULT_RULES) -> None:
        self._clock = clock
        self._rules = rules
        self._ways: dict[tuple[str, Direction], Way] = {}
        self._round_trips: dict[str, RoundTrip] = {}
        self._stalled: dict[str, float] = {}
        self._watched: dict[str, UnderWay] = {}
        self.resets = 0
        """Change points seen so far, over all links."""
        self.taken = 0
        """Transfers that joined what is known so far, over all links."""

    def add(self, sample: TransferSample) -> None:
        """Take one sample; nonsense (not finite, negative) is dropped.

        A sample that is not complete says "at least this long": it is shown as under way, and holds the rate down,
        until the next one of its link and direction ends. One that had taken too long already is half a change point:
        a slow one after it drops the window, so that the fast transfers before cannot speak for the link again.
        """
        if not (isfinite(sample.seconds) and isfinite(sample.at_s)) or sample.seconds < 0 or sample.size_bytes < 0:
            return
        if sample.direction == "up":
            self._note_stall(sample)
        if sample.size_bytes < SMALL_BYTES:
            if sample.complete and sample.direction == "up":
                self._take_round_trip(sample)
            return  # so few bytes say nothing of the rate, ended or given up
        way = self._way(sample.link, sample.direction)
        if way is None:
            return
        way.left(sample)
        pair = Pair(sample.size_bytes, sample.seconds, sample.at_s)
        if sample.complete and sample.direction == "up" and sample.seconds > 0 and sample.link in self._round_trips:
            self._round_trips[sample.link] = self._round_trips[sample.link].at_most(sample.seconds, sample.at_s)
        rtt_s = self._trip_s(sample.link, sample.direction)
        if sample.complete and sample.seconds > 0:
            self.resets += way.take(pair, sample.idle_before_s, rtt_s, self._rules)
            self.taken += 1
        elif not sample.complete and not arrived(sample):
            whole_s = projected_s(way.line(rtt_s), sample)
            way.give_up(pair, rtt_s, self._rules, whole_s)

    def add_round_trip(self, link: str, seconds: float, at_s: float) -> None:
        """Take the round trip of one acknowledgement."""
        if isfinite(seconds) and seconds >= 0 and (link in self._round_trips or len(self._round_trips) < MAX_LINKS):
            self._round_trips[link] = self._round_trips.get(link, RoundTrip()).with_sample(seconds, at_s)

    def watch(self, link: str, under_way: UnderWay) -> None:
        """Ask `under_way` for the transfer that runs now whenever a view of `link` is made."""
        self._watched[link] = under_way

    def under_way(self, link: str, direction: Direction) -> TransferSample | None:
        """The transfer that has not ended yet, or the last one that was given up."""
        watched = self._watched.get(link)
        running = watched() if watched is not None else None
        if running is not None and running.direction == direction and running.size_bytes >= SMALL_BYTES:
            return running
        way = self._ways.get((link, direction))
        return way.unfinished if way is not None else None

    def view(self, link: str, direction: Direction = "up", now_s: float | None = None) -> LinkView:
        """What is known of `link` at `now_s` (default: now).

        A transfer under way that takes longer than predicted lowers the rate at once: its bytes have taken at least
        that long, and those that have not moved yet will take as long again as their share says.
        """
        now_s = self._clock() if now_s is None else now_s
        running = self.under_way(link, direction)
        way = self._ways.get((link, direction))
        shown_rtt_s = self._stretched_s(link, self._rtt_s(link))
        if way is None or not way.window.pairs:
            return evolve(UNKNOWN_LINK, rtt_s=shown_rtt_s, under_way=running)
        line = self._line(way, running, self._trip_s(link, direction), now_s)
        return LinkView(
            floor_s=line.floor_s,
            bytes_per_s=line.bytes_per_s,
            rtt_s=shown_rtt_s,
            samples=line.samples,
            age_s=max(0.0, now_s - way.window.pairs[-1].at_s),
            under_way=running,
            in_doubt=way.in_doubt,
            residuals=tuple(way.residuals),
            expected=way.residuals_at(line),
            likely=way.likely_at(line, now_s),
        )

    def _line(self, way: Way, running: TransferSample | None, rtt_s: float | None, now_s: float) -> Fit:
        """What the window says, held down by a transfer under way, or for a while by one that was given up."""
        line = way.line(rtt_s)
        if running is None or running is not way.unfinished:
            return held_down(line, running)
        return doubted(line, running, running.at_s - way.bad_since_s, now_s - running.at_s)

    def views(self, direction: Direction = "up", now_s: float | None = None) -> Mapping[str, LinkView]:
        """The view of every known link in one direction."""
        names = {link for link, way in self._ways if way == direction} | set(self._round_trips)
        return {name: self.view(name, direction, now_s) for name in sorted(names)}

    def reset(self, link: str) -> None:
        """Forget `link`: it leads somewhere else now."""
        for key in [key for key in self._ways if key[0] == link]:
            del self._ways[key]
        self._round_trips.pop(link, None)
        self._stalled.pop(link, None)

    def renewed(self, link: str) -> None:
        """`link` leads to the same place by new connections: what the old ones left unfinished says nothing of them."""
        self._stalled.pop(link, None)
        for way in self._of(link).values():
            way.unfinished = None

    def past(self, link: str) -> PastLink:
        """What is known of `link`, in ages: to be kept while the process, or the network, is another."""
        return past_of(self._of(link), self._round_trips.get(link, RoundTrip()), self._clock())

    def recall(self, link: str, past: PastLink, older_s: float = 0.0) -> None:
        """Know of `link` what `past` says, and nothing else. It is taken to be `older_s` older than it says.

        A window that is old serves until the first transfer that contradicts it (ChangeRules.old_s).
        """
        self.reset(link)
        now_s = self._clock()
        for direction, way in ways_of(past, now_s, older_s).items():
            if way.window.pairs and len(self._ways) < 2 * MAX_LINKS:
                self._ways[link, direction] = way
        trip = round_trip_of(past, now_s, older_s)
        if trip.samples and len(self._round_trips) < MAX_LINKS:
            self._round_trips[link] = trip

    def _of(self, link: str) -> Mapping[Direction, Way]:
        return {direction: way for (name, direction), way in self._ways.items() if name == link}

    def _take_round_trip(self, sample: TransferSample) -> None:
        if sample.idle_before_s <= self._rules.idle_s or sample.link not in self._round_trips:
            self.add_round_trip(sample.link, sample.seconds, sample.at_s)

    def _note_stall(self, sample: TransferSample) -> None:
        """A small frame that was given up: the round trip is at least so long, until something has crossed again."""
        if sample.complete:
            self._stalled.pop(sample.link, None)
        elif sample.size_bytes < SMALL_BYTES and (sample.link in self._stalled or len(self._stalled) < MAX_LINKS):
            self._stalled[sample.link] = sample.seconds

    def _stretched_s(self, link: str, rtt_s: float | None) -> float | None:
        """The round trip, or what a small frame has taken without an answer, if that is longer."""
        if rtt_s is None:
            return None
        watched = self._watched.get(link)
        running = watched() if watched is not None else None
        small = running is not None and running.direction == "up" and running.size_bytes < SMALL_BYTES
        return max(rtt_s, self._stalled.get(link, 0.0), running.seconds if running is not None and small else 0.0)

    def _trip_s(self, link: str, direction: Direction) -> float | None:
        """The round trip in a transfer: an answer is measured from its first byte on, so that there is none in it."""
        return self._rtt_s(link) if direction == "up" else 0.0

    def _rtt_s(self, link: str) -> float | None:
        return self._round_trips.get(link, RoundTrip()).rtt_s

    def _way(self, link: str, direction: Direction) -> Way | None:
        way = self._ways.get((link, direction))
        if way is None and len(self._ways) < 2 * MAX_LINKS:
            way = self._ways[link, direction] = Way()
        return way
