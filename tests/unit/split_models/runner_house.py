"""A runner with scripted ends, for tests of single requests."""

from __future__ import annotations

import asyncio

from attrs import define, field

from netprobe.probe import LinkProbe
from netprobe.view import LinkView
from protocol.clock import FakeClock
from protocol.errors import MidstreamError
from protocol.events import ArmSwitched, RecordingEmit, TensorDone
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models.arm_cost import Arm
from split_models.arms import Arms, Work
from split_models.plan import ModelPlan
from split_models.runner import Runner
from split_models.runner_ports import Answer, RunnerPorts
from split_models.settings import views_of
from tests.unit.split_models.parts import HEAD, TAIL, Inline, Scripted, WordRecipe, cut, floats, manifest

Y = floats("y", 1, 2)
ANSWER = floats("answer", 1, 2)
SENT = Tensor("t003", "UINT8", (1, 8), bytes(8))
FAST = LinkView(floor_s=0.001, bytes_per_s=1e9, rtt_s=None, samples=10, age_s=0.1)
PRIVATE = SplitPolicy(raw_input_leaves=False, explore_one_in=0)


@define(eq=False)
class House:
    """A runner with scripted ends and a clock of its own."""

    policy: SplitPolicy = field(factory=lambda: SplitPolicy(explore_one_in=0))
    clock: FakeClock = field(factory=FakeClock)
    emit: RecordingEmit = field(factory=RecordingEmit)
    views: dict[str, LinkView] = field(factory=lambda: {"cloud": FAST})
    local: Scripted = field(factory=lambda: Scripted({"m": Y, HEAD: SENT}, compute_s=0.1))
    remote: Scripted = field(factory=lambda: Scripted({"m": ANSWER, TAIL: Y}))
    recipe: WordRecipe | None = field(factory=WordRecipe)
    compute: Inline = field(factory=Inline)
    ran: list[tuple[str, MidstreamError | None]] = field(factory=list)
    stale: list[str] = field(factory=list)
    rests: list[Arm] = field(factory=list)
    probe: LinkProbe | None = None
    runner: Runner = field(init=False)

    def __attrs_post_init__(self) -> None:
        plan = ModelPlan(manifest(cut(tail_s=0.05), cloud_s=0.03), self.recipe)
        arms = Arms(self.local, lambda name: self.remote if name == "cloud" else None, self.compute, self.clock)
        ports = RunnerPorts(
            policy=lambda: self.policy,
            links=lambda: self.views if self.probe is None else views_of(self.probe),
            link_names=lambda: ("cloud",),
            device_wait_s=self.local.wait_s,
            server_wait_s=lambda _: self.remote.wait_s(),
            loaded=self.local.loaded,
            preload=lambda arm: self.local.preloaded.append(plan.head(plan.cut(arm))),
            stale=lambda: self.stale.append("stale"),
            emit=self.emit,
            clock=self.clock,
            ran=lambda name, err: self.ran.append((name, err)),
            rest=self.rests.append,
        )
        self.runner = Runner(plan, arms, ports)

    async def ask(self, word: bytes = b"good", deadline_s: float = 10.0) -> Answer:
        """One encoded request; a sampling period passes after it, and background work gets its turn."""
        count = len(self.done())
        answer = await self.runner.infer(Work(encoded=word, tensors=()), f"r{count}", deadline_s)
        self.clock.advance(self.policy.period_s)
        for _ in range(3):
            await asyncio.sleep(0)
        return answer

    async def ask_raw(self) -> Answer:
        answer = await self.runner.infer(Work(encoded=None, tensors=(floats("x", 1, 2, 3, 4),)), "raw", 10.0)
        self.clock.advance(self.policy.period_s)
        return answer

    async def until(self, arm: str) -> None:
        """Ask until requests use `arm`."""
        for _ in range(12):
            if str((await self.ask()).arm) == arm:
                return
        raise AssertionError(f"{arm} was never used, but {self.arms()}")

    def done(self) -> list[TensorDone]:
        return [event for event in self.emit.events if isinstance(event, TensorDone)]

    def switches(self) -> list[ArmSwitched]:
        return [event for event in self.emit.events if isinstance(event, ArmSwitched)]

    def arms(self) -> list[str]:
        return [event.arm for event in self.done()]


def decoded(house: House) -> int:
    """Pictures that were read so far."""
    return house.recipe.decoded if house.recipe is not None else 0
