"""The stream owner: planned moves and losses at any token and in each phase, 0 lost and 0 doubled."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.fakes_text import FakeTextEngine
from gateway.settings import GatewaySettings
from gateway.stops import Owned
from gateway.stream import AnswerCut
from gateway.targets import Target, TargetView
from protocol.errors import (
    ContextOverflow,
    EngineCrashed,
    Full,
    LinkClosed,
    LinkTimeout,
    MidstreamError,
    NotFound,
    ProtocolError,
)
from protocol.events import HandedOver, SourceLost
from protocol.policy import DispatchPolicy, MigrationPolicy
from protocol.text import Prompt, TextCapabilities
from tests.unit.gateway.streams import STAY, assert_all_closed, assert_law, collect, expected, rig, target

COUNT = 48
Phase = Literal["prepare", "extend", "start", "token"]


def moving(at: int) -> MigrationPolicy:
    """A policy that moves as soon as it can after `at` tokens."""
    return MigrationPolicy(min_tokens=at, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=0.6)


async def moved(at: int, cloud: FakeTextEngine, device: FakeTextEngine | None = None, count: int = COUNT):  # type: ignore[no-untyped-def]
    """Runs one answer that may move from the device to the cloud after `at` tokens."""
    device = device or FakeTextEngine(name="device", tokens_per_s=2000)
    made = rig([target("device", device), target("cloud", cloud, tokens_per_s=1e9)], migration=moving(at))
    owned = await collect(made.owner)
    assert_law(owned, count)
    assert_all_closed(device, cloud)
    return made, owned


async def test_one_engine_gives_its_stream_and_a_finish_reason() -> None:
    engine = FakeTextEngine()
    made = rig([target("device", engine)])
    assert_law(await collect(made.owner), COUNT)
    assert made.owner.finish == "length"
    assert made.owner.sides == (("device", COUNT),)
    assert made.owner.prompt_tokens == 5
    assert_all_closed(engine)


async def test_an_answer_that_ends_by_itself_says_stop() -> None:
    made = rig([target("device", FakeTextEngine(answer_tokens=21))])
    owned = await collect(made.owner)
    assert [one.token.data for one in owned] == [token.data for token in expected(21)]
    assert made.owner.finish == "stop"


@pytest.mark.parametrize("to_cloud", [True, False])
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(at=st.integers(1, 40), vocabulary=st.sampled_from(["fake-vocabulary", "another"]))
async def test_planned_moves_at_any_token_keep_the_law(at: int, vocabulary: str, to_cloud: bool) -> None:
    source, sink = FakeTextEngine(tokens_per_s=2000), FakeTextEngine(vocabulary=vocabulary)
    first, second = ("device", "cloud") if to_cloud else ("cloud", "device")
    made = rig([target(first, source), target(second, sink, tokens_per_s=1e9)], migration=moving(at))
    owned = await collect(made.owner)
    assert_law(owned, COUNT)
    assert_all_closed(source, sink)
    [event] = made.of(HandedOver) or [None]
    if event is None:
        # Only an answer that ended before a boundary was found may stay.
        assert at > 24
        return
    assert isinstance(event, HandedOver)
    assert event.index >= at
    assert made.owner.sides == ((first, event.index), (second, COUNT - event.index))
    prefix = sink.prepared[0].prefix
    assert all((token.id is not None) == (vocabulary == "fake-vocabulary") for token in prefix)


async def test_the_text_path_cuts_between_words_only() -> None:
    cloud = FakeTextEngine(vocabulary="another")
    made, owned = await moved(6, cloud)
    [event] = made.of(HandedOver)
    assert owned[event.index].token.data.startswith(b" ")
    assert cloud.prepared[0].prefix[0].id is None


@pytest.mark.parametrize("phase", ["prepare", "extend", "start", "token"])
@pytest.mark.parametrize("at", range(1, 21))
async def test_target_lost_in_each_phase(phase: Phase, at: int) -> None:
    """Prepare, extend, cut-over and after, at 20 places each."""
    cloud = FakeTextEngine(name="cloud", prefill_tokens_per_s=5000)
    cloud.fail(phase, LinkClosed("gone"), index=max(at + 10, 16))
    made, _ = await moved(at, cloud)
    if phase != "token":
        assert made.owner.sides == (("device", COUNT),)


@pytest.mark.parametrize("phase", ["prepare", "extend", "start", "token"])
@pytest.mark.parametrize("error", [EngineCrashed("gone"), ProtocolError("bad frame"), None])
async def test_target_lost_in_other_ways(phase: Phase, error: MidstreamError | None) -> None:
    """A crash, a broken frame and silence."""
    cloud = FakeTextEngine(name="cloud", prefill_tokens_per_s=5000)
    cloud.fail(phase, error, index=20)
    await moved(6, cloud)


class Deadly(FakeTextEngine):
    """Kills `victim` when it enters `phase` for the first time."""

    def __init__(self, victim: FakeTextEngine, phase: Phase) -> None:
        super().__init__(name="cloud", prefill_tokens_per_s=3000)
        self.victim, self.phase = victim, phase
        self.struck = False

    async def pass_phase(self, phase: Phase, killed: asyncio.Event, seconds: float, index: int = 0) -> None:
        if phase == self.phase and not self.struck:
            self.struck = True
            self.victim.kill()
        await super().pass_phase(phase, killed, seconds, index)


@pytest.mark.parametrize("phase", ["prepare", "extend", "start", "token"])
@pytest.mark.parametrize("at", range(1, 21))
async def test_source_lost_while_the_target_is_in_each_phase(phase: Phase, at: int) -> None:
    """Prepare, extend, cut-over and after, at 20 places each; the source never comes back."""
    device = FakeTextEngine(name="device", tokens_per_s=2000)
    cloud = Deadly(device, phase)
    made, _ = await moved(at, cloud, device)
    assert cloud.struck
    assert [side for side, _ in made.owner.sides] == ["device", "cloud"]


@pytest.mark.parametrize("error", [EngineCrashed("gone"), LinkClosed("gone"), None])
@pytest.mark.parametrize("lost_at", [1, 2, 8, 9, 12, 18])
async def test_source_lost_in_other_ways(error: MidstreamError | None, lost_at: int) -> None:
    device = FakeTextEngine(name="device", tokens_per_s=2000)
    device.fail("token", error, index=lost_at)
    await moved(8, FakeTextEngine(name="cloud", prefill_tokens_per_s=3000), device)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    losses=st.lists(
        st.tuples(st.sampled_from(["device", "cloud"]), st.integers(1, COUNT - 1)), max_size=5, unique=True
    ),
    at=st.integers(1, 40),
    vocabulary=st.sampled_from(["fake-vocabulary", "another"]),
)
async def test_losses_on_both_sides_at_random_tokens(losses: list[tuple[str, int]], at: int, vocabulary: str) -> None:
    engines = {
        "device": FakeTextEngine(name="device", tokens_per_s=3000),
        "cloud": FakeTextEngine(name="cloud", vocabulary=vocabulary, prefill_tokens_per_s=20000),
    }
    for side, index in losses:
        engines[side].fail("token", LinkClosed("cut"), index=index)
    targets = [target("device", engines["device"]), target("cloud", engines["cloud"], tokens_per_s=1e9)]
    made = rig(targets, migration=moving(at))
    assert_law(await collect(made.owner), COUNT)
    assert_all_closed(*engines.values())


async def test_cloud_lost_after_the_move_goes_on_at_the_device_and_is_told() -> None:
    cloud = FakeTextEngine(name="cloud")
    cloud.fail("token", LinkClosed("cable cut"), index=30)
    made, _ = await moved(8, cloud)
    [over], [lost] = made.of(HandedOver), made.of(SourceLost)
    assert (lost.source, lost.target, lost.index) == ("cloud", "device", 30)
    assert "cable cut" in lost.reason
    assert made.owner.sides == (("device", over.index), ("cloud", 30 - over.index), ("device", COUNT - 30))


async def test_a_loss_inside_a_character_makes_the_whole_character_anew() -> None:
    """X1: token 8 is the first half of a character; the source dies before the second half."""
    device, cloud = FakeTextEngine(name="device"), FakeTextEngine(name="cloud", vocabulary="another")
    device.fail("token", EngineCrashed("gone"), index=9)
    made = rig([target("device", device), target("cloud", cloud)])
    assert_law(await collect(made.owner), COUNT)
    [lost] = made.of(SourceLost)
    assert lost.index == 8
    assert made.owner.sides == (("device", 8), ("cloud", COUNT - 8))


async def test_a_stalled_source_is_lost_only_when_somebody_else_can_go_on() -> None:
    alone = FakeTextEngine(tokens_per_s=3.0)
    made = rig([target("device", alone)], max_tokens=2, migration=MigrationPolicy(enabled=False, stall_s=0.05))
    assert_law(await collect(made.owner), 2)


async def test_an_end_without_finish_reason_is_a_loss() -> None:
    """S2: the upstream closes in order after some tokens and says nothing."""

    class Short(FakeTextEngine):
        async def prepare(self, request, deadline_s):  # type: ignore[no-untyped-def, override]
            continuation = await super().prepare(request, deadline_s)
            inner = continuation.start

            async def cut(at, ahead_tokens):  # type: ignore[no-untyped-def]
                async for token in inner(at, ahead_tokens):
                    if token.index == 11:
                        return
                    yield token

            continuation.start = cut  # type: ignore[method-assign]
            return continuation

    cloud, device = Short(name="cloud"), FakeTextEngine(name="device")
    made = rig([target("cloud", cloud), target("device", device)])
    assert_law(await collect(made.owner), COUNT)
    assert [event.index for event in made.of(SourceLost)] == [11]


async def test_doubled_tokens_are_dropped_and_a_gap_is_a_loss() -> None:
    class Stutter(FakeTextEngine):
        async def prepare(self, request, deadline_s):  # type: ignore[no-untyped-def, override]
            continuation = await super().prepare(request, deadline_s)
            inner = continuation.start

            async def stutter(at, ahead_tokens):  # type: ignore[no-untyped-def]
                async for token in inner(at, ahead_tokens):
                    if token.index == 20:
                        continue
                    yield token
                    yield token

            continuation.start = stutter  # type: ignore[method-assign]
            return continuation

    made = rig([target("cloud", Stutter()), target("device", FakeTextEngine())])
    assert_law(await collect(made.owner), COUNT)
    [lost] = made.of(SourceLost)
    assert lost.index == 20
    assert "expected token 20, got 21" in lost.reason


async def test_nobody_left_is_an_error_with_the_place() -> None:
    """S2, S4: a truncated answer is never silent."""
    device = FakeTextEngine()
    owned = []
    with pytest.raises(AnswerCut, match="cut at token 5"):
        async for one in rig([target("device", device)]).owner.tokens():
            owned.append(one)
            if len(owned) == 5:
                device.kill()
    assert_law(owned, 5)
    assert_all_closed(device)


async def test_an_engine_that_restarted_takes_its_own_answer_up_again() -> None:
    device = FakeTextEngine()
    device.fail("token", EngineCrashed("worker died"), index=17)
    made = rig([target("device", device)])
    assert_law(await collect(made.owner), COUNT)
    assert [event.target for event in made.of(SourceLost)] == ["device"]


async def test_losses_are_bounded() -> None:
    device = FakeTextEngine()
    for index in range(5, 12):
        device.fail("token", EngineCrashed("again"), index=index)
    made = rig([target("device", device)], settings=GatewaySettings(max_losses=3))
    with pytest.raises(AnswerCut, match="cut at token 8"):
        await collect(made.owner)


async def test_an_engine_that_cannot_continue_is_no_fallback() -> None:
    cloud, device = FakeTextEngine(name="cloud"), FakeTextEngine(name="device", continues="no")
    made = rig([target("cloud", cloud), target("device", device)])
    with pytest.raises(AnswerCut):
        await collect(made.owner, lambda one: cloud.kill() if one.token.index == 10 else None)
    assert device.prepared == []


async def test_the_first_failure_before_any_token_starts_the_next_target_at_once() -> None:
    cloud, device = FakeTextEngine(name="cloud"), FakeTextEngine(name="device")
    cloud.fail("prepare", LinkClosed("no route"))
    made = rig([target("cloud", cloud), target("device", device)], after_s=60.0)
    assert_law(await collect(made.owner), COUNT)
    assert made.owner.sides == (("device", COUNT),)


async def test_a_first_byte_that_never_comes_loses_the_race() -> None:
    """S1: the cloud accepts and says nothing; the device's answer is complete and the cloud's slot is free again."""
    cloud, device = FakeTextEngine(name="cloud"), FakeTextEngine(name="device")
    cloud.fail("start", None)
    made = rig([target("cloud", cloud), target("device", device)], after_s=0.05)
    assert_law(await collect(made.owner), COUNT)
    assert made.owner.sides == (("device", COUNT),)
    assert_all_closed(cloud, device)


async def test_what_is_wrong_with_the_request_is_told_before_what_is_wrong_with_a_peer() -> None:
    cloud, device = FakeTextEngine(name="cloud"), FakeTextEngine(name="device", context_tokens=3)
    cloud.fail("prepare", LinkClosed("no route"))
    with pytest.raises(ContextOverflow):
        await collect(rig([target("cloud", cloud), target("device", device)]).owner)


async def test_a_full_house_says_when_to_come_back() -> None:
    engines = [FakeTextEngine(capacity=0, retry_after_s=seconds) for seconds in (9.0, 4.0)]
    with pytest.raises(Full) as caught:
        await collect(rig([target("cloud", engines[0]), target("device", engines[1])]).owner)
    assert caught.value.retry_after_s == 4.0


async def test_deadline_ends_a_silent_answer() -> None:
    device = FakeTextEngine()
    device.fail("token", None, index=4)
    with pytest.raises(LinkTimeout, match="deadline"):
        await collect(rig([target("device", device)], deadline_s=0.2).owner)
    assert_all_closed(device)


@pytest.mark.parametrize("phase", ["prepare", "start", "token"])
async def test_cancelling_closes_the_generation_in_each_phase(phase: Phase) -> None:
    """C1, C2: client gone before the first token, in prefill and mid-stream."""
    device, other = FakeTextEngine(name="device"), FakeTextEngine(name="cloud")
    device.fail(phase, None, index=3)
    task = asyncio.create_task(collect(rig([target("device", device)], migration=STAY).owner))
    bystander = await other.prepare(rig([target("cloud", other)]).owner._request, 5.0)
    await asyncio.sleep(0.02)
    assert device.load().running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_all_closed(device)
    assert other.load().running == 1
    await bystander.close()


async def test_cancelling_while_a_target_prefills_ahead_closes_both() -> None:
    device, cloud = FakeTextEngine(name="device", tokens_per_s=500), FakeTextEngine(name="cloud")
    cloud.fail("prepare", None)
    made = rig([target("device", device), target("cloud", cloud, tokens_per_s=1e9)], migration=moving(2))
    stream = made.owner.tokens()
    async for one in stream:
        if one.token.index == 12:
            break
    assert (device.load().running, cloud.load().running) == (1, 1)
    await stream.aclose()  # type: ignore[attr-defined]
    assert_all_closed(device, cloud)


async def test_a_slow_reader_holds_the_engine_back() -> None:
    device = FakeTextEngine()
    made = rig([target("device", device)], settings=GatewaySettings(ahead_tokens=4))
    stream = made.owner.tokens()
    async for one in stream:
        if one.token.index == 10:
            break
    await asyncio.sleep(0.02)
    assert device.generated_count <= 10 + 4 + 1
    await stream.aclose()  # type: ignore[attr-defined]


async def test_acknowledgements_follow_the_reader() -> None:
    device = FakeTextEngine()
    made = rig([target("device", device)], settings=GatewaySettings(ahead_tokens=1))
    assert_law(await collect(made.owner), COUNT)


async def test_no_move_back_to_a_side_that_was_lost_in_this_answer() -> None:
    cloud = FakeTextEngine(name="cloud")
    cloud.fail("token", LinkClosed("gone"), index=16)
    made, _ = await moved(4, cloud)
    assert len(made.of(HandedOver)) == 1
    assert made.owner.sides[-1] == ("device", COUNT - 16)


async def test_an_engine_that_does_not_tell_its_vocabulary_gets_bytes() -> None:
    class Silent(FakeTextEngine):
        async def capabilities(self) -> TextCapabilities:
            raise NotFound("which model?")

    cloud = Silent(name="cloud")
    made, _ = await moved(6, cloud)
    assert len(made.of(HandedOver)) == 1
    assert all(token.id is None for token in cloud.prepared[0].prefix)


@pytest.mark.parametrize("prompt", [(5, 6, 7), "text"])
async def test_token_ids_of_a_request_never_reach_another_vocabulary(prompt: Prompt) -> None:
    cloud = FakeTextEngine(name="cloud", vocabulary="another")
    targets = [target("device", FakeTextEngine(tokens_per_s=1000)), target("cloud", cloud, tokens_per_s=1e9)]
    made = rig(targets, migration=moving(4), prompt=prompt)
    assert len(await collect(made.owner)) == COUNT
    assert len(made.of(HandedOver)) == (0 if isinstance(prompt, tuple) else 1)


def dear(name: str, engine: FakeTextEngine) -> Target:
    """A target whose tokens cost money."""
    return Target(name, name == "device", engine, frozenset({"fake"}), tokens_per_s=500, price_out=1e-5)


async def test_a_source_that_costs_money_stops_at_the_cut() -> None:
    """Nothing is made past it, although there is credit for more."""
    cloud, device = FakeTextEngine(name="cloud", tokens_per_s=400), FakeTextEngine(name="device")
    made = rig([dear("cloud", cloud), target("device", device, tokens_per_s=1e9)], migration=moving(6))
    assert_law(await collect(made.owner), COUNT)
    [event] = made.of(HandedOver)
    assert cloud.generated_count <= event.index + 1
    assert_all_closed(cloud, device)


@pytest.mark.parametrize("vocabulary", ["fake-vocabulary", "another"])
@pytest.mark.parametrize("error", [LinkClosed("gone"), None])
@pytest.mark.parametrize("at", [6, 9, 17, 25])
async def test_a_source_that_stopped_is_revived_when_the_target_fails(
    at: int, error: MidstreamError | None, vocabulary: str
) -> None:
    cloud, device = FakeTextEngine(name="cloud", tokens_per_s=400), FakeTextEngine(name="device", vocabulary=vocabulary)
    device.fail("start", error)
    made = rig([dear("cloud", cloud), target("device", device, tokens_per_s=1e9)], migration=moving(at))
    assert_law(await collect(made.owner), COUNT)
    assert made.owner.sides == (("cloud", COUNT),)
    assert [request.prefix != () for request in cloud.prepared] == [False, True], "the source was not revived"
    assert [(event.source, event.target) for event in made.of(SourceLost)] == [("device", "cloud")]
    assert_all_closed(cloud, device)


async def test_a_source_that_cannot_be_revived_is_told_as_the_cut_it_is() -> None:
    cloud = FakeTextEngine(name="cloud", tokens_per_s=400)

    class DiesWithAll(Deadly):
        async def pass_phase(self, phase: Phase, killed: asyncio.Event, seconds: float, index: int = 0) -> None:
            if phase == "start":
                self.kill()
            await super().pass_phase(phase, killed, seconds, index)

    device = DiesWithAll(cloud, "start")
    made = rig([dear("cloud", cloud), target("device", device, tokens_per_s=1e9)], migration=moving(6))
    owned: list[Owned] = []
    with pytest.raises(AnswerCut):
        async for one in made.owner.tokens():
            owned.append(one)
    assert len(owned) >= 6
    assert_law(owned, len(owned))
    assert_all_closed(cloud, device)


async def test_an_answer_may_come_back_when_policy_lets_it_move_twice() -> None:
    """And not a third time: each further move must be worth more."""
    device, cloud = FakeTextEngine(name="device", tokens_per_s=1000), FakeTextEngine(name="cloud", tokens_per_s=300)
    policy = evolve(moving(6), max_moves=6, consume_tokens_per_s=0.01)
    targets = [target("device", device, tokens_per_s=1e9), target("cloud", cloud, tokens_per_s=1e12)]
    made = rig(targets, migration=policy)
    assert_law(await collect(made.owner), COUNT)
    moves = made.of(HandedOver)
    assert len(moves) <= 2
    assert_all_closed(device, cloud)


@pytest.mark.parametrize(("joule_price", "moves"), [(0.0, 0), (1e-4, 1)])
async def test_a_device_whose_energy_is_dear_hands_its_answer_over(joule_price: float, moves: int) -> None:
    device, cloud = FakeTextEngine(name="device", tokens_per_s=400), FakeTextEngine(name="cloud")
    targets = [target("device", device, tokens_per_s=400), target("cloud", cloud, tokens_per_s=20)]

    def priced(view: TargetView, policy: DispatchPolicy) -> TargetView:
        return evolve(view, price_out=joule_price) if view.local else view

    made = rig(targets, migration=moving(6), priced=priced)
    assert_law(await collect(made.owner), COUNT)
    assert len(made.of(HandedOver)) == moves
    assert_all_closed(device, cloud)
