"""One request of a cut model: plan, switch, run an arm, fall back to the device when the link fails, report.

Exactly one answer leaves. A link that failed is left at once for the device; one request in N then goes through it in
the background, while the device answers, so that a dead link costs nobody time and its recovery is noticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from attrs import evolve, frozen

from netprobe.view import UNKNOWN_LINK, LinkView
from protocol.clock import Clock
from protocol.device import Measured
from protocol.errors import BadRequest, EngineError, Full, LinkError, LinkTimeout, MidstreamError
from protocol.events import ArmSwitched, Emit, TensorDone
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.arms import ArmAnswer, Arms, FarEndError, Spent, Work
from split_models.costs import CostTable
from split_models.decider import Decider, Decision
from split_models.plan import ModelPlan
from split_models.planner import Proposal
from split_models.sanity import finite
from split_models.switch import Held

HANDS_OFF_S = 0.05
"""Taken off the time that an arm is told it has, so that the link itself ends the transfer and reports how far it came,
before the runner's own time-out cancels it."""

EXPLORE_S = 20.0
"""Longest that a background look at a link may take."""

MISFIT_S = 5.0
"""A far end whose answers do not fit is left alone this long, while the bundle is fetched again."""

_log = logging.getLogger("midstream.split")


@frozen
class RunnerPorts:
    """What a runner needs from its house. `links` names views by link, with planner.DOWN appended for the way down.

    zstd: whether the far end of a link takes compressed bodies.
    """

    policy: Callable[[], SplitPolicy]
    links: Callable[[], Mapping[str, LinkView]]
    link_names: Callable[[], Sequence[str]]
    device_wait_s: Callable[[], float]
    server_wait_s: Callable[[str], float]
    loaded: Callable[[str], bool]
    preload: Callable[[str], None]
    stale: Callable[[], None]
    emit: Emit
    clock: Clock
    zstd: Callable[[str], bool] = lambda link: False


@frozen
class Answer:
    """What leaves: the outputs, the arm that made them, the digest of its weights, and why this arm."""

    outputs: tuple[Tensor, ...]
    arm: Arm
    digest: str
    spent: Spent
    reason: str


