"""Budgets through the whole text way: what is started, who is billed, what never leaves the allowed set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from attrs import evolve

from engines.fakes_text import FakeTextEngine
from gateway.pipeline import TextWay
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.targets import Target
from protocol.chat import ChatRequest
from protocol.errors import LinkClosed
from protocol.events import RecordingEmit, RegimeChosen, TextDone
from protocol.policy import DispatchPolicy, Policy, PrivacyPolicy, RoutingPolicy, TokenPrice
from protocol.text import Sampling
from tests.unit.gateway.streams import MODEL, STAY

DEAR_SERVER = DispatchPolicy(prices={"cloud": TokenPrice(1.0, 0.5, 2.0)})
DEAR_DEVICE = DispatchPolicy(money_per_joule=1.0)
LONG = "w" * 4_000


class House:
    """Two fake engines, a policy that may change, and what was emitted."""

    def __init__(self) -> None:
        self.device = FakeTextEngine(name="device", answer_tokens=8, prefill_tokens_per_s=20_000)
        self.cloud = FakeTextEngine(name="cloud", answer_tokens=8)
        self.policy = Policy(migration=STAY, routing=RoutingPolicy(targets=("device", "cloud")))
        self.emit = RecordingEmit()
        self.draw = 0.5
        targets = (
            Target("device", True, self.device, frozenset({MODEL}), prefill_tokens_per_s=20_000, parameters=1e9),
            Target("cloud", False, self.cloud, frozenset({MODEL})),
        )
        ports = GatewayPorts(
            targets=lambda: targets, policy=lambda: self.policy, emit=self.emit, clock=time.monotonic,
            draw=lambda: self.draw,
        )  # fmt: skip
        self.way = TextWay(GatewaySettings(drain_s=0.1), ports)

    def follow(self, dispatch: DispatchPolicy, **budget: float) -> None:
        self.policy = evolve(self.policy, dispatch=evolve(dispatch, **budget))  # type: ignore[arg-type]

    async def ask(self, prompt: str = "hello") -> TextDone:
        answer = await self.way.answer(ChatRequest(MODEL, prompt, Sampling(max_tokens=8), endpoint="completion"))
        async for _ in answer.pieces():
            pass
        event = self.emit.events[-1]
        assert isinstance(event, TextDone)
        return event


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.way.stop()


async def test_the_preference_holds_while_there_is_no_budget(house: House) -> None:
    for start, side in (("device", "device"), ("cloud", "cloud")):
        house.follow(evolve(DEAR_SERVER, start=start))
        done = await house.ask()
        assert (done.sides[0][0], done.losers) == (side, ())
        assert done.reason == f"policy.dispatch.start = {start}"


@pytest.mark.parametrize(
    ("dispatch", "other"), [(DEAR_SERVER, "device"), (DEAR_DEVICE, "cloud")], ids=["server", "device"]
)
async def test_a_budget_of_nothing_spares_the_dear_side_against_the_preference(
    house: House, dispatch: DispatchPolicy, other: str
) -> None:
    house.follow(evolve(dispatch, start="cloud" if other == "device" else "device"), budget_ratio=0.0)
    for prompt in ("hello", LONG):
        done = await house.ask(prompt)
        assert (done.sides, done.losers) == (((other, 8),), ())
    spared = house.cloud if other == "device" else house.device
    assert spared.prepared == []


async def test_a_race_is_won_by_one_and_paid_for_both(house: House) -> None:
    house.follow(DEAR_SERVER, budget_ratio=0.999)
    done = await house.ask(LONG)
    assert len(done.losers) == 1
    assert {done.sides[0][0], *done.losers} == {"device", "cloud"}
    assert done.reason.startswith("server-constrained, budget 0.999")
    assert "both at once" in done.reason


async def test_privacy_goes_before_any_budget(house: House) -> None:
    house.follow(DEAR_DEVICE, budget_ratio=0.0)
    house.policy = evolve(house.policy, privacy=PrivacyPolicy(local_only=True))
    done = await house.ask(LONG)
    assert done.sides == (("device", 8),)
    assert house.cloud.prepared == []


async def test_a_server_that_fails_is_replaced_at_once_whatever_the_budget(house: House) -> None:
    house.follow(DEAR_DEVICE, budget_ratio=0.0)
    house.cloud.fail("prepare", LinkClosed("gone"))
    begun_s = time.monotonic()
    done = await house.ask()
    assert done.sides == (("device", 8),)
    assert time.monotonic() - begun_s < 2.0, "not after its patience"


async def test_the_regime_is_told_when_it_is_first_derived(house: House) -> None:
    house.follow(DEAR_SERVER, budget_ratio=0.3)
    await house.ask()
    await _until(lambda: any(isinstance(event, RegimeChosen) for event in house.emit.events))
    [event] = [event for event in house.emit.events if isinstance(event, RegimeChosen)]
    assert (event.model, event.server, event.regime) == (MODEL, "cloud", "server_constrained")
    assert event.server_money > event.device_money == 0.0


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not done():
            await asyncio.sleep(0.02)


async def test_a_weaker_model_stands_in_only_with_the_policys_consent() -> None:
    device, cloud = FakeTextEngine(answer_tokens=8), FakeTextEngine(answer_tokens=8)
    cloud.fail("prepare", LinkClosed("gone"))
    weak = Target("device", True, device, frozenset({"small", MODEL}), weaker=frozenset({MODEL}))
    policy = [Policy(migration=STAY)]
    ports = GatewayPorts(
        targets=lambda: (weak, Target("cloud", False, cloud, frozenset({MODEL}))), policy=lambda: policy[0]
    )
    way = TextWay(GatewaySettings(drain_s=0.1), ports)
    chat = ChatRequest(MODEL, "hello", Sampling(max_tokens=8), endpoint="completion")

    async def sides() -> tuple[tuple[str, int], ...]:
        answer = await way.answer(chat)
        async for _ in answer.pieces():
            pass
        return answer.owner.sides

    with pytest.raises(LinkClosed):
        await sides()
    assert device.prepared == [], "not even as a fallback"
    policy[0] = evolve(policy[0], dispatch=DispatchPolicy(weaker_model=True))
    assert await sides() == (("device", 8),)
    await way.stop()
