"""Pure: one device's requests over a trace in virtual time, with the decider, the hedge and the probe of live requests.

Requests come at a fixed rate and run one after the other; the time that counts is from when one was due until it was
answered, so that a late one delays those behind it. The link is the trace's; what an arm costs is given. Beside the
deciding arms there are the fixed ones and an oracle, which knows the trace and takes the soonest arm each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

from attrs import define, evolve, field, frozen

from netprobe.probe import LinkProbe
from netprobe.view import LinkView
from profiles.strategy import UNCLASSED, Strategy
from protocol.events import TransferSample
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.decider import Decider, Decision
from split_models.planner import DOWN
from split_models.replay_lane import Job, Lane
from split_models.replay_link import Agenda, Line, LinkTrace, Moving, Pipe, Timer

LINK = "cloud"
LARGE_REPLY_BYTES = 16 << 10
"""A reply of this size or more is a sample of the way down."""

Took = Callable[[int, Arm], ArmCost]
"""What the request of that number really costs on an arm: not what it was planned with, as in life."""

EXPLORE_S = 20.0
DEADLINE_S = 30.0
ASK_AGAIN_S = 0.05
"""As live requests do, see race."""


@frozen
class Outcome:
    """One run. latencies_s: from due to answered, in order; `arms` counts who answered."""

    latencies_s: tuple[float, ...]
    arms: Mapping[str, int]
    switches: int = 0
    hedges: int = 0
    hedged_s: float = 0.0
    looks: int = 0


@frozen
class Load:
    """Requests that a device gets: one every `every_s`, `count` of them."""

    every_s: float
    count: int

    @classmethod
    def over(cls, trace: LinkTrace, every_s: float, seconds: float) -> Load:
        """Requests for so many seconds, at most the trace once."""
        return cls(every_s, max(1, int(min(seconds, trace.seconds) / every_s)))

    @classmethod
    def again(cls, trace: LinkTrace, every_s: float, least: int, most: int) -> Load:
        """Requests for the trace once, or more often if it is too short for the `least`; never more than the `most`."""
        return cls(every_s, min(most, max(least, int(trace.seconds / every_s))))


class _Lines:
    """Both directions of a trace, for transfers that have them to themselves."""

    def __init__(self, trace: LinkTrace) -> None:
        self.up = Line(trace.up_bytes_per_s, trace.step_s)
        self.down = Line(trace.down_bytes_per_s, trace.step_s)
        self._delay_s = trace.delay_s

    def ends_s(self, cost: ArmCost, began_s: float) -> float:
        """When an arm that begins now, and alone, has answered."""
        at_s = began_s + cost.device_s
        if cost.arm.link is None:
            return at_s
        at_s = self.up.ends_s(at_s, cost.up_bytes)
        if not isfinite(at_s):
            return inf
        at_s = self.down.ends_s(at_s + self._delay_s(at_s) + cost.server_s, cost.down_bytes)
        return at_s + self._delay_s(at_s) if isfinite(at_s) else inf


def replay_fixed(trace: LinkTrace, cost: ArmCost, load: Load, took: Took | None = None) -> Outcome:
    """Every request on one arm, as long as it takes. took: what each really costs on it; `cost` without it."""
    return _one_after_another(trace, load, lambda lines, number, began_s: took(number, cost.arm) if took else cost)


def replay_oracle(trace: LinkTrace, costs: Sequence[ArmCost], load: Load) -> Outcome:
    """Every request on the arm that will answer first; since the trace does not depend on us, no plan is better."""
    return _one_after_another(
        trace, load, lambda lines, _, began_s: min(costs, key=lambda cost: (lines.ends_s(cost, began_s), str(cost.arm)))
    )


def replay_informed(trace: LinkTrace, costs: Sequence[ArmCost], load: Load, ago_s: float) -> Outcome:
    """Every request on the arm that would answer first if the link stayed as it was `ago_s` before: what one would do
    who sees the link exactly, for nothing, but not the future.
    """

    def choose(lines: _Lines, number: int, began_s: float) -> ArmCost:
        step = int(max(0.0, began_s - ago_s) / trace.step_s) % len(trace.delays_s)
        return min(costs, key=lambda cost: _steady_s(trace, step, cost))

    return _one_after_another(trace, load, choose)


def _one_after_another(trace: LinkTrace, load: Load, choose: Callable[[_Lines, int, float], ArmCost]) -> Outcome:
    """Requests that wait for the one before. choose: the arm of the one of that number, which begins at that second of
    the trace.
    """
    lines = _Lines(trace)
    latencies, free_s = [], 0.0
    arms: dict[str, int] = {}
    for number in range(load.count):
        due_s = number * load.every_s
        began_s = max(due_s, free_s)
        chosen = choose(lines, number, began_s)
        free_s = lines.ends_s(chosen, began_s)
        latencies.append(free_s - due_s)
        arms[str(chosen.arm)] = arms.get(str(chosen.arm), 0) + 1
    return Outcome(tuple(latencies), arms)


def _steady_s(trace: LinkTrace, step: int, cost: ArmCost) -> float:
    """Seconds of an arm while the link is as in one step of the trace."""
    if cost.arm.link is None:
        return cost.device_s
    up, down = trace.up_bytes_per_s[step], trace.down_bytes_per_s[step]
    if up <= 0 or down <= 0:
        return inf
    return cost.device_s + cost.server_s + cost.up_bytes / up + cost.down_bytes / down + 2 * trace.delays_s[step]


def replay(
    trace: LinkTrace,
    costs: Sequence[ArmCost],
    policy: SplitPolicy,
    load: Load,
    probe: LinkProbe | None = None,
    strategy: Strategy = UNCLASSED,
    stop_s: float = inf,
    took: Took | None = None,
) -> Outcome:
    """The product's own decisions; nothing of the trace is known to them but what transfers show.

    strategy: of the device's class; its hedge ratio bounds the policy's, as on a device. stop_s: a device run that lost
    is over so soon; infinite where runs cannot be stopped. took: what each request really costs on the arms that it
    takes; without it `costs`, which are what is planned with.
    """
    allowed = [cost for cost in costs if cost.arm.kind in strategy.arms]
    bounded = evolve(policy, hedge_ratio=min(policy.hedge_ratio, strategy.hedge_ratio))
    return _Replay(trace, allowed, bounded, load, probe, strategy, stop_s, took).run()


@define(eq=False)
class _World:
    """Device, link and what is seen of them."""

    agenda: Agenda
    lane: Lane
    up: Pipe
    down: Pipe
    trace: LinkTrace
    probe: LinkProbe
    sending: list[_Attempt] = field(factory=list)
    receiving: list[_Attempt] = field(factory=list)
    last_end_s: float | None = None

    def delay_s(self) -> float:
        """One-way delay now."""
        return self.trace.delay_s(self.agenda.now_s)

    def under_way(self) -> TransferSample | None:
        """The oldest transfer that has not been answered yet, or else the oldest answer that is not here yet."""
        if self.sending:
            return self.sending[0].sample(complete=False)
        return self.receiving[0].received(complete=False) if self.receiving else None

    def views(self) -> dict[str, LinkView]:
        """As the planner names them."""
        now_s = self.agenda.now_s
        return {LINK: self.probe.view(LINK, "up", now_s), LINK + DOWN: self.probe.view(LINK, "down", now_s)}


@define(eq=False)
class _Attempt:
    """One arm of the link for one request; samples go to the probe as the HTTP link makes them."""

    world: _World
    cost: ArmCost
    done: Callable[[], None]
    head_over: Callable[[], None] = lambda: None
    job: Job | None = None
    moving: Moving | None = None
    sent: Moving | None = None
    timers: list[Timer] = field(factory=list)
    began_s: float | None = None
    idle_s: float = 0.0
    first_s: float = 0.0
    over: bool = False

    def begin(self) -> None:
        """Head first, where there is one."""
        if self.cost.device_s > 0:
            self.job = self.world.lane.submit(self.cost.device_s, self._send)
        else:
            self._send()

    def cancel(self) -> None:
        """Give up; a transfer without an answer took at least this long."""
        if self.over:
            return
        self.over = True
        if self.job is not None:
            self.world.lane.cancel(self.job)
        if self in self.world.sending:  # what has moved is known as long as it is on the line
            self._leave()
            self.world.probe.add(self.sample(complete=False))
        if self in self.world.receiving:
            self.world.receiving.remove(self)
            self.world.probe.add(self.received(complete=False))
        if self.moving is not None:
            self.world.up.cancel(self.moving)
            self.world.down.cancel(self.moving)
        for timer in self.timers:
            timer.cancel()

    def received(self, *, complete: bool) -> TransferSample:
        """The way down as it stands now."""
        now_s = self.world.agenda.now_s
        return TransferSample(
            at_s=now_s, link=LINK, direction="down", size_bytes=self.cost.down_bytes, seconds=now_s - self.first_s,
            complete=complete, moved_bytes=None if complete else self._arrived(),
        )  # fmt: skip

    def sample(self, *, complete: bool) -> TransferSample:
        """The way up as it stands now."""
        now_s, began_s = self.world.agenda.now_s, self.began_s or 0.0
        taken_s = now_s - began_s - (self.cost.server_s if complete else 0.0)
        return TransferSample(
            at_s=now_s, link=LINK, direction="up", size_bytes=self.cost.up_bytes, seconds=max(0.0, taken_s),
            server_s=self.cost.server_s if complete else 0.0, idle_before_s=self.idle_s, complete=complete,
            moved_bytes=None if complete else self._acknowledged(),
        )  # fmt: skip

    def _acknowledged(self) -> int:
        if self.sent is None:
            return 0
        return int(self.world.up.acknowledged(self.sent, 2 * self.world.delay_s()))

    def _arrived(self) -> int:
        return int(self.world.down.acknowledged(self.moving, self.world.delay_s())) if self.moving is not None else 0

    def _send(self) -> None:
        world, now_s = self.world, self.world.agenda.now_s
        self.began_s = now_s
        self.idle_s = 0.0 if world.sending or world.last_end_s is None else now_s - world.last_end_s
        world.sending.append(self)
        self.moving = self.sent = world.up.start(self.cost.up_bytes, self._sent)
        self.head_over()

    def _sent(self) -> None:
        self._later(self.world.delay_s() + self.cost.server_s, self._served)

    def _served(self) -> None:
        self._later(self.world.delay_s(), self._answered)
        self.moving = self.world.down.start(self.cost.down_bytes, self._received)

    def _answered(self) -> None:
        """The answer's first byte is here: the way up has been measured."""
        self.first_s = self.world.agenda.now_s
        self._leave()
        self.world.probe.add(self.sample(complete=True))
        if self.cost.down_bytes >= LARGE_REPLY_BYTES:
            self.world.receiving.append(self)

    def _received(self) -> None:
        self._later(self.world.delay_s(), self._finish)

    def _finish(self) -> None:
        self.over = True
        if self in self.world.receiving:
            self.world.receiving.remove(self)
            self.world.probe.add(self.received(complete=True))
        self.done()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        agenda = self.world.agenda
        self.timers.append(agenda.at(agenda.now_s + seconds, act))

    def _leave(self) -> None:
        self.world.sending.remove(self)
        self.world.last_end_s = self.world.agenda.now_s


