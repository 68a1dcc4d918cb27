"""One request of a cut model: plan, switch, run its arms, report.

A link that failed is left at once for the device; one request in N then goes through it in the background, while the
device answers, so that a dead link costs nobody time and its recovery is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from attrs import evolve

from netprobe.view import UNKNOWN_LINK
from protocol.device import Measured
from protocol.errors import BadRequest, Full, MidstreamError
from protocol.events import ArmSwitched, TensorDone
from protocol.policy import SplitPolicy
from protocol.trace import present
from split_models.arm_cost import Arm, ArmCost
from split_models.arms import Arms, Spent, Work
from split_models.costs import CostTable
from split_models.decider import Decider, Decision
from split_models.explain import REPORT_SCHEMA, SplitReport, shown
from split_models.hedge import HedgeBudget
from split_models.link_states import LinkStates
from split_models.looks import Looks
from split_models.plan import ModelPlan
from split_models.planner import Proposal
from split_models.race import Entry, Outcome, Race
from split_models.runner_ports import Answer, RunnerPorts
from split_models.switch import Held


class Runner:
    """Serves one model. For the event loop's thread."""

    def __init__(self, plan: ModelPlan, arms: Arms, ports: RunnerPorts, table: CostTable | None = None) -> None:
        self.plan = plan
        self.table = table or CostTable(plan.manifest)
        self._ports = ports
        self.running = 0
        """Requests under way."""
        self._decider = Decider(ports.clock(), lambda: ports.strategy().start)
        states = LinkStates(plan.name, self._decider, ports)
        self._looks = Looks(plan, arms, ports, self._decider, states, self._looked)
        self._race = Race(plan, arms, ports, self._decider, states)

    @property
    def arms(self) -> Arms:
        """What runs one arm, whatever is held: for measurements."""
        return self._race.arms

    @property
    def held(self) -> Held:
        """What requests use now: encoded ones where the model has a recipe, else raw ones."""
        return self._decider.held(encoded=self.plan.recipe is not None)

    @property
    def last(self) -> Proposal | None:
        """How the last request saw the arms."""
        return self._decider.last

    @property
    def hedges(self) -> HedgeBudget:
        """Device seconds of hedges so far, and of a device-only run."""
        return self._decider.budget

    def learn(self, measured: Sequence[Measured]) -> None:
        """Take the device's benchmark as priors."""
        self.table.learn(measured)

    def warmed(self, name: str, seconds: float) -> None:
        """A head, or a tail for late links, was loaded, and its warm run took so long: what it costs is known before
        its first request.
        """
        for cut in self.plan.manifest.cuts:
            for part, found in (("head", self.plan.head(cut)), ("tail", self.plan.tail(cut))):
                if found == name:
                    self.table.observe("device", f"{part}:{cut.id}:{cut.codec}", seconds)

    async def infer(self, work: Work, request_id: str, deadline_s: float) -> Answer:
        """One answer within `deadline_s` seconds. Raises BadRequest for the input, else what the device arm raised."""
        began_s = self._ports.clock()
        policy = self._ports.policy()
        if policy.deadline_s is not None:
            deadline_s = min(deadline_s, policy.deadline_s)
        encoded = work.encoded is not None
        costs = self._costs(work)
        decision = self._decider.decide(
            costs,
            self._ports.links(),
            self._ports.device_wait_s(),
            policy,
            began_s,
            encoded=encoded,
            looking=self._looks.links,
        )
        if decision.left is not None:
            self._announce(decision.left, decision, request_id)
        self._load_ahead(decision, policy)
        looks = () if decision.waits else self._looks.due(decision.arm, costs, policy)
        self.running += 1
        try:
            outcome = await self._race.run(Entry(decision, work, policy, costs, began_s, began_s + deadline_s))
        except MidstreamError as err:
            self._done(request_id, decision.arm, err.code, began_s, str(err))
            if not isinstance(err, BadRequest):  # a bad input says nothing of a link
                if not isinstance(err, Full):  # refused at once: nobody's answer came late, and none came in time
                    self._decider.took(decision, self._ports.clock())
                self._looks.begin(looks, work)
            raise
        except asyncio.CancelledError:
            self._done(request_id, decision.arm, "cancelled", began_s, "the client left")
            raise
        finally:
            self.running -= 1
            self._decider.finished(encoded=encoded)
        self._decider.took(decision, self._ports.clock())
        self._looks.begin(looks, work)
        answer = outcome.answer
        self._learn_from(outcome.arm, answer.spent, work)
        self._done(request_id, outcome.arm, "ok", began_s, outcome.reason, outcome)
        return Answer(answer.outputs, outcome.arm, answer.digest, answer.spent, outcome.reason)

    def report(self) -> SplitReport:
        """How the arms stand now, for a request with an encoded input of typical size where the model takes one."""
        manifest, decider = self.plan.manifest, self._decider
        links = self._ports.links()
        names = self._ports.link_names()
        return SplitReport(
            schema=REPORT_SCHEMA,
            model=self.plan.name,
            digest=manifest.digest,
            held=str(self.held.arm),
            reason=self.held.reason,
            device_wait_s=self._ports.device_wait_s(),
            links=tuple(shown(name, links.get(name, UNKNOWN_LINK)) for name in names),
            costs=tuple(self._typical_costs()),
            policy=self._ports.policy(),
            hedged_s=decider.budget.hedged_s,
            requested_s=decider.budget.device_only_s,
            single_cuts=manifest.single_cuts,
        )

    async def close(self) -> None:
        """Stop looking at links."""
        await self._looks.close()
        await self._race.close()

    # -- deciding ------------------------------------------------------------------------------------------------

    def _costs(self, work: Work) -> Sequence[ArmCost]:
        if work.encoded is not None:
            return self._arm_costs(len(work.encoded), None)
        return self._arm_costs(None, sum(tensor.size_bytes for tensor in work.tensors))

    def _typical_costs(self) -> Sequence[ArmCost]:
        size_bytes = self.plan.manifest.encoded_bytes or None
        return self._arm_costs(size_bytes, None) if self.plan.recipe is not None else self._arm_costs(None, size_bytes)

    def _arm_costs(self, encoded_bytes: int | None, raw_bytes: int | None) -> Sequence[ArmCost]:
        names = self._ports.link_names()
        allowed = self._ports.strategy().arms
        found = self.table.arms(
            encoded_bytes,
            names,
            lambda cut, codec: self._ports.loaded(self._head_name(cut, codec)),
            {name: self._ports.server_wait_s(name) for name in names},
            zstd=self._ports.zstd,
            raw_bytes=raw_bytes,
            ends_here=lambda cut, codec: self._ports.loaded(self._tail_name(cut, codec)),
        )
        return [cost for cost in found if cost.arm.kind in allowed]

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

    def _load_ahead(self, decision: Decision, policy: SplitPolicy) -> None:
        """What is about to be used is loaded now, off the path of the request: heads, and the held cut's tail, so that
        the device can end a request whose link is late.
        """
        wanted, cost = decision.proposal.wanted, decision.cost
        if wanted is not None and wanted.kind == "cut":
            self._ports.preload(wanted)
        hedges = min(policy.hedge_ratio, self._ports.strategy().hedge_ratio) > 0
        if hedges and decision.arm.kind == "cut" and cost is not None and cost.rest_s is None:
            self._ports.rest(decision.arm)

    # -- reporting -----------------------------------------------------------------------------------------------

    def _learn_from(self, arm: Arm, spent: Spent, work: Work) -> None:
        table = self.table
        if work.encoded is not None and arm.kind != "cloud":
            for part, seconds in (("before", spent.before_s), ("after", spent.after_s)):
                if seconds > 0:
                    table.observe("device", part, seconds)
        if arm.kind == "device":
            table.observe("device", "whole", spent.compute_s)
        elif arm.kind == "cut" and arm.link is None:
            head_s = work.crossing.head_s if work.crossing is not None else 0.0
            table.observe("device", f"head:{arm.cut}:{arm.form}", head_s)
            table.observe("device", f"tail:{arm.cut}:{arm.form}", max(0.0, spent.compute_s - head_s))
        elif arm.kind == "cut":
            table.observe("device", f"head:{arm.cut}:{arm.form}", spent.compute_s)
            table.observe("server", f"tail:{arm.cut}:{arm.form}", spent.server_s)
            if arm.compressed:
                table.observe_packed(arm, spent.up_bytes, spent.down_bytes)
        else:
            table.observe("server", "cloud" if work.encoded is not None else "input", spent.server_s)

    def _looked(self, arm: Arm, spent: Spent, work: Work) -> None:
        self._learn_from(arm, evolve(spent, before_s=0.0, after_s=0.0), work)

    def _done(
        self, request_id: str, arm: Arm, status: str, began_s: float, reason: str, outcome: Outcome | None = None
    ) -> None:
        now_s = self._ports.clock()
        spent = outcome.answer.spent if outcome else Spent()
        hedged = outcome is not None and outcome.hedged
        self._ports.emit(
            TensorDone(
                at_s=now_s,
                request_id=request_id,
                model=self.plan.name,
                arm=str(arm),
                status=status,
                total_s=now_s - began_s,
                lost_s=outcome.lost_s if outcome else 0.0,
                queue_s=spent.queue_s,
                pre_s=spent.before_s,
                head_s=spent.compute_s,
                encode_s=spent.encode_s,
                connect_s=spent.connect_s,
                send_s=spent.send_s,
                server_queue_s=spent.server_queue_s,
                server_s=spent.server_s,
                receive_s=spent.receive_s,
                post_s=spent.after_s,
                up_bytes=spent.up_bytes,
                down_bytes=spent.down_bytes,
                reason=reason,
                hedged=hedged,
                winner=("link" if arm.link else "device") if hedged else "",
                trace=present(),
            )
        )

    def _head_name(self, cut: str, codec: str) -> str:
        return self.plan.head(self.plan.cut(Arm("cut", cut, codec)))

    def _tail_name(self, cut: str, codec: str) -> str:
        return self.plan.tail(self.plan.cut(Arm("cut", cut, codec)))
