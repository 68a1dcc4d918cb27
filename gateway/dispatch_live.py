"""Dispatch at work: requests look plans up, and a timer that runs only while there are requests makes them anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from attrs import evolve

from gateway.context import Constraints
from gateway.dispatch import DispatchPlan
from gateway.dispatch_plans import Plans
from gateway.targets import LocalWork, TargetView
from profiles.energy import PowerState, Span
from profiles.power_meter import Reading
from protocol.clock import Clock
from protocol.events import Emit, RegimeChosen
from protocol.policy import DispatchPolicy, Policy

log = logging.getLogger("midstream.gateway.dispatch")

FIRST_S = 0.05
"""After a request that found the timer asleep: the request is on its way by then."""

PERIOD_S = 1.0
"""While requests run; power that is told in watts is integrated over these steps too."""


STATE_PERIOD_S = 10.0
"""Battery and heat change slowly; only budgets of energy need them more often."""


class Power(Protocol):
    """Where the device's energy comes from and goes."""

    def sample(self, now_s: float) -> tuple[Reading | None, PowerState]:
        """Sums of the meter, None without one, and the state. Takes a few milliseconds at most; never raises."""
        ...


class NoPower:
    """A house that is not told of its power: unknown source, no meter."""

    def sample(self, now_s: float) -> tuple[Reading | None, PowerState]:
        return None, PowerState()


class Dispatcher:
    """Plans of one house. `running` tells how many requests are under way.

    work: FLOPs of local targets, counted by whoever sees their tokens.
    """

    def __init__(
        self,
        plans: Plans,
        views: Callable[[str], Sequence[TargetView]],
        policy: Callable[[], Policy],
        running: Callable[[], int],
        work: LocalWork,
        power: Power,
        clock: Clock,
        emit: Emit,
    ) -> None:
        self.plans = plans
        self._views = views
        self._policy = policy
        self._running = running
        self._work = work
        self._power = power
        self._clock = clock
        self._emit = emit
        self._timer: asyncio.TimerHandle | None = None
        self._begun: tuple[Reading, LocalWork] | None = None
        self.state = PowerState()
        """As it was seen last; routing looks at it."""
        self._state_at_s = -inf

    def plan(
        self,
        model: str,
        prompt_tokens: int,
        targets: Sequence[TargetView],
        constraints: Constraints,
        draw: float,
        policy: DispatchPolicy,
        patience_s: float,
    ) -> DispatchPlan:
        """The starts of one request; see Plans.plan."""
        found = self.plans.plan(model, prompt_tokens, targets, constraints, draw, policy, patience_s)
        self._wake()
        return found

    def alone(self, model: str, prompt_tokens: int, name: str, policy: DispatchPolicy) -> DispatchPlan:
        """The start of a request that one target alone may answer; see Plans.alone."""
        found = self.plans.alone(model, prompt_tokens, name, policy)
        self._wake()
        return found

    def _wake(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST_S, self._tick)

    def stop(self) -> None:
        """No timer after this."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        busy = self._running() > 0
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick) if busy else None
        self.refresh(busy)

    def refresh(self, busy: bool) -> None:
        """Take in what was seen. Energy is fitted between moments at which nothing ran: then all work is counted."""
        whole = self._policy()
        policy, now_s = whole.dispatch, self._clock()
        state = PowerState()
        stale = whole.routing.dynamic.enable and now_s - self._state_at_s >= STATE_PERIOD_S
        if policy.budget_ratio < 1.0 or stale:
            reading, state = self._power.sample(now_s)
            self.state, self._state_at_s = state, now_s
            if reading is not None and not busy:
                self._fit(reading)
        for chosen in self.plans.refresh(self._views, policy, state):
            log.info(
                "%s with %s: %s (%.3g on the device, %.3g there, %.3g a joule)",
                chosen.model, chosen.server, chosen.regime.replace("_", "-"),
                chosen.costs.device, chosen.costs.server, chosen.money_per_joule,
            )  # fmt: skip
            self._emit(
                RegimeChosen(
                    at_s=self._clock(),
                    model=chosen.model,
                    server=chosen.server,
                    regime=chosen.regime,
                    device_money=chosen.costs.device,
                    server_money=chosen.costs.server,
                    money_per_joule=chosen.money_per_joule,
                    calibrated=self.plans.energy.calibrated,
                )
            )

    def _fit(self, reading: Reading) -> None:
        begun, self._begun = self._begun, (reading, evolve(self._work))
        if begun is None:
            return
        (before, work), now = begun, self._work
        self.plans.energy = self.plans.energy.observed(
            Span(
                reading.joules - before.joules,
                reading.seconds - before.seconds,
                now.prefill_flops - work.prefill_flops,
                now.decode_flops - work.decode_flops,
            )
        )