class _Replay:
    """One run of the product's decisions; requests are _Race objects, one at a time."""

    def __init__(
        self,
        trace: LinkTrace,
        costs: Sequence[ArmCost],
        policy: SplitPolicy,
        load: Load,
        probe: LinkProbe | None,
        strategy: Strategy,
        stop_s: float,
        took: Took | None,
    ) -> None:
        agenda = Agenda()
        up, down = (Line(rates, trace.step_s) for rates in (trace.up_bytes_per_s, trace.down_bytes_per_s))
        probe = probe or LinkProbe(lambda: agenda.now_s)
        self.world = _World(agenda, Lane(agenda, stop_s), Pipe(up, agenda), Pipe(down, agenda), trace, probe)
        probe.watch(LINK, self.world.under_way)
        self.costs = tuple(costs)
        by_arm = {cost.arm: cost for cost in costs}
        self.took = took or (lambda _, arm: by_arm[arm])
        self.policy = policy
        self.stoppable = stop_s < inf
        self.decider = Decider(0.0, lambda: strategy.start)
        self.looking: dict[str, _Attempt] = {}
        self.load = load
        self.latencies: list[float] = []
        self.arms: dict[str, int] = {}
        self.switches = self.hedges = self.looks = 0

    def run(self) -> Outcome:
        """All requests, then whatever is still under way."""
        self.world.agenda.at(0.0, lambda: self._request(0))
        self.world.agenda.run()
        return Outcome(
            tuple(self.latencies), self.arms, self.switches, self.hedges, self.decider.budget.hedged_s, self.looks
        )

    def _request(self, number: int) -> None:
        due_s = number * self.load.every_s

        def answered(arm: Arm) -> None:
            now_s = self.world.agenda.now_s
            self.latencies.append(now_s - due_s)
            self.arms[str(arm)] = self.arms.get(str(arm), 0) + 1
            if number + 1 < self.load.count:
                self.world.agenda.at((number + 1) * self.load.every_s, lambda: self._request(number + 1))

        self._decide(number, answered)

    def _decide(self, number: int, answered: Callable[[Arm], None]) -> None:
        world, now_s = self.world, self.world.agenda.now_s
        views = world.views()
        decision = self.decider.decide(self.costs, views, world.lane.wait_s(), self.policy, now_s, looking=self.looking)
        self.switches += decision.left is not None
        looks: Sequence[ArmCost] = ()
        if not decision.waits:
            looks = self.decider.looks(decision.arm, (LINK,), self.looking, self.costs, views, self.policy, now_s)

        def ended(arm: Arm) -> None:
            self.decider.took(decision, self.world.agenda.now_s)
            self.decider.finished()
            answered(arm)
            for cost in looks:  # after the answer: before it, both would stand in line for the same device
                if LINK not in self.looking:
                    self._look(self.took(number, cost.arm))

        _Race(self, decision, number, ended).begin()

    def _look(self, cost: ArmCost) -> None:
        """The request through the link as well; its answer is dropped."""
        agenda = self.world.agenda
        self.looks += 1

        def seen() -> None:
            late.cancel()
            self.looking.pop(LINK, None)
            self.decider.answered(LINK)

        def given_up() -> None:
            attempt.cancel()
            self.looking.pop(LINK, None)
            self.decider.failed(LINK, "no answer", agenda.now_s)

        attempt = _Attempt(self.world, cost, seen)
        late = agenda.at(agenda.now_s + EXPLORE_S, given_up)
        self.looking[LINK] = attempt
        attempt.begin()


