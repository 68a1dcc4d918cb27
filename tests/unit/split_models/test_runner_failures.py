"""One request while something fails: the link, the far end, the device or the input. Exactly one answer each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from attrs import evolve

from engines.port import TensorAnswer
from netprobe.probe import LinkProbe
from protocol.clock import FakeClock
from protocol.errors import BadRequest, EngineError, Full, LinkClosed, LinkTimeout, MidstreamError, NotFound
from protocol.events import TransferSample
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models.arms import Work
from split_models.costs import ENVELOPE_BYTES
from split_models.decider import DOWN_S
from tests.unit.split_models.parts import HEAD, TAIL, Inline, Reaction, Scripted, floats
from tests.unit.split_models.runner_house import ANSWER, PRIVATE, SENT, House, Y, decoded

T = TypeVar("T")


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.runner.close()


FAILURES: Mapping[str, Reaction] = {
    "closed": LinkClosed("gone"),
    "timeout": LinkTimeout("late"),
    "full": Full("full", retry_after_s=2.0),
    "crashed": EngineError("broken"),
    "vanished": NotFound("no such tail"),
    "not finite": floats("y", float("nan"), 2),
    "infinite": floats("y", 1, float("inf")),
    "wrong shape": floats("y", 1, 2, 3),
    "wrong datatype": Tensor("y", "FP64", (1, 2), bytes(16)),
    "wrong name": floats("z", 1, 2),
    "nothing": (),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_a_failing_tail_is_answered_by_the_device(house: House, kind: str) -> None:
    house.policy = PRIVATE
    await house.until("cut:003:int8")
    house.remote.reactions[TAIL] = FAILURES[kind]
    before = len(house.done())
    answer = await house.ask()
    assert bytes(answer.outputs[0].data) == bytes(ANSWER.data)
    assert str(answer.arm) == "device"
    assert len(house.done()) == before + 1
    assert house.done()[-1].status == "ok"
    assert "cut:003:int8 failed" in house.done()[-1].reason
    assert decoded(house) == before + 1, "the picture was decoded twice"
    await house.ask()
    assert house.arms()[-1] == "device"
    assert house.switches()[-1].target == "device"


@pytest.mark.parametrize("kind", ["closed", "timeout", "full", "crashed", "vanished", "nothing"])
async def test_a_failing_cloud_is_answered_by_the_device(house: House, kind: str) -> None:
    await house.until("cloud")
    house.remote.reactions["m"] = FAILURES[kind]
    answer = await house.ask()
    assert (str(answer.arm), bytes(answer.outputs[0].data)) == ("device", bytes(ANSWER.data))


async def test_other_weights_are_not_mixed(house: House) -> None:
    house.policy = PRIVATE
    await house.until("cut:003:int8")
    house.remote.digest = "f" * 64
    answer = await house.ask()
    assert str(answer.arm) == "device"
    assert "weights ffffffff" in answer.reason
    assert house.stale, "nobody was told to fetch the bundle again"


async def test_a_peer_that_hangs_leaves_time_for_the_device() -> None:
    house = House(policy=SplitPolicy(explore_one_in=0))
    await house.until("cloud")
    house.remote.reactions["m"] = 30.0
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    answer = await house.ask(deadline_s=0.5)
    assert str(answer.arm) == "device"
    assert loop.time() - began_s < 0.5


async def test_a_bad_input_is_named_once_and_no_arm_is_blamed(house: House) -> None:
    with pytest.raises(BadRequest) as raised:
        await house.ask(b"bad")
    assert raised.value.field == "x"
    assert [event.status for event in house.done()] == ["invalid_value"]
    assert str((await house.ask()).arm) == "device"


async def test_a_bad_input_on_the_cloud_arm_is_named_by_the_device(house: House) -> None:
    await house.until("cloud")
    house.remote.reactions["m"] = BadRequest("cannot decode", field="x")
    with pytest.raises(BadRequest, match="not the word"):
        await house.ask(b"bad")
    house.remote.reactions["m"] = ANSWER
    assert str((await house.ask()).arm) == "cloud", "the link was blamed for the input"


async def test_a_bad_input_is_not_sent_to_look_at_a_link(house: House) -> None:
    house.policy = SplitPolicy(explore_one_in=1)
    with pytest.raises(BadRequest):
        await house.ask(b"bad")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not house.remote.asked
    await house.until("cloud")


async def test_a_far_end_that_refuses_a_look_closes_the_link_for_nobody(house: House) -> None:
    house.policy = SplitPolicy(explore_one_in=1)
    house.remote.reactions["m"] = BadRequest("cannot decode", field="x")
    await house.ask()
    for _ in range(3):
        await asyncio.sleep(0)
    assert house.remote.asked, "the link was not looked at"
    house.remote.reactions["m"] = ANSWER
    await house.until("cloud")
    assert not house.stale


async def test_a_head_that_fails_here_is_not_the_links_fault(house: House) -> None:
    house.policy = PRIVATE
    await house.until("cut:003:int8")
    house.local.reactions[HEAD] = Full("busy", retry_after_s=30.0)
    assert str((await house.ask()).arm) == "device"
    house.local.reactions[HEAD] = SENT
    assert str((await house.ask()).arm) == "cut:003:int8", "the link was closed for a full device"


async def test_a_far_end_that_refuses_good_input_is_left_alone(house: House) -> None:
    house.policy = PRIVATE
    await house.until("cut:003:int8")
    house.remote.reactions[TAIL] = BadRequest("shape does not fit", field="t003")
    asked = len(house.remote.asked)
    for _ in range(4):
        assert str((await house.ask()).arm) == "device"
    assert len(house.remote.asked) == asked + 1
    assert house.stale


async def test_a_full_device_spills_to_the_cloud(house: House) -> None:
    house.local.reactions["m"] = Full("busy", retry_after_s=1.0)
    answer = await house.ask()
    assert str(answer.arm) == "cloud"
    assert answer.reason == "device full"


async def test_a_full_device_does_not_spill_what_may_not_leave_any_more(house: House) -> None:
    house.local.reactions["m"] = Full("busy", retry_after_s=1.0)
    house.local.after_s = 0.05
    task = asyncio.create_task(house.ask())
    await asyncio.sleep(0.01)
    house.policy = PRIVATE
    with pytest.raises(Full):
        await task
    assert house.remote.asked == []


async def test_a_spill_that_fails_is_a_full_device_and_leaves_the_link_alone(house: House) -> None:
    house.local.reactions["m"] = Full("busy", retry_after_s=1.0)
    house.remote.reactions["m"] = LinkClosed("gone")
    for _ in range(3):
        with pytest.raises(Full, match="busy"):
            await house.ask()
    assert house.remote.asked == ["m"]
    assert "link dead: gone" in [entry.excluded for entry in (house.runner.last.ranking if house.runner.last else ())]


async def test_a_link_that_failed_is_tried_again_where_nothing_looks_at_it(house: House) -> None:
    await house.until("cloud")
    house.remote.reactions["m"] = LinkClosed("gone")
    await house.ask()
    asked = len(house.remote.asked)
    house.remote.reactions["m"] = ANSWER
    for _ in range(20):
        await house.ask()
    assert len(house.remote.asked) == asked, "a link that failed was used at once"
    house.clock.advance(DOWN_S)
    await house.until("cloud")


class Queued(Inline):
    """Pictures wait here for `held_s`, once."""

    held_s = 0.0

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        held_s, self.held_s = self.held_s, 0.0
        await asyncio.sleep(held_s)
        return fn(*args)


@pytest.mark.parametrize("held", ["picture", "head"])
async def test_time_spent_on_this_device_is_not_the_links_fault(held: str) -> None:
    queue = Queued()
    house = House(policy=PRIVATE, compute=queue)
    await house.until("cut:003:int8")
    asked = len(house.remote.asked)
    if held == "picture":
        queue.held_s = 30.0
    else:
        house.local.reactions[HEAD] = 30.0
    assert str((await house.ask(deadline_s=0.5)).arm) == "device"
    assert len(house.remote.asked) == asked, "nothing was sent"
    house.local.reactions[HEAD] = SENT
    last = await house.ask()
    assert str(last.arm) == "cut:003:int8", last.reason
    await house.runner.close()


async def test_a_client_that_allows_too_little_time_closes_the_link_for_nobody(house: House) -> None:
    house.local.compute_s = 5.0
    await house.ask()
    await house.until("cloud")
    asked = len(house.remote.asked)
    house.remote.reactions["m"] = 30.0
    await house.ask(deadline_s=0.005)
    assert len(house.remote.asked) == asked + 1
    house.remote.reactions["m"] = ANSWER
    last = await house.ask()
    assert str(last.arm) == "cloud", last.reason


class Late(Scripted):
    """Takes all the time that a head may have, and says so."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__({"m": Y, HEAD: SENT}, compute_s=0.1)
        self.clock, self.late = clock, False

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        *,
        load: bool = True,
        left: Callable[[float], None] | None = None,
    ) -> TensorAnswer:
        if self.late and model == HEAD:
            self.clock.advance(deadline_s)
            raise EngineError(f"{model} did not answer within {deadline_s:.2f} s")
        return await super().infer(model, inputs, deadline_s, load=load, left=left)