class Runner:
    """Serves one model. For the event loop's thread."""

    def __init__(self, plan: ModelPlan, arms: Arms, ports: RunnerPorts, table: CostTable | None = None) -> None:
        self.plan = plan
        self.table = table or CostTable(plan.manifest)
        self._arms = arms
        self._ports = ports
        self._decider = Decider(ports.clock())
        self._exploring: dict[str, asyncio.Task[None]] = {}

    @property
    def held(self) -> Held:
        """What encoded requests use now."""
        return self._decider.held

    @property
    def last(self) -> Proposal | None:
        """How the last request saw the arms."""
        return self._decider.last

    def learn(self, measured: Sequence[Measured]) -> None:
        """Take the device's benchmark as priors."""
        self.table.learn(measured)

    async def infer(self, work: Work, request_id: str, deadline_s: float) -> Answer:
        """One answer within `deadline_s` seconds. Raises BadRequest for the input, else what the device arm raised."""
        began_s = self._ports.clock()
        policy = self._ports.policy()
        if policy.deadline_s is not None:
            deadline_s = min(deadline_s, policy.deadline_s)
        costs, encoded = self._costs(work), work.encoded is not None
        decision = self._decider.decide(
            costs, self._ports.links(), self._ports.device_wait_s(), policy, began_s, encoded=encoded
        )
        if decision.left is not None:
            self._announce(decision.left, decision, request_id)
        self._load_ahead(decision.proposal)
        arm = decision.arm
        self._explore(arm, costs, work, policy)
        try:
            answer, arm, reason = await self._answer(decision, work, began_s + deadline_s)
        except MidstreamError as err:
            self._done(request_id, arm, err.code, Spent(), began_s, str(err))
            raise
        finally:
            self._decider.finished(encoded=encoded)
        self._learn_from(arm, answer.spent, work)
        self._done(request_id, arm, "ok", answer.spent, began_s, reason)
        return Answer(answer.outputs, arm, answer.digest, answer.spent, reason)

    async def close(self) -> None:
        """Stop looking at links."""
        tasks = list(self._exploring.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _costs(self, work: Work) -> Sequence[ArmCost]:
        names = self._ports.link_names()
        return self.table.arms(
            len(work.encoded) if work.encoded is not None else None,
            names,
            lambda cut, codec: self._ports.loaded(self._head_name(cut, codec)),
            {name: self._ports.server_wait_s(name) for name in names},
            zstd=self._ports.zstd,
        )

    def _announce(self, before: Arm, decision: Decision, request_id: str) -> None:
        self._ports.emit(
            ArmSwitched(
                at_s=self._ports.clock(),
                model=self.plan.name,
                source=str(before),
                target=str(decision.arm),
                reason=decision.reason,
                request_id=request_id,
            )
        )

    def _load_ahead(self, proposal: Proposal) -> None:
        """Heads that are about to be used are loaded now, off the path of the request."""
        if proposal.wanted is not None and proposal.wanted.kind == "cut":
            self._ports.preload(self.plan.head(self.plan.cut(proposal.wanted)))

    # -- acting --------------------------------------------------------------------------------------------------

    async def _answer(self, decision: Decision, work: Work, ends_s: float) -> tuple[ArmAnswer, Arm, str]:
        arm, reason, proposal = decision.arm, decision.reason, decision.proposal
        if arm.link is None:
            return await self._on_device(proposal, work, ends_s, reason)
        budget_s = self._decider.patience_s(arm, proposal, ends_s - self._ports.clock())
        if budget_s <= 0:
            return await self._on_device(proposal, work, ends_s, "no time left to try the link")
        blame: MidstreamError | None = None
        failed: MidstreamError
        began_s = self._ports.clock()
        try:
            async with asyncio.timeout(budget_s):
                answer = await self._arms.run(arm, self.plan, work, budget_s - min(HANDS_OFF_S, budget_s / 10))
            self._decider.answered(arm.link)
            return answer, arm, reason
        except TimeoutError:
            blame = failed = LinkTimeout(f"{arm} gave no answer within {budget_s:.2f} s")
        except FarEndError as err:
            blame = failed = err.cause
        except BadRequest:
            raise
        except MidstreamError as err:
            failed = err
        if isinstance(blame, EngineError) and not finite(work.tensors):
            blame = None  # the input itself was not finite, so an answer that is not either is the right one
        if blame is not None and not isinstance(blame, BadRequest):
            self._failed(arm.link, blame, began_s)
        answered = await self._on_device(proposal, work, ends_s, f"{arm} failed: {failed}")
        if isinstance(blame, BadRequest):  # the input was good, so what we send does not fit what they serve
            self._failed(arm.link, EngineError(blame.message), began_s)
        return answered

    async def _on_device(
        self, proposal: Proposal, work: Work, ends_s: float, reason: str
    ) -> tuple[ArmAnswer, Arm, str]:
        """The device arm; when it is full, the best arm that needs no model here."""
        try:
            left_s = max(0.001, ends_s - self._ports.clock())
            return await self._arms.run(DEVICE_ARM, self.plan, work, left_s), DEVICE_ARM, reason
        except Full:
            spill = next((e.arm for e in proposal.ranking if e.arm.kind == "cloud" and not e.excluded), None)
            if spill is None or not self._decider.open(spill.link or "", self._ports.clock()):
                raise
            left_s = max(0.001, ends_s - self._ports.clock())
            return await self._arms.run(spill, self.plan, work, left_s), spill, "device full"

    def _failed(self, link: str, err: MidstreamError, began_s: float) -> None:
        """Leave `link` alone after an attempt that began at `began_s`."""
        now_s = self._ports.clock()
        if isinstance(err, Full):
            trouble = "the far end is full"
            self._decider.close(link, now_s + min(60.0, err.retry_after_s), trouble)
        elif isinstance(err, LinkError):
            trouble = self._what_failed(link, err, began_s)
            self._decider.failed(link, trouble)
        else:
            trouble = f"the far end does not fit: {err.message[:100]}"
            self._decider.close(link, now_s + MISFIT_S, trouble)
            self._ports.stale()
        _log.info("%s: %s: %s: %s", self.plan.name, link, trouble, err)

    def _what_failed(self, link: str, err: LinkError, began_s: float) -> str:
        """Slow and dead are told apart by whether anything was on its way."""
        if not isinstance(err, LinkTimeout):
            return f"link dead: {err.message[:200]}"
        sent = self._ports.links().get(link, UNKNOWN_LINK).under_way
        if sent is not None and sent.at_s >= began_s:
            return f"link slow: over {sent.seconds:.1f} s for {sent.size_bytes} bytes"
        return f"link dead: no connection within {self._ports.clock() - began_s:.1f} s"

    # -- looking at silent links ---------------------------------------------------------------------------------

    def _explore(self, arm: Arm, costs: Sequence[ArmCost], work: Work, policy: SplitPolicy) -> None:
        names, now_s = self._ports.link_names(), self._ports.clock()
        for target in self._decider.looks(arm, names, self._exploring, costs, self._ports.links(), policy, now_s):
            link = target.arm.link
            if not target.loaded:
                self._ports.preload(self.plan.head(self.plan.cut(target.arm)))
            elif link is not None:
                task = asyncio.create_task(self._look(target.arm, link, work), name=f"explore {link}")
                self._exploring[link] = task
                task.add_done_callback(partial(self._looked, link))

    def _looked(self, link: str, task: asyncio.Task[None]) -> None:
        self._exploring.pop(link, None)

    async def _look(self, arm: Arm, link: str, work: Work) -> None:
        """Send the request through the link as well; its answer is dropped, its transfer is what we want."""
        own, began_s = Work(encoded=work.encoded, tensors=work.tensors), self._ports.clock()
        try:
            async with asyncio.timeout(EXPLORE_S):
                answer = await self._arms.run(arm, self.plan, own, EXPLORE_S - HANDS_OFF_S)
        except TimeoutError:
            self._failed(link, LinkTimeout(f"no answer within {EXPLORE_S:.0f} s"), began_s)
        except FarEndError as err:
            # Whether the input was good is not known here: one client's bad picture closes the arm for nobody else.
            if not isinstance(err.cause, BadRequest):
                self._failed(link, err.cause, began_s)
        except MidstreamError as err:  # this device was full or could not read the input: nothing is learnt
            _log.debug("%s: %s was not looked at: %s", self.plan.name, link, err)
        else:
            self._decider.answered(link)
            self._learn_from(arm, evolve(answer.spent, before_s=0.0, after_s=0.0), own)

    # -- reporting -----------------------------------------------------------------------------------------------

    def _learn_from(self, arm: Arm, spent: Spent, work: Work) -> None:
        table = self.table
        if work.encoded is not None and arm.kind != "cloud":
            for part, seconds in (("before", spent.before_s), ("after", spent.after_s)):
                if seconds > 0:
                    table.observe("device", part, seconds)
        if arm.kind == "device":
            table.observe("device", "whole", spent.compute_s)
        elif arm.kind == "cut":
            table.observe("device", f"head:{arm.cut}:{arm.form}", spent.compute_s)
            table.observe("server", f"tail:{arm.cut}:{arm.form}", spent.server_s)
            if arm.compressed:
                table.observe_packed(arm, spent.up_bytes, spent.down_bytes)
        else:
            table.observe("server", "cloud", spent.server_s)

    def _done(self, request_id: str, arm: Arm, status: str, spent: Spent, began_s: float, reason: str) -> None:
        now_s = self._ports.clock()
        self._ports.emit(
            TensorDone(
                at_s=now_s,
                request_id=request_id,
                model=self.plan.name,
                arm=str(arm),
                status=status,
                total_s=now_s - began_s,
                queue_s=spent.queue_s,
                pre_s=spent.before_s,
                head_s=spent.compute_s,
                wire_s=spent.wire_s,
                server_s=spent.server_s,
                post_s=spent.after_s,
                up_bytes=spent.up_bytes,
                down_bytes=spent.down_bytes,
                reason=reason,
            )
        )

    def _head_name(self, cut: str, codec: str) -> str:
        return self.plan.head(self.plan.cut(Arm("cut", cut, codec)))
