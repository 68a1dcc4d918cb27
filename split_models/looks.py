"""Looking at silent links: one request in N also goes through one, in the background, and its answer is dropped.

A look begins when the request that pays for it has been answered, and takes its decoded input along: before that, both
would stand in line for the same core.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from protocol.errors import BadRequest, LinkTimeout, MidstreamError
from protocol.policy import SplitPolicy
from split_models.arm_cost import Arm, ArmCost
from split_models.arms import Arms, FarEndError, Spent, Work
from split_models.decider import Decider
from split_models.link_states import LinkStates
from split_models.plan import ModelPlan
from split_models.planner import forbidden
from split_models.runner_ports import RunnerPorts

LOOK_S = 20.0
"""Longest that a look may take."""

HANDS_OFF_S = 0.05
"""Taken off the time that an arm is told it has, so that the link itself ends the transfer and reports how far it came,
before our own time-out cancels it."""

_log = logging.getLogger("midstream.split")


class Looks:
    """Of one model. `learn` is told what a look took."""

    def __init__(
        self,
        plan: ModelPlan,
        arms: Arms,
        ports: RunnerPorts,
        decider: Decider,
        states: LinkStates,
        learn: Callable[[Arm, Spent, Work], None],
    ) -> None:
        self._plan = plan
        self._arms = arms
        self._ports = ports
        self._decider = decider
        self._states = states
        self._learn = learn
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def links(self) -> Collection[str]:
        """Those that are being looked at now."""
        return self._running.keys()

    def due(self, arm: Arm, costs: Sequence[ArmCost], policy: SplitPolicy) -> Sequence[ArmCost]:
        """At the start of a request that takes `arm`: arms to look at the other links by, when it was answered."""
        names, views, now_s = self._ports.link_names(), self._ports.links(), self._ports.clock()
        found: list[ArmCost] = []
        for target in self._decider.looks(arm, names, self._running, costs, views, policy, now_s):
            if target.loaded:
                found.append(target)
            else:
                self._ports.preload(target.arm)
        return found

    def begin(self, costs: Sequence[ArmCost], work: Work) -> None:
        """Send the input of a request that was answered through these arms as well, if the policy of now allows it."""
        policy = self._ports.policy()
        for cost in costs:
            arm, link = cost.arm, cost.arm.link or ""
            if link not in self._running and not forbidden(cost, policy):
                task = asyncio.create_task(self._look(arm, link, work), name=f"explore {link}")
                self._running[link] = task
                task.add_done_callback(partial(self._ended, link))

    async def close(self) -> None:
        """Stop looking."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, link: str, task: asyncio.Task[None]) -> None:
        self._running.pop(link, None)

    async def _look(self, arm: Arm, link: str, work: Work) -> None:
        """Send the request through the link as well; its answer is dropped, its transfer is what we want."""
        own = Work(encoded=work.encoded, tensors=work.tensors, made=work.made)
        began_s = self._ports.clock()
        try:
            async with asyncio.timeout(LOOK_S):
                answer = await self._arms.run(arm, self._plan, own, LOOK_S - HANDS_OFF_S)
        except TimeoutError:
            self._states.failed(link, LinkTimeout(f"no answer within {LOOK_S:.0f} s"), began_s)
        except FarEndError as err:
            # Whether the input was good is not known here: one client's bad picture closes the arm for nobody else.
            if not isinstance(err.cause, BadRequest):
                self._states.failed(link, err.cause, began_s)
        except MidstreamError as err:  # this device was full or could not read the input: nothing is learnt
            _log.debug("%s: %s was not looked at: %s", self._plan.name, link, err)
        else:
            self._states.answered(link)
            self._learn(arm, answer.spent, own)