async def test_a_head_that_ran_out_of_the_links_share_is_not_set_aside() -> None:
    clock = FakeClock()
    local = Late(clock)
    house = House(policy=PRIVATE, clock=clock, local=local)
    await house.until("cut:003:int8")
    local.late = True
    assert str((await house.ask()).arm) == "device"
    assert [err for _, err in house.ran if err is not None] == []
    local.late, local.reactions[HEAD] = False, EngineError("broken")
    await house.ask()
    assert [name for name, err in house.ran if err is not None] == [HEAD]
    await house.runner.close()


async def test_a_full_device_without_a_link_says_so(house: House) -> None:
    house.views.clear()
    house.local.reactions["m"] = Full("busy", retry_after_s=1.0)
    with pytest.raises(Full):
        await house.ask()
    assert house.done()[-1].status == "over_capacity"


async def test_a_dead_link_is_found_again_without_costing_a_request(house: House) -> None:
    house.policy = evolve(house.policy, explore_one_in=4, hedge_ratio=0.0)
    await house.until("cloud")
    house.remote.reactions["m"] = LinkClosed("gone")
    await house.ask()
    dead = len(house.remote.asked)
    for _ in range(12):
        assert str((await house.ask()).arm) == "device"
        await asyncio.sleep(0)
    looks = len(house.remote.asked) - dead
    assert looks in (3, 4), "one in four looks at the link, and one was saved while it was in use"
    house.remote.reactions["m"] = ANSWER
    await house.until("cloud")
    assert all(event.status == "ok" for event in house.done())


