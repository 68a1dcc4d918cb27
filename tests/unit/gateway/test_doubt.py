"""Answers that a small model begins: held back, judged, and begun anew by a better one before anybody saw a word."""

from __future__ import annotations

import time

import pytest
from attrs import evolve

from engines.fakes_text import FakeTextEngine
from gateway.attempt import StreamPorts
from gateway.calibration import Calibration, Scope
from gateway.context import Constraints, RequestContext
from gateway.doubt import Doubt, doubt_of
from gateway.settings import GatewaySettings
from gateway.stream import StreamOwner
from gateway.targets import AnswerLengths, Target, TargetBoard
from protocol.errors import EngineError
from protocol.events import HandedOver, RecordingEmit
from protocol.policy import Policy
from protocol.policy_routing import RouteFallback
from protocol.text import Sampling, TextRequest
from tests.unit.gateway.streams import MODEL, PROMPT, STAY, assert_all_closed, collect, expected

UNSURE = Calibration(Scope(MODEL, "w"), "mean", (0.0, 1.0), (0.0, 0.1), 0.8, 0.02, 0.2, 400)
SURE = evolve(UNSURE, probabilities=(0.9, 1.0))
POLICY = evolve(Policy(), migration=STAY, routing=evolve(Policy().routing, fallback=RouteFallback(True, 0.6, "cloud")))


def owner(
    device: FakeTextEngine,
    cloud: FakeTextEngine,
    curve: Calibration | None,
    *,
    decide_at: int = 8,
    max_tokens: int = 24,
) -> tuple[StreamOwner, RecordingEmit]:
    here = Target("device", True, device, frozenset({MODEL}), weights="w")
    there = Target("cloud", False, cloud, frozenset({MODEL}))
    emit = RecordingEmit()
    ports = StreamPorts(TargetBoard(), AnswerLengths(), time.monotonic, emit, dict)
    context = RequestContext("req-1", MODEL, time.monotonic() + 20, POLICY, Constraints())
    doubt = doubt_of(POLICY, [here, there], [there], lambda: [curve] if curve else [], "")
    assert doubt is not None
    doubt.decide_at = decide_at
    request = TextRequest(MODEL, PROMPT, Sampling(max_tokens=max_tokens))
    made = StreamOwner(context, request, [(here, 0.0)], [here, there], ports, GatewaySettings(), doubt)
    return made, emit


async def test_an_unsure_answer_is_begun_anew_and_nobody_sees_the_old_one() -> None:
    device, cloud = FakeTextEngine(name="device", says=[b"wrong "] * 40), FakeTextEngine(name="cloud")
    stream, emit = owner(device, cloud, UNSURE)
    owned = await collect(stream)
    assert [one.token.data for one in owned] == [token.data for token in expected(24)]
    assert stream.sides == (("cloud", 24),)
    (moved,) = [event for event in emit.events if isinstance(event, HandedOver)]
    assert (moved.source, moved.target, moved.index) == ("device", "cloud", 0)
    assert_all_closed(device, cloud)


async def test_a_sure_answer_stays_whole_and_costs_the_cloud_nothing() -> None:
    device, cloud = FakeTextEngine(name="device"), FakeTextEngine(name="cloud")
    stream, _ = owner(device, cloud, SURE)
    owned = await collect(stream)
    assert [one.token.index for one in owned] == list(range(24))
    assert stream.sides == (("device", 24),) and cloud.prepared == []
    assert_all_closed(device, cloud)


async def test_nothing_is_given_before_the_decision() -> None:
    device, cloud = FakeTextEngine(name="device", tokens_per_s=200), FakeTextEngine(name="cloud")
    stream, _ = owner(device, cloud, SURE, decide_at=8)
    tokens = stream.tokens()
    begun_s = time.monotonic()
    first = await anext(tokens)
    assert first.token.index == 0 and time.monotonic() - begun_s >= 7 / 200
    await tokens.aclose()
    assert_all_closed(device, cloud)


async def test_a_short_answer_is_judged_at_its_end() -> None:
    device, cloud = FakeTextEngine(name="device", answer_tokens=3), FakeTextEngine(name="cloud", answer_tokens=5)
    stream, _ = owner(device, cloud, UNSURE, decide_at=16)
    owned = await collect(stream)
    assert {one.side for one in owned} == {"cloud"} and stream.finish == "stop"
    assert_all_closed(device, cloud)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_cloud_that_cannot_be_reached_leaves_the_devices_answer_whole(ended: bool) -> None:
    device, cloud = FakeTextEngine(name="device", answer_tokens=4 if ended else 64), FakeTextEngine(name="cloud")
    cloud.fail("prepare", EngineError("the cloud is down"))
    stream, emit = owner(device, cloud, UNSURE)
    owned = await collect(stream)
    assert [one.token.index for one in owned] == list(range(len(owned))) and len(owned) == (4 if ended else 24)
    assert stream.sides == (("device", len(owned)),)
    assert not [event for event in emit.events if isinstance(event, HandedOver)]
    assert_all_closed(device, cloud)


async def test_an_engine_without_logprobs_is_not_believed() -> None:
    class Silent(FakeTextEngine):
        def said(self, prompt, index):  # type: ignore[no-untyped-def]
            return evolve(super().said(prompt, index), logprob=None, margin=None)

    device, cloud = Silent(name="device", logprobs=False), FakeTextEngine(name="cloud")
    stream, emit = owner(device, cloud, SURE)
    owned = await collect(stream)
    assert {one.side for one in owned} == {"cloud"}
    (moved,) = [event for event in emit.events if isinstance(event, HandedOver)]
    assert "logprobs" in moved.reason
    assert_all_closed(device, cloud)


async def test_the_device_is_asked_for_logprobs_and_the_cloud_is_not() -> None:
    device, cloud = FakeTextEngine(name="device"), FakeTextEngine(name="cloud", logprobs=False)
    stream, _ = owner(device, cloud, UNSURE)
    await collect(stream)
    assert device.prepared[0].sampling.logprobs == 1 and cloud.prepared[0].sampling.logprobs == 0
    assert_all_closed(device, cloud)


async def test_a_cloud_that_is_lost_later_is_gone_on_with_by_the_device() -> None:
    device, cloud = FakeTextEngine(name="device"), FakeTextEngine(name="cloud")
    cloud.fail("token", EngineError("cut"), index=12)
    stream, _ = owner(device, cloud, UNSURE)
    owned = await collect(stream)
    assert [one.token.data for one in owned] == [token.data for token in expected(24)]
    assert [side for side, _ in stream.sides] == ["cloud", "device"]
    assert_all_closed(device, cloud)


def test_doubt_needs_an_armed_fallback_a_device_and_somebody_better() -> None:
    engine = FakeTextEngine()
    here, there = Target("device", True, engine, frozenset({MODEL})), Target("cloud", False, engine, frozenset({MODEL}))
    assert isinstance(doubt_of(POLICY, [here, there], [there], tuple, ""), Doubt)
    assert doubt_of(Policy(), [here, there], [there], tuple, "") is None
    assert doubt_of(POLICY, [there], [there], tuple, "") is None
    assert doubt_of(POLICY, [here], [here], tuple, "") is None
    named = evolve(POLICY, routing=evolve(POLICY.routing, fallback=RouteFallback(True, 0.6, "openai")))
    assert doubt_of(named, [here, there], [there], tuple, "") is None
