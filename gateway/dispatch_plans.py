"""What dispatch learns from requests, and the plans that follow from it; a request only looks its plan up. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from gateway.context import Constraints
from gateway.dispatch import DispatchPlan, dispatch, sides
from gateway.dispatch_cost import Costs, Workload, costs, regime_of
from gateway.dispatch_lengths import LengthHistory
from gateway.dispatch_table import DispatchTable, Regime, make_table
from gateway.targets import TargetView
from profiles.energy import EnergyModel, PowerState, money_per_joule
from protocol.policy import DispatchPolicy

MAX_MODELS = 64
"""Models that plans are kept of; the least recently asked is forgotten first."""

MAX_WAITING = 1024
"""Prompt lengths that wait to be counted; more come only if nothing refreshes, and then the rest is not counted."""


@frozen
class Chosen:
    """A regime and what spoke for it."""

    model: str
    server: str
    regime: Regime
    costs: Costs
    money_per_joule: float


@define
class _Learnt:
    """Of one model. tables, regimes: by server."""

    lengths: LengthHistory = field(factory=LengthHistory)
    waiting: list[int] = field(factory=list)
    tables: dict[str, tuple[DispatchTable, float]] = field(factory=dict)
    regimes: dict[str, Chosen] = field(factory=dict)


class Plans:
    """Tables by model and server, made anew by `refresh` and never by a request that finds one.

    answer_tokens: mean length of answers as seen.
    """

    def __init__(self, answer_tokens: Callable[[], float]) -> None:
        self.energy = EnergyModel()
        self.power = PowerState()
        self._answer_tokens = answer_tokens
        self._models: OrderedDict[str, _Learnt] = OrderedDict()

    def plan(
        self,
        model: str,
        prompt_tokens: int,
        targets: Sequence[TargetView],
        constraints: Constraints,
        draw: float,
        policy: DispatchPolicy,
        patience_s: float,
    ) -> DispatchPlan:
        """The starts of one request. Without a budget (1) preference decides, and lengths are learnt all the same."""
        learnt = self._of(model)
        if len(learnt.waiting) < MAX_WAITING:
            learnt.waiting.append(prompt_tokens)
        table = None
        if policy.budget_ratio < 1.0:
            device, server = sides(targets, constraints)
            if device is not None and server is not None:
                table = self._table(model, learnt, device, server, policy)
        return dispatch(table, prompt_tokens, targets, constraints, draw, policy, patience_s)

    def refresh(
        self, views: Callable[[str], Sequence[TargetView]], policy: DispatchPolicy, power: PowerState
    ) -> Sequence[Chosen]:
        """Count what came and make every table anew, in some ten microseconds each; the regimes that changed."""
        self.power = power
        changed: list[Chosen] = []
        for model, learnt in self._models.items():
            waiting, learnt.waiting = learnt.waiting, []
            for tokens in waiting:
                learnt.lengths.add(tokens)
            if policy.budget_ratio < 1.0:
                changed += self._made_anew(model, learnt, views(model), policy)
        return changed

    def regimes(self) -> Sequence[Chosen]:
        """The regime of every model and server that a plan was made for."""
        return [chosen for learnt in self._models.values() for chosen in learnt.regimes.values()]

    def _made_anew(
        self, model: str, learnt: _Learnt, views: Sequence[TargetView], policy: DispatchPolicy
    ) -> Sequence[Chosen]:
        device, _ = sides(views, Constraints())
        before, learnt.tables, learnt.regimes = dict(learnt.regimes), {}, dict(learnt.regimes)
        if device is None:
            return ()
        servers = [view for view in views if not view.local]
        for server in servers:
            self._make(model, learnt, device, server, policy)
        known = {server.name for server in servers}
        learnt.regimes = {name: chosen for name, chosen in learnt.regimes.items() if name in known}
        return [
            chosen
            for name, chosen in learnt.regimes.items()
            if name not in before or before[name].regime != chosen.regime
        ]

    def _table(
        self, model: str, learnt: _Learnt, device: TargetView, server: TargetView, policy: DispatchPolicy
    ) -> DispatchTable:
        """The table as it stands; made here only for a new server, or right after the policy's budget changed."""
        found = learnt.tables.get(server.name)
        if found is None or (found[0].budget_ratio, found[1]) != (policy.budget_ratio, policy.tail_ratio):
            return self._make(model, learnt, device, server, policy)
        return found[0]

    def _make(
        self, model: str, learnt: _Learnt, device: TargetView, server: TargetView, policy: DispatchPolicy
    ) -> DispatchTable:
        rate = money_per_joule(policy, self.power)
        work = Workload(learnt.lengths.mean_tokens, self._answer_tokens())
        money = costs(device, server, work, self.energy, rate)
        held = learnt.regimes.get(server.name)
        regime = regime_of(money, policy, held.regime if held else None)
        learnt.regimes[server.name] = Chosen(model, server.name, regime, money, rate)
        table = make_table(regime, learnt.lengths, server.ttft, policy.budget_ratio, policy.tail_ratio)
        learnt.tables[server.name] = (table, policy.tail_ratio)
        return table

    def _of(self, model: str) -> _Learnt:
        learnt = self._models.get(model)
        if learnt is None:
            learnt = self._models[model] = _Learnt()
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(model)
        return learnt