async def test_an_engine_that_fails_here_is_reported_and_raised(house: House) -> None:
    house.local.reactions["m"] = EngineError("broken")
    with pytest.raises(MidstreamError):
        await house.ask()
    assert house.done()[-1].status == "engine_error"


PICTURE = b"good".ljust(50_000)


class Wire(Scripted):
    """A far end behind a link that takes its time on the fake clock and tells a probe. rate 0: it stalls."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__({"m": ANSWER, TAIL: Y})
        self.clock, self.probe = clock, LinkProbe(clock)
        self.rate = 1e6

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        size_bytes = ENVELOPE_BYTES + sum(tensor.size_bytes for tensor in inputs)
        needed_s = 0.02 + size_bytes / self.rate if self.rate else float("inf")
        seconds = min(needed_s, deadline_s)
        self.clock.advance(seconds)
        self.probe.add(
            TransferSample(
                at_s=self.clock(),
                link="cloud",
                direction="up",
                size_bytes=size_bytes,
                seconds=seconds,
                complete=needed_s <= deadline_s,
            )
        )
        if needed_s > deadline_s:
            self.asked.append(model)
            raise LinkTimeout("no answer in time")
        return await super().infer(model, inputs, deadline_s)


def wired(explore_one_in: int) -> House:
    clock = FakeClock(1000.0)
    wire = Wire(clock)
    return House(
        policy=SplitPolicy(explore_one_in=explore_one_in, hedge_ratio=0.0), clock=clock, remote=wire, probe=wire.probe,
        local=Scripted({"m": Y, HEAD: SENT}, compute_s=0.3),
    )  # fmt: skip


@pytest.mark.parametrize("rate", [60_000.0, 20_000.0, 4_000.0, 0.0])
async def test_a_link_that_becomes_very_slow_is_tried_once_more_at_most(rate: float) -> None:
    """Every request after the second waits for nothing, though looks go on and ten fast transfers are remembered."""
    house = wired(explore_one_in=4)
    assert isinstance(house.remote, Wire)
    for _ in range(16):
        await house.ask(PICTURE)
    assert house.arms()[-1] == "cloud"
    house.remote.rate = rate
    began = len(house.done())
    for _ in range(40):
        house.clock.advance(7.0)
        await house.ask(PICTURE)
    late = [n for n, event in enumerate(house.done()[began:]) if event.total_s > 0.5]
    assert len(late) <= 2, late
    assert all(event.status == "ok" for event in house.done())
    house.remote.rate = 1e6
    for _ in range(40):
        await house.ask(PICTURE)
    assert house.arms()[-1] == "cloud", "the link was never used again"
    await house.runner.close()


async def test_reasons_tell_a_slow_link_from_a_dead_one() -> None:
    house = wired(explore_one_in=20)
    assert isinstance(house.remote, Wire)
    for _ in range(6):
        await house.ask(PICTURE)
    house.remote.rate = 0.0
    await house.ask(PICTURE)
    await house.ask(PICTURE)
    assert house.switches()[-1].reason == "cloud: link slow: over 1.0 s for 50404 bytes"

    house = House()
    for failure, reason in (
        (LinkClosed("the connection was reset"), "link dead: the connection was reset"),
        (LinkTimeout("connecting"), "link dead: no connection within 0.0 s"),
        (Full("busy", retry_after_s=30.0), "the far end is full"),
        (EngineError("broken"), "the far end does not fit: broken"),
    ):
        house = House()
        await house.until("cloud")
        house.remote.reactions["m"] = failure
        await house.ask()
        await house.ask()
        assert house.switches()[-1].reason == f"cloud: {reason}"


async def test_an_input_that_is_not_finite_is_nobodys_fault() -> None:
    house = House(policy=PRIVATE)
    for _ in range(4):
        await house.ask_raw()
    assert house.remote.asked == [TAIL]
    nan = floats("y", float("nan"), 2)
    house.remote.reactions[TAIL] = house.local.reactions["m"] = nan
    work = Work(encoded=None, tensors=(floats("x", float("nan"), 2, 3, 4),))
    answer = await house.runner.infer(work, "nan", 10.0)
    assert bytes(answer.outputs[0].data) == bytes(nan.data)
    assert not house.stale, "the far end was blamed for the input"
    house.remote.reactions[TAIL] = Y
    last = await house.ask_raw()
    assert str(last.arm) == "cut:003:int8", last.reason
