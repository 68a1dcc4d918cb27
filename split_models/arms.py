"""Executes one arm for one request; each arm is one coroutine. Decides nothing.

device: before -> whole model here -> after
cut:    before -> head here -> tensor over the link -> tail there -> after; without a link the tail runs here too
cloud:  encoded input over the link -> whole recipe there; raw tensors -> whole model there
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from attrs import define, evolve, field, frozen

from engines.give_way import given_way_s
from engines.port import BurstEndpoint, CompressingEndpoint, TensorAnswer, TensorEndpoint, WorkingEndpoint
from protocol.clock import Clock
from protocol.errors import EngineError, LinkError, MidstreamError
from protocol.models import CutEntry
from protocol.oip import bytes_tensor
from protocol.tensors import Tensor, TensorSpec
from split_models.arm_cost import Arm
from split_models.plan import ModelPlan
from split_models.recipes import Made
from split_models.sanity import check_outputs

T = TypeVar("T")

_Finished = tuple[tuple[Tensor, ...], float, float]
"""What the recipe made of the outputs, and the seconds that it waited and ran."""

IMAGE = "image"
"""Input name under which any recipe takes an encoded picture."""


class FarEndError(LinkError):
    """The far end did not give a usable answer; `cause` says why. Errors of this device are raised as they are."""

    def __init__(self, cause: MidstreamError) -> None:
        super().__init__(cause.message, next_step=cause.next_step, field=cause.field)
        self.cause = cause


class LocalModels(Protocol):
    """Models of this device by name; engines.local.LocalEndpoint is one."""

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        *,
        load: bool = True,
        left: Callable[[float], None] | None = None,
    ) -> TensorAnswer: ...

    def stops(self, name: str) -> bool: ...


class Compute(Protocol):
    """Where pre- and post-processing run; engines.executor.BoundedExecutor is one."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T: ...


@frozen
class Spent:
    """Where one request's time and bytes went; protocol.events.TensorDone says what each is."""

    queue_s: float = 0.0
    before_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    connect_s: float = 0.0
    send_s: float = 0.0
    server_queue_s: float = 0.0
    server_s: float = 0.0
    receive_s: float = 0.0
    after_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0

    @property
    def work_s(self) -> float:
        """All work on the answer, here and there."""
        return self.before_s + self.compute_s + self.server_s + self.after_s

    @property
    def total_s(self) -> float:
        here_s = self.queue_s + self.before_s + self.compute_s + self.after_s
        there_s = self.server_queue_s + self.server_s
        return here_s + self.encode_s + self.connect_s + self.send_s + there_s + self.receive_s


@frozen
class ArmAnswer:
    """Outputs of one arm. `digest` names the weights that answered."""

    outputs: tuple[Tensor, ...]
    digest: str
    spent: Spent


@frozen
class Crossing:
    """What a head has computed, as it was to cross, and the seconds of its wait and run."""

    arm: Arm
    tensors: tuple[Tensor, ...]
    queue_s: float
    head_s: float


@define(eq=False)
class Work:
    """One request's input. `made` is filled by the first arm that needs it: a second one need not decode again.

    before_s, before_queue_s: what making it took, and the wait for that. making: one arm at a time makes it. can_wait:
    it may stand behind others, so that a burst of such requests costs nobody else anything. asked_s: when a far end was
    asked last; before that no time was spent on a link. left: told the device seconds of a device arm that was
    cancelled in its run, once that run is over. crossing: of the head that ran for this request; crossed is set then.
    """

    encoded: bytes | memoryview | None
    tensors: tuple[Tensor, ...]
    made: Made | None = field(default=None)
    before_s: float = 0.0
    before_queue_s: float = 0.0
    making: asyncio.Lock = field(factory=asyncio.Lock)
    can_wait: bool = False
    asked_s: float | None = None
    left: Callable[[float], None] | None = None
    crossing: Crossing | None = None
    crossed: asyncio.Event = field(factory=asyncio.Event)


