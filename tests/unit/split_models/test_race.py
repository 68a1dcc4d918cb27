"""Hedging: the device beside a late link. One answer, the loser is gone, the seconds are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from math import inf

import pytest
import pytest_asyncio
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import EngineError, Full, LinkClosed, LinkTimeout, Loading, MidstreamError, NotFound
from protocol.events import TransferSample
from protocol.exposition import Exposition
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from tests.unit.split_models.parts import HEAD, TAIL, Reaction, Scripted, floats
from tests.unit.split_models.runner_house import ANSWER, FAST, PRIVATE, SENT, House, Y, decoded

LOST = evolve(FAST, residuals=(inf,))
"""A link whose last transfer never ended."""

REST = floats("y", 7, 8)
"""What the tail answers on this device, unlike the whole model."""


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    """Requests go to the cloud; the budget allows every hedge."""
    made = House(policy=SplitPolicy(explore_one_in=0, hedge_ratio=1.0))
    await made.until("cloud")
    yield made
    await made.runner.close()


async def test_a_link_that_is_late_is_answered_by_the_device_and_given_up(house: House) -> None:
    house.views["cloud"] = LOST
    house.remote.reactions["m"] = 30.0
    answer = await asyncio.wait_for(house.ask(), 5.0)
    assert (str(answer.arm), bytes(answer.outputs[0].data)) == ("device", bytes(ANSWER.data))
    done = house.done()[-1]
    assert (done.hedged, done.winner, done.status) == (True, "device", "ok")
    assert "hedge for cloud" in done.reason
    assert house.remote.cancelled == ["m"], "the link's arm goes on for nobody"
    assert house.runner.held.arm.kind == "cloud", "a hedge that won is no switch"


async def test_a_link_that_answers_first_ends_the_devices_run(house: House) -> None:
    house.views["cloud"] = LOST
    house.local.reactions["m"] = 30.0
    answer = await asyncio.wait_for(house.ask(), 5.0)
    assert str(answer.arm) == "cloud"
    assert (house.done()[-1].hedged, house.done()[-1].winner) == (True, "link")
    assert house.local.cancelled == ["m"]


@pytest.mark.parametrize("error", [Full("busy", retry_after_s=1.0), EngineError("broken")])
async def test_a_hedge_that_fails_does_not_end_the_request(house: House, error: EngineError) -> None:
    house.views["cloud"] = LOST
    house.local.reactions["m"] = error
    house.remote.after_s = 0.02
    assert str((await asyncio.wait_for(house.ask(), 5.0)).arm) == "cloud"
    assert house.done()[-1].status == "ok"


async def test_a_link_that_fails_beside_a_hedge_is_blamed_and_the_hedge_answers(house: House) -> None:
    house.views["cloud"] = LOST
    house.remote.reactions["m"] = LinkClosed("gone")
    house.local.after_s = 0.02
    asked = house.local.asked.count("m")
    assert str((await asyncio.wait_for(house.ask(), 5.0)).arm) == "device"
    assert "cloud failed: gone" in house.done()[-1].reason
    assert house.local.asked.count("m") == asked + 1, "the device ran twice for one request"
    await house.ask()
    assert house.switches()[-1].target == "device"


async def test_both_failing_is_one_named_error(house: House) -> None:
    house.views["cloud"] = LOST
    house.remote.reactions["m"] = LinkTimeout("late")
    house.local.reactions["m"] = EngineError("broken")
    with pytest.raises(EngineError, match="broken"):
        await asyncio.wait_for(house.ask(), 5.0)
    assert [event.status for event in house.done()].count("engine_error") == 1


async def test_the_policy_bounds_the_seconds_of_hedges() -> None:
    house = House(policy=SplitPolicy(explore_one_in=0, hedge_ratio=0.25))
    await house.until("cloud")
    house.views["cloud"] = LOST
    for _ in range(40):
        await house.ask()
    hedged = sum(event.hedged for event in house.done())
    assert 0 < hedged <= 0.25 * len(house.done())
    budget = house.runner.hedges
    assert budget.hedged_s <= 0.25 * budget.device_only_s + 1e-9
    await house.runner.close()


async def test_a_hedge_that_was_stopped_gives_back_what_it_did_not_use(house: House) -> None:
    house.views["cloud"] = LOST
    house.local.reactions["m"] = 30.0
    house.local.stopped_after_s = 0.01
    await asyncio.wait_for(house.ask(), 5.0)
    assert house.done()[-1].winner == "link"
    assert house.runner.hedges.hedged_s == pytest.approx(0.01)
    house.local.stopped_after_s = None
    await asyncio.wait_for(house.ask(), 5.0)
    assert house.runner.hedges.hedged_s > 0.05, "a run that goes on to its end counts whole"


async def test_without_a_share_nothing_is_hedged(house: House) -> None:
    house.policy = SplitPolicy(explore_one_in=0, hedge_ratio=0.0)
    house.views["cloud"] = LOST
    await house.ask()
    assert not any(event.hedged for event in house.done())


async def test_a_transfer_that_needs_too_long_is_given_up_for_the_device_where_nothing_may_be_hedged(
    house: House,
) -> None:
    house.policy = SplitPolicy(explore_one_in=0, hedge_ratio=0.0)
    house.remote.reactions["m"] = 30.0
    asked = asyncio.create_task(house.ask())
    count = house.remote.asked.count("m")
    while house.remote.asked.count("m") == count:
        await asyncio.sleep(0)
    house.clock.advance(0.1)
    sample = TransferSample(
        at_s=house.clock(), link="cloud", direction="up", size_bytes=100_000, seconds=0.1, complete=False, moved_bytes=0
    )
    house.views["cloud"] = evolve(FAST, bytes_per_s=1e3, under_way=sample)
    answer = await asyncio.wait_for(asked, 5.0)
    assert str(answer.arm) == "device"
    done = house.done()[-1]
    assert (done.hedged, done.status) == (False, "ok"), "nothing ran beside it"
    assert "given up" in done.reason
    assert house.remote.cancelled == ["m"]
    assert house.runner.hedges.hedged_s == 0.0


async def test_a_cut_is_hedged_and_the_picture_is_read_once() -> None:
    house = House(policy=evolve(PRIVATE, hedge_ratio=1.0))
    await house.until("cut:003:int8")
    house.views["cloud"] = LOST
    house.remote.reactions[TAIL] = 30.0
    read = decoded(house)
    assert str((await asyncio.wait_for(house.ask(), 5.0)).arm) == "device"
    assert decoded(house) == read + 1
    assert house.local.reactions[HEAD] == SENT
    await house.runner.close()


@pytest_asyncio.fixture
async def late_cut() -> AsyncIterator[House]:
    """Requests go to a cut, whose tail is here too and never comes over the link."""
    made = House(policy=evolve(PRIVATE, hedge_ratio=1.0))
    made.local.reactions[TAIL] = REST
    await made.until("cut:003:int8")
    made.views["cloud"] = LOST
    made.remote.reactions[TAIL] = 30.0
    made.local.asked.clear()
    yield made
    await made.runner.close()


async def test_a_late_cut_goes_on_here_from_what_its_head_computed(late_cut: House) -> None:
    answer = await asyncio.wait_for(late_cut.ask(), 5.0)
    assert (str(answer.arm), bytes(answer.outputs[0].data)) == ("cut:003:int8@device", bytes(REST.data))
    assert late_cut.local.asked == [HEAD, TAIL], "the whole model ran, or a part twice"
    assert late_cut.local.received[-1] == (SENT,), "the tail did not take what was to cross"
    done = late_cut.done()[-1]
    assert (done.hedged, done.winner, done.up_bytes) == (True, "device", 0)
    assert late_cut.runner.hedges.hedged_s == pytest.approx(0.1, abs=0.01), "head and tail take a tenth, by the priors"


async def test_the_tail_waits_for_its_head(late_cut: House) -> None:
    late_cut.local.after_s = 0.1
    await asyncio.wait_for(late_cut.ask(), 5.0)
    assert late_cut.local.asked == [HEAD, TAIL]


async def test_a_link_that_is_sooner_ends_the_tail_here(late_cut: House) -> None:
    late_cut.remote.reactions[TAIL] = Y
    late_cut.local.reactions[TAIL] = 30.0
    late_cut.local.stopped_after_s = 0.01
    late_cut.remote.after_s = 0.02
    hedged_s = late_cut.runner.hedges.hedged_s
    assert str((await asyncio.wait_for(late_cut.ask(), 5.0)).arm) == "cut:003:int8"
    assert late_cut.local.cancelled == [TAIL]
    assert late_cut.runner.hedges.hedged_s - hedged_s == pytest.approx(0.01)


@pytest.mark.parametrize("error", [EngineError("torn"), NotFound("gone"), Loading("out", retry_after_s=1.0)])
async def test_a_tail_that_fails_leaves_the_whole_model(late_cut: House, error: MidstreamError) -> None:
    late_cut.local.reactions[TAIL] = error
    answer = await asyncio.wait_for(late_cut.ask(), 5.0)
    assert (str(answer.arm), late_cut.local.asked) == ("device", [HEAD, TAIL, "m"])
    assert (late_cut.done()[-1].hedged, late_cut.done()[-1].winner) == (True, "device")
    set_aside = [name for name, err in late_cut.ran if err is not None]
    assert set_aside == ([] if isinstance(error, Loading) else [TAIL])


async def test_a_tail_that_is_not_in_memory_is_wanted_and_not_waited_for(late_cut: House) -> None:
    late_cut.local.unloaded.add(TAIL)
    assert str((await asyncio.wait_for(late_cut.ask(), 5.0)).arm) == "device"
    assert TAIL not in late_cut.local.asked
    assert [str(arm) for arm in late_cut.rests] == ["cut:003:int8"]


async def test_a_cut_whose_link_fails_goes_on_here_without_a_hedge(late_cut: House) -> None:
    late_cut.policy = evolve(PRIVATE, hedge_ratio=0.0)
    late_cut.remote.reactions[TAIL] = LinkClosed("gone")
    late_cut.views["cloud"] = FAST
    answer = await asyncio.wait_for(late_cut.ask(), 5.0)
    assert (str(answer.arm), late_cut.local.asked) == ("cut:003:int8@device", [HEAD, TAIL])
    assert not late_cut.done()[-1].hedged


far_ends = st.sampled_from(["answers", "late", "closed", "full", "broken", "not finite", "hangs"])
devices = st.sampled_from(["answers", "late", "full", "broken"])


@settings(max_examples=60)
@given(st.lists(st.tuples(far_ends, devices, st.booleans()), min_size=1, max_size=6))
def test_whatever_fails_each_request_has_one_end(requests: list[tuple[str, str, bool]]) -> None:
    """Link and device do what they like, in turn and side by side: one report, an answer or a named error."""

    async def scene() -> None:
        house = House(policy=SplitPolicy(explore_one_in=2, hedge_ratio=1.0, deadline_s=0.2))
        for count, (far, near, doubted) in enumerate(requests):
            house.views["cloud"] = LOST if doubted else FAST
            _play(house.remote, far, ANSWER)
            _play(house.local, near, Y)
            try:
                answer = await house.ask()
            except MidstreamError as err:
                assert house.done()[-1].status == err.code
            else:
                assert bytes(answer.outputs[0].data) == bytes(ANSWER.data)
                assert house.done()[-1].status == "ok"
            assert len(house.done()) == count + 1
        await house.runner.close()

    asyncio.run(scene())


def _play(end: Scripted, outcome: str, good: Tensor) -> None:
    failures: dict[str, Reaction] = {
        "closed": LinkClosed("gone"), "full": Full("busy", retry_after_s=1.0), "broken": EngineError("broken"),
        "not finite": floats(good.name, float("nan"), 2), "hangs": 0.25,
    }  # fmt: skip
    end.reactions["m"] = failures.get(outcome, good)
    end.after_s = 0.02 if outcome == "late" else 0.0


async def test_hedges_are_counted(house: House) -> None:
    house.views["cloud"] = LOST
    await house.ask()
    house.remote.reactions["m"] = 30.0
    await house.ask()
    page = Exposition()
    for event in house.emit.events:
        page(event)
    assert page.value("midstream_hedges_started_total", model="m") == 2
    assert page.value("midstream_hedges_won_total", model="m") == 1


async def test_a_client_that_leaves_takes_both_arms_along(house: House) -> None:
    house.views["cloud"] = LOST
    house.remote.reactions["m"] = house.local.reactions["m"] = 30.0
    task = asyncio.create_task(house.ask())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await house.runner.close()
    assert house.remote.cancelled == house.local.cancelled == ["m"]
    assert house.done()[-1].status == "cancelled"