class _Race:
    """One request: the held arm, the device when the link is late or given up; the first answer counts."""

    def __init__(self, replay: _Replay, decision: Decision, number: int, answered: Callable[[Arm], None]) -> None:
        self._replay = replay
        self._number = number
        self._agenda = replay.world.agenda
        self._decision = decision
        self._answered = answered
        self._began_s = self._agenda.now_s
        self._attempt: _Attempt | None = None
        self._job: Job | None = None
        self._timers: list[Timer] = []
        self._asking: Timer | None = None

    def begin(self) -> None:
        arm = self._decision.arm
        patience_s = self._replay.decider.patience_s(self._decision, DEADLINE_S) if arm.link is not None else 0.0
        if patience_s <= 0:
            self._on_device()
            return
        cost = self._replay.took(self._number, arm)
        self._attempt = _Attempt(self._replay.world, cost, self._by_link, self._consider)
        self._timers.append(self._agenda.at(self._began_s + patience_s, self._give_up))
        self._attempt.begin()
        if self._attempt.began_s is None:
            self._consider()

    def _consider(self) -> None:
        """Ask when to start the device too, until it has begun."""
        if self._job is not None:
            return
        run, now_s = self._replay, self._agenda.now_s
        found = run.decider.hedge(
            self._decision, run.world.views(), now_s, run.policy, stoppable=run.stoppable, head_over=self._head_over()
        )
        if found.instead:
            assert self._attempt is not None
            self._attempt.cancel()
            self._on_device()
        elif found.start_in_s <= 0:
            run.hedges += 1
            run.decider.hedged(found)
            self._on_device(lambda ran_s: run.decider.hedge_over(found, ran_s))
        elif found.start_in_s < inf:
            self._ask_again(found.start_in_s)
        else:
            self._ask_again(inf)

    def _ask_again(self, start_in_s: float) -> None:
        """What is seen of the link changes while it is waited for."""
        if self._asking is not None:
            self._asking.cancel()
        self._asking = self._agenda.at(self._agenda.now_s + min(start_in_s, ASK_AGAIN_S), self._consider)

    def _on_device(self, left: Callable[[float], None] | None = None) -> None:
        if self._job is None:
            seconds = self._replay.took(self._number, DEVICE_ARM).device_s
            if self._attempt is not None and self._head_over():
                seconds = min(seconds, self._attempt.cost.goes_on_s)
            self._job = self._replay.world.lane.submit(seconds, self._by_device, left)

    def _head_over(self) -> bool:
        return self._attempt is not None and self._attempt.began_s is not None

    def _give_up(self) -> None:
        assert self._attempt is not None
        self._attempt.cancel()
        self._replay.decider.failed(LINK, "link slow", self._agenda.now_s)
        self._on_device()

    def _by_link(self) -> None:
        self._replay.decider.answered(LINK)
        if self._job is not None:
            self._replay.world.lane.cancel(self._job)
        self._end(self._decision.arm)

    def _by_device(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
        self._end(DEVICE_ARM)

    def _end(self, arm: Arm) -> None:
        for timer in (*self._timers, *((self._asking,) if self._asking is not None else ())):
            timer.cancel()
        self._answered(arm)