class Arms:
    """Local models by name, the far ends by link name, and an executor for pre- and post-processing.

    later: the executor for the same work of requests that can wait, so that they are in nobody's way.
    """

    def __init__(
        self,
        local: LocalModels,
        remotes: Callable[[str], TensorEndpoint | None],
        compute: Compute,
        clock: Clock,
        later: Compute | None = None,
    ) -> None:
        self._local = local
        self._remotes = remotes
        self._compute = compute
        self._later = later or compute
        self._clock = clock

    async def run(self, arm: Arm, plan: ModelPlan, work: Work, deadline_s: float) -> ArmAnswer:
        """Answer on `arm` within `deadline_s` seconds from now. Raises MidstreamErrors only."""
        try:
            if arm.kind == "device":
                return await self._device(plan, work, deadline_s)
            if arm.kind == "cut":
                run = self._rest if arm.link is None else self._cut
                return await run(arm, plan, work, deadline_s)
            return await self._cloud(arm, plan, work, deadline_s)
        except MemoryError as err:
            raise EngineError(f"no memory left for {arm}", next_step="use another arm, or free memory") from err

    async def _device(self, plan: ModelPlan, work: Work, deadline_s: float) -> ArmAnswer:
        ends_s = self._clock() + deadline_s
        made = await self._before(plan, work)
        left = work.left

        def run_over(ran_s: float) -> None:
            if left is not None:
                left(work.before_s + ran_s)

        answer, queue_s = await self._here(plan.whole, made.inputs, ends_s, load=True, left=run_over)
        after, after_queue_s, after_s = await self._after(plan, work, made, answer.outputs)
        spent = Spent(
            queue_s=work.before_queue_s + queue_s + after_queue_s,
            before_s=work.before_s,
            compute_s=answer.compute_s,
            after_s=after_s,
        )
        return ArmAnswer(after, answer.digest, spent)

    async def _cut(self, arm: Arm, plan: ModelPlan, work: Work, deadline_s: float) -> ArmAnswer:
        ends_s = self._clock() + deadline_s
        cut = plan.cut(arm)
        made = await self._before(plan, work)
        head, queue_s = await self._here(plan.head(cut), made.inputs, ends_s, load=False)
        work.crossing = Crossing(arm, tuple(head.outputs), queue_s, head.compute_s)
        work.crossed.set()
        tail, there, finished = await self._ended(arm, plan, cut, work, made, head.outputs, self._left(ends_s))
        after, after_queue_s, after_s = finished
        spent = evolve(
            there,
            queue_s=work.before_queue_s + queue_s + after_queue_s,
            before_s=work.before_s,
            compute_s=head.compute_s,
            after_s=after_s,
            up_bytes=tail.up_bytes or sum(tensor.size_bytes for tensor in head.outputs),
            down_bytes=tail.down_bytes or sum(tensor.size_bytes for tensor in tail.outputs),
        )
        return ArmAnswer(after, tail.digest or plan.manifest.digest, spent)

    async def _rest(self, arm: Arm, plan: ModelPlan, work: Work, deadline_s: float) -> ArmAnswer:
        """The tail here, from what the head has computed. Raises EngineError when that was another cut's head."""
        ends_s = self._clock() + deadline_s
        cut, crossing, made = plan.cut(arm), work.crossing, work.made
        if crossing is None or made is None or plan.cut(crossing.arm) != cut:
            raise EngineError(f"the head of {arm} has not run for this request", next_step="run the whole model")
        tail, queue_s = await self._here(plan.tail(cut), crossing.tensors, ends_s, load=False, left=work.left)
        answers = check_outputs(tail.outputs, plan.answers(cut))
        after, after_queue_s, after_s = await self._after(plan, work, made, plan.plain(cut, tuple(answers)))
        spent = Spent(
            queue_s=work.before_queue_s + crossing.queue_s + queue_s + after_queue_s,
            before_s=work.before_s,
            compute_s=crossing.head_s + tail.compute_s,
            after_s=after_s,
        )
        return ArmAnswer(after, tail.digest, spent)

    async def _cloud(self, arm: Arm, plan: ModelPlan, work: Work, deadline_s: float) -> ArmAnswer:
        if work.encoded is not None and plan.recipe is not None:
            inputs: Sequence[Tensor] = [bytes_tensor(plan.input_name, [bytes(work.encoded)])]
            model, answers, up_bytes = plan.name, plan.recipe.answers, len(work.encoded)
        else:
            inputs, model, answers = work.tensors, plan.whole, plan.outputs
            up_bytes = sum(tensor.size_bytes for tensor in inputs)
        answer, there = await self._ask(arm, plan, work, model, inputs, answers, deadline_s)
        down_bytes = sum(tensor.size_bytes for tensor in answer.outputs)
        spent = evolve(there, up_bytes=up_bytes, down_bytes=down_bytes)
        return ArmAnswer(tuple(answer.outputs), answer.digest or plan.manifest.digest, spent)

    async def _ended(
        self,
        arm: Arm,
        plan: ModelPlan,
        cut: CutEntry,
        work: Work,
        made: Made,
        crossing: Sequence[Tensor],
        deadline_s: float,
    ) -> tuple[TensorAnswer, Spent, _Finished]:
        """The tail's answer and what the recipe makes of it: in the link's own lane for requests that can wait."""
        lane = working(self._plain_remote(arm)) if work.can_wait and work.encoded is not None else None
        if lane is None or plan.recipe is None:
            tail, there = await self._ask(arm, plan, work, plan.tail(cut), crossing, plan.answers(cut), deadline_s)
            return tail, there, await self._after(plan, work, made, plan.plain(cut, tuple(tail.outputs)))
        recipe = plan.recipe

        def finish(answer: TensorAnswer) -> tuple[Tensor, ...] | MidstreamError:
            _check_digest(answer, plan)
            outputs = check_outputs(answer.outputs, plan.answers(cut))
            try:
                return recipe.after(plan.plain(cut, tuple(outputs)), made.context)
            except MidstreamError as err:
                return err  # this device's own, not the far end's

        sent_s = work.asked_s = self._clock()
        try:
            done = await lane.infer_then(plan.tail(cut), crossing, deadline_s, finish, packed=arm.compressed)
        except MidstreamError as err:
            raise FarEndError(err) from err
        if isinstance(done.result, MidstreamError):
            raise done.result
        there_s = self._clock() - sent_s - done.wait_s - done.run_s
        return done.answer, _there(done.answer, max(0.0, there_s)), (done.result, done.wait_s, done.run_s)

    def stops(self, plan: ModelPlan) -> bool:
        """Whether a device arm that is cancelled leaves the device soon."""
        return self._local.stops(plan.whole)

    async def _here(
        self,
        model: str,
        inputs: Sequence[Tensor],
        ends_s: float,
        *,
        load: bool,
        left: Callable[[float], None] | None = None,
    ) -> tuple[TensorAnswer, float]:
        """A model of this device, and the seconds that were not its run: waiting, and coming back."""
        asked_s = self._clock()
        answer = await self._local.infer(model, inputs, self._left(ends_s), load=load, left=left)
        return answer, max(answer.wait_s, self._clock() - asked_s - answer.compute_s)

    async def _ask(
        self,
        arm: Arm,
        plan: ModelPlan,
        work: Work,
        model: str,
        inputs: Sequence[Tensor],
        answers: Sequence[TensorSpec],
        deadline_s: float,
    ) -> tuple[TensorAnswer, Spent]:
        """A checked answer of the far end, and the stages until it was here. Raises FarEndError only."""
        sent_s = work.asked_s = self._clock()
        try:
            answer = await self._remote(arm).infer(model, inputs, deadline_s)
            elapsed_s = self._clock() - sent_s
            _check_digest(answer, plan)
            return evolve(answer, outputs=check_outputs(answer.outputs, answers)), _there(answer, elapsed_s)
        except MidstreamError as err:
            raise FarEndError(err) from err

    async def _before(self, plan: ModelPlan, work: Work) -> Made:
        async with work.making:
            if work.made is not None:
                return work.made
            if work.encoded is None or plan.recipe is None:
                made = Made(work.tensors)
            else:
                before = (plan.recipe.before, work.encoded, plan.input_name, plan.input_shape)
                made, work.before_queue_s, work.before_s = await timed(self._executor(work), self._clock, *before)
            work.made = made
            return made

    async def _after(
        self, plan: ModelPlan, work: Work, made: Made, outputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], float, float]:
        if work.encoded is None or plan.recipe is None:
            return tuple(outputs), 0.0, 0.0
        return await timed(self._executor(work), self._clock, plan.recipe.after, outputs, made.context)

    def _executor(self, work: Work) -> Compute:
        return self._later if work.can_wait else self._compute

    def _remote(self, arm: Arm) -> TensorEndpoint:
        remote = self._plain_remote(arm)
        return compressing(remote) or remote if arm.compressed else remote

    def _plain_remote(self, arm: Arm) -> TensorEndpoint:
        remote = self._remotes(arm.link) if arm.link else None
        if remote is None:
            raise EngineError(f"nobody answers at the far end of {arm.link}", next_step="the device answers meanwhile")
        return remote

    def _left(self, ends_s: float) -> float:
        left_s = ends_s - self._clock()
        if left_s <= 0:
            raise EngineError("the deadline passed before the model ran", next_step="allow more time")
        return left_s


