"""What dispatch learns: lengths, tables by server, the regime from money; and the timer that refreshes it."""

from __future__ import annotations

import asyncio
import random

import pytest
from attrs import evolve

from gateway.context import Constraints
from gateway.dispatch_cost import Costs, Workload, costs, regime_of
from gateway.dispatch_live import Dispatcher
from gateway.dispatch_plans import MAX_MODELS, Plans
from gateway.targets import LocalWork, TargetView
from gateway.ttft import ecdf
from profiles.energy import EnergyModel, PowerState
from profiles.power_meter import Reading
from protocol.events import RecordingEmit, RegimeChosen
from protocol.policy import DispatchPolicy, Policy

DEVICE = TargetView("device", local=True, prefill_s=0.01, parameters=1e9)
SERVER = TargetView(
    "cloud", local=False, ttft=ecdf([0.1 * k for k in range(1, 21)]), seen=20, price_in=1e-6, price_out=2e-6
)
POLICY = DispatchPolicy(budget_ratio=0.3, money_per_joule=1e-8)
ANY = Constraints()


def plans() -> Plans:
    return Plans(lambda: 100.0)


def ask(found: Plans, tokens: int, policy: DispatchPolicy = POLICY, draw: float = 0.5) -> tuple[str, ...]:
    """The starts' names at second 0."""
    plan = found.plan("m", tokens, [DEVICE, SERVER], ANY, draw, policy, 5.0)
    return tuple(name for name, after_s in plan.starts if after_s == 0.0)


def test_money_is_energy_at_lambda_and_the_servers_price() -> None:
    found = costs(DEVICE, evolve(SERVER, price_cached_in=1e-7, cached_ratio=0.5), Workload(100, 50), EnergyModel(), 2.0)
    joules = 2e9 * (100 * 6e-11 + 50 * 1.3e-10)
    assert found.device == pytest.approx(2.0 * joules)
    assert found.server == pytest.approx(100 * (0.5e-6 + 0.5e-7) + 50 * 2e-6)


@pytest.mark.parametrize(
    ("money", "held", "start", "regime"),
    [
        (Costs(2.0, 1.0), None, "device", "device_constrained"),
        (Costs(1.0, 2.0), None, "device", "server_constrained"),
        (Costs(1.0, 1.1), "device_constrained", "device", "device_constrained"),
        (Costs(1.0, 1.3), "device_constrained", "device", "server_constrained"),
        (Costs(1.1, 1.0), "server_constrained", "device", "server_constrained"),
        (Costs(0.0, 0.0), None, "device", "server_constrained"),
        (Costs(0.0, 0.0), "device_constrained", "device", "server_constrained"),
        (Costs(0.0, 0.0), None, "cloud", "device_constrained"),
    ],
)
def test_the_dear_side_is_spared_with_some_inertia(money: Costs, held: str | None, start: str, regime: str) -> None:
    assert regime_of(money, DispatchPolicy(start=start), held) == regime  # type: ignore[arg-type]


def test_lengths_are_learnt_by_refreshing_and_not_by_the_request() -> None:
    found = plans()
    assert ask(found, 3_000) == ("device", "cloud")
    for _ in range(500):
        ask(found, 3_000)
        ask(found, 9_000)
    # The prior's boundary still holds: nothing was made anew on the way.
    assert ask(found, 3_000) == ("device", "cloud")
    found.refresh(lambda model: [DEVICE, SERVER], POLICY, PowerState())
    # What was overspent meanwhile is taken back first.
    assert ask(found, 9_000, draw=0.0) == ("device",)


def test_the_share_that_is_asked_for_becomes_the_budget() -> None:
    found, draw = plans(), random.Random(3)
    asked = {3_000: 0, 9_000: 0}
    for number in range(3_000):
        if number % 16 == 0:
            found.refresh(lambda model: [DEVICE, SERVER], POLICY, PowerState())
        tokens = draw.choice((3_000, 9_000))
        asked[tokens] += number >= 1_000 and "cloud" in ask(found, tokens, draw=draw.random())
    # 30 % of the tokens: long prompts only, for they save more per token.
    assert asked[3_000] <= 20
    assert 9_000 * asked[9_000] == pytest.approx(0.3 * 2_000 * 6_000, rel=0.1)


def test_a_new_budget_holds_from_the_next_request_on() -> None:
    found = plans()
    assert ask(found, 3_000) == ("device", "cloud")
    assert ask(found, 3_000, evolve(POLICY, budget_ratio=0.0)) == ("device",)
    assert ask(found, 3_000, evolve(POLICY, budget_ratio=0.999)) == ("device", "cloud")


