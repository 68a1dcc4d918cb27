"""One request through plan, switch and arms: which arm it takes, what is sent, when that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from attrs import evolve

from protocol.clock import FakeClock
from protocol.exposition import Exposition
from protocol.policy import SplitPolicy
from split_models.arms import Work
from split_models.runner_ports import Answer
from tests.unit.split_models.parts import HEAD, TAIL, SlowWordRecipe, manifest
from tests.unit.split_models.runner_house import ANSWER, FAST, PRIVATE, SENT, House, Y


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.runner.close()


async def test_starts_on_the_device_and_moves_after_three_periods(house: House) -> None:
    for _ in range(6):
        await house.ask()
    assert house.arms() == ["device", "device", "device", "cloud", "cloud", "cloud"]
    (switch,) = house.switches()
    assert (switch.source, switch.target, switch.request_id) == ("device", "cloud", "r3")
    assert "better" in switch.reason


async def test_a_constant_link_switches_at_most_once(house: House) -> None:
    for _ in range(30):
        await house.ask()
    assert len(house.switches()) == 1


async def test_many_requests_in_one_period_count_once(house: House) -> None:
    for _ in range(20):
        await house.runner.infer(Work(encoded=b"good", tensors=()), "r", 10.0)
    assert set(house.arms()) == {"device"}


async def test_the_cut_arm_sends_only_the_crossing_tensor(house: House) -> None:
    house.policy = PRIVATE
    await house.until("cut:003:int8")
    assert set(house.remote.asked) == {TAIL}
    assert house.remote.received[-1] == (SENT,)
    last = house.done()[-1]
    assert (last.up_bytes, last.down_bytes) == (8, 8)
    assert last.head_s == pytest.approx(0.1)
    assert last.server_s == pytest.approx(0.01)


async def test_the_cloud_arm_sends_the_encoded_input(house: House) -> None:
    await house.until("cloud")
    sent = house.remote.received[-1][0]
    assert (sent.datatype, sent.shape, bytes(sent.data)) == ("BYTES", (1,), b"\x04\0\0\0good")


async def test_a_foreign_server_gives_no_digest(house: House) -> None:
    house.policy = PRIVATE
    house.remote.digest = ""
    await house.until("cut:003:int8")
    assert (await house.ask()).digest == manifest().digest


async def test_no_time_for_the_link_goes_straight_to_the_device(house: House) -> None:
    """The held link has become slower than the request can wait for; the device is in time."""
    await house.until("cloud")
    asked = len(house.remote.asked)
    house.views["cloud"] = evolve(FAST, floor_s=0.15)
    assert str((await house.ask(deadline_s=0.12)).arm) == "device"
    assert len(house.remote.asked) == asked


async def test_a_device_that_is_too_slow_for_the_deadline_keeps_nothing_back_from_the_link(house: House) -> None:
    house.policy = SplitPolicy(explore_one_in=0, deadline_s=1.0)
    house.local.compute_s = 5.0
    await house.ask()
    await house.until("cloud")
    for _ in range(5):
        assert str((await house.ask()).arm) == "cloud"


async def test_a_model_without_a_recipe_shows_what_its_raw_requests_use() -> None:
    house = House(policy=PRIVATE, recipe=None)
    house.local.reactions[house.runner.plan.whole] = Y
    for _ in range(6):
        last = await house.ask_raw()
    assert str(last.arm) == str(house.runner.held.arm) == house.runner.report().held == "cut:003:int8"
    assert "better" in house.runner.report().reason
    await house.runner.close()


async def test_a_look_that_the_policy_has_forbidden_meanwhile_is_not_made(house: House) -> None:
    house.policy = SplitPolicy(explore_one_in=1)
    house.local.after_s = 0.05
    task = asyncio.create_task(house.ask())
    await asyncio.sleep(0.01)
    house.policy = PRIVATE
    assert str((await task).arm) == "device"
    assert house.remote.asked == [], "the picture left although the policy forbids it"


async def test_no_request_switches_to_a_link_behind_its_own_look(house: House) -> None:
    """The look takes its time; the switch waits for it, no other look begins, and then the next request switches."""
    house.policy = SplitPolicy(explore_one_in=1)
    house.remote.after_s = 0.1
    for _ in range(8):
        await house.ask()
    assert set(house.arms()) == {"device"}
    assert house.remote.asked == ["m"]
    house.remote.after_s = 0.0
    await asyncio.sleep(0.15)
    assert str((await house.ask()).arm) == "cloud"


async def test_without_exploration_a_silent_link_is_left_alone(house: House) -> None:
    house.views.clear()
    for _ in range(50):
        await house.ask()
        await asyncio.sleep(0)
    assert house.remote.asked == []


async def test_the_first_request_looks_at_a_new_link(house: House) -> None:
    house.policy = SplitPolicy(explore_one_in=20)
    house.views.clear()
    assert str((await house.ask()).arm) == "device"
    await asyncio.sleep(0)
    assert house.remote.asked == ["m"]


async def test_an_unloaded_head_is_loaded_ahead_and_used_only_then(house: House) -> None:
    house.policy = PRIVATE
    house.local.unloaded.add(HEAD)
    for _ in range(6):
        await house.ask()
    assert set(house.arms()) == {"device"}
    assert HEAD in house.local.preloaded
    house.local.unloaded.clear()
    await house.until("cut:003:int8")


async def test_a_link_that_only_cuts_may_use_is_not_unknown_for_ever(house: House) -> None:
    """No head is loaded and the link is unknown: one is loaded, then the link is looked at through it."""
    house.policy = evolve(PRIVATE, explore_one_in=20)
    house.local.unloaded.add(HEAD)
    house.views.clear()
    await house.ask()
    assert house.local.preloaded == [HEAD]
    assert house.remote.asked == []
    house.local.unloaded.clear()
    await house.ask()
    assert house.remote.asked == [TAIL]


async def test_raw_tensors_do_not_unseat_the_encoded_arm(house: House) -> None:
    await house.until("cloud")
    for _ in range(5):
        assert (await house.ask_raw()).arm.kind in ("device", "cut")
        assert str((await house.ask()).arm) == "cloud"
    assert [s.target for s in house.switches()].count("cloud") == 1


async def test_a_policy_change_is_obeyed_by_the_next_request(house: House) -> None:
    await house.until("cloud")
    house.policy = PRIVATE
    answer = await house.ask()
    assert answer.arm.kind != "cloud"
    assert house.switches()[-1].source == "cloud"


async def test_cancelling_cancels_the_arm(house: House) -> None:
    house.local.reactions["m"] = 30.0
    task = asyncio.create_task(house.ask())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [event.status for event in house.done()] == ["cancelled"]


async def test_live_seconds_correct_the_costs(house: House) -> None:
    house.local.compute_s = 0.4
    for _ in range(3):
        await house.ask()
    assert house.runner.table.seconds("device", "whole") == pytest.approx(0.4)
    await house.until("cloud")
    assert house.runner.table.seconds("server", "cloud") == pytest.approx(0.01)


async def test_requests_under_way_while_the_arm_changes_are_answered_once_each(house: House) -> None:
    """The link stalls under some, the policy forbids their arm, the next ones are on the device already."""
    await house.until("cloud")
    count = len(house.done())
    house.remote.reactions["m"] = 0.3

    async def one(name: str) -> Answer:
        return await house.runner.infer(Work(encoded=b"good", tensors=()), name, 5.0)

    stalled = [asyncio.create_task(one(f"stalled{n}")) for n in range(3)]
    await asyncio.sleep(0.01)
    house.policy = PRIVATE
    house.remote.reactions["m"] = ANSWER
    after = [asyncio.create_task(one(f"after{n}")) for n in range(3)]
    answers = await asyncio.gather(*stalled, *after)
    assert all(bytes(answer.outputs[0].data) == bytes(ANSWER.data) for answer in answers)
    done = house.done()[count:]
    assert sorted(event.request_id for event in done) == sorted(
        [f"{k}{n}" for k in ("stalled", "after") for n in range(3)]
    )
    assert {event.status for event in done} == {"ok"}
    assert len(house.switches()) == 2, "both switches were announced once"


async def test_stages_are_reported_under_their_names() -> None:
    clock = FakeClock()
    house = House(clock=clock, recipe=SlowWordRecipe(clock, 0.25, 0.5))
    await house.ask()
    done = house.done()[0]
    assert (done.arm, done.pre_s, done.head_s, done.post_s) == ("device", 0.25, 0.1, 0.5)
    page = Exposition()
    page(done)
    page_text = page.render()
    assert sum(done.stages().values()) == pytest.approx(0.85)
    for stage in ("pre", "head", "post"):
        assert f'midstream_tensor_stage_seconds_count{{model="m",stage="{stage}"}} 1' in page_text