def compressing(endpoint: TensorEndpoint) -> TensorEndpoint | None:
    """The same far end with compressed bodies; None where it does not take them."""
    return endpoint.compressing() if isinstance(endpoint, CompressingEndpoint) else None


def working(endpoint: TensorEndpoint) -> WorkingEndpoint | None:
    """The same far end by a stream for requests that can wait; None where there is none."""
    return endpoint.working() if isinstance(endpoint, BurstEndpoint) else None


async def timed(compute: Compute, clock: Clock, fn: Callable[..., T], *args: Any) -> tuple[T, float, float]:
    """Run on the executor: the result, the seconds around the run, and the run's own; what it stood back for
    others belongs to the former.
    """

    def call() -> tuple[T, float]:
        began_s, before_s = clock(), given_way_s()
        result = fn(*args)
        return result, clock() - began_s - (given_way_s() - before_s)

    asked_s = clock()
    result, run_s = await compute.run(call)
    return result, max(0.0, clock() - asked_s - run_s), run_s


def _check_digest(answer: TensorAnswer, plan: ModelPlan) -> None:
    """A foreign server gives no digest: there the tail's name carries it."""
    if answer.digest and answer.digest != plan.manifest.digest:
        raise EngineError(
            f"the server answered with weights {answer.digest[:8]}, here are {plan.manifest.digest[:8]}",
            next_step="the bundle is fetched again",
            field="digest",
        )


def _there(answer: TensorAnswer, elapsed_s: float) -> Spent:
    """`elapsed_s` split into stages. What the link did not measure counts as the way up."""
    wire = answer.wire
    server_s = wire.server_s or answer.wait_s + answer.compute_s
    queue_s = min(answer.wait_s, server_s)
    known_s = answer.encode_s + wire.connect_s + wire.send_s + server_s + wire.receive_s
    rest_s = max(0.0, elapsed_s - known_s)
    return Spent(
        encode_s=answer.encode_s,
        connect_s=wire.connect_s,
        send_s=wire.send_s if wire.total_s else rest_s,
        server_queue_s=queue_s,
        server_s=server_s - queue_s,
        # Taking the answer's tensors out of its body ends the way down.
        receive_s=wire.receive_s + rest_s if wire.total_s else 0.0,
    )