def test_without_a_budget_the_preference_decides() -> None:
    found = plans()
    for start in ("device", "cloud"):
        assert ask(found, 3_000, DispatchPolicy(start=start)) == (start,)  # type: ignore[arg-type]
    assert ask(found, 3_000, DispatchPolicy(start="race")) == ("device", "cloud")
    assert not found.regimes()


def test_battery_turns_the_regime_and_says_so_once() -> None:
    policy = evolve(POLICY, battery_factor=1e5)
    found = plans()
    ask(found, 100, policy)
    assert [c.regime for c in found.regimes()] == ["server_constrained"]
    changed = found.refresh(lambda model: [DEVICE, SERVER], policy, PowerState("battery", 0.5))
    assert [(c.server, c.regime) for c in changed] == [
        ("cloud", "server_constrained"), ("cloud", "device_constrained"),
    ]  # fmt: skip
    assert ask(found, 100_000, policy) == ("cloud",)
    assert not found.refresh(lambda model: [DEVICE, SERVER], policy, PowerState("battery", 0.4))


def test_a_server_that_left_takes_its_plan_along() -> None:
    found = plans()
    ask(found, 100)
    found.refresh(lambda model: [DEVICE], POLICY, PowerState())
    assert not found.regimes()
    found.refresh(lambda model: [], POLICY, PowerState())


def test_models_are_bounded() -> None:
    found = plans()
    for number in range(MAX_MODELS + 10):
        found.plan(f"m{number}", 10, [DEVICE, SERVER], ANY, 0.5, POLICY, 5.0)
    assert len(found.regimes()) == MAX_MODELS


class FakePower:
    """A meter that counts 10 W over its own seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.state = PowerState("battery", 0.5)

    def sample(self, now_s: float) -> tuple[Reading | None, PowerState]:
        self.now_s += 1.0
        return Reading(10.0 * self.now_s, self.now_s), self.state


async def test_the_timer_runs_only_while_there_are_requests() -> None:
    emit, power, work, running = RecordingEmit(), FakePower(), LocalWork(), [0]
    live = Dispatcher(
        plans(), lambda model: [DEVICE, SERVER], lambda: Policy(dispatch=POLICY), lambda: running[0], work, power,
        asyncio.get_running_loop().time, emit,
    )  # fmt: skip
    assert live.plan("m", 100, [DEVICE, SERVER], ANY, 0.5, POLICY, 5.0).regime == "server_constrained"
    assert power.now_s == 0.0
    await asyncio.sleep(0.15)
    assert power.now_s == 1.0
    await asyncio.sleep(0.1)
    assert power.now_s == 1.0, "nothing runs, nothing is read"
    live.plan("m", 100, [DEVICE, SERVER], ANY, 0.5, POLICY, 5.0)
    live.stop()
    await asyncio.sleep(0.1)
    assert power.now_s == 1.0


def test_energy_is_fitted_to_spans_between_idle_moments() -> None:
    emit, power, work = RecordingEmit(), FakePower(), LocalWork()
    live = Dispatcher(
        plans(), lambda model: [DEVICE, SERVER], lambda: Policy(dispatch=POLICY), lambda: 0, work, power,
        lambda: 0.0, emit,
    )  # fmt: skip
    live.refresh(busy=False)
    work.prefill_flops += 5e10
    live.refresh(busy=True)
    assert not live.plans.energy.spans
    live.refresh(busy=False)
    (span,) = live.plans.energy.spans
    assert (span.joules, span.seconds, span.prefill_flops) == (20.0, 2.0, 5e10)
    assert live.plans.energy.calibrated


def test_a_new_regime_is_an_event() -> None:
    emit, power = RecordingEmit(), FakePower()
    policy = evolve(POLICY, battery_factor=1e5)
    live = Dispatcher(
        plans(), lambda model: [DEVICE, SERVER], lambda: Policy(dispatch=policy), lambda: 0, LocalWork(), power,
        lambda: 0.0, emit,
    )  # fmt: skip
    live.plans.plan("m", 10, [DEVICE, SERVER], ANY, 0.5, policy, 5.0)
    live.refresh(busy=False)
    first, event = emit.events
    assert isinstance(first, RegimeChosen)
    assert isinstance(event, RegimeChosen)
    assert first.regime == "server_constrained"
    assert (event.model, event.server, event.regime) == ("m", "cloud", "device_constrained")
    assert event.device_money > event.server_money > 0
