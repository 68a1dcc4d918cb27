"""What dispatch learns from requests, and the plans that follow from it; a request only looks its plan up. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen

from gateway.context import Constraints
from gateway.dispatch import DispatchPlan, alone, dispatch, sides
from gateway.dispatch_cost import Costs, Workload, costs, regime_of, with_energy
from gateway.dispatch_lengths import LengthHistory
from gateway.dispatch_table import DispatchTable, Regime, make_table
from gateway.dispatch_values import LEAST, NOTHING, ValueHistory
from gateway.targets import TargetView
from profiles.energy import EnergyModel, PowerState, money_per_joule
from protocol.policy import DispatchPolicy

MAX_MODELS = 64
"""Models that plans are kept of; the least recently asked is forgotten first."""


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
    """Of one model. values, tables, regimes: by server. asked: since the tables were made."""

    lengths: LengthHistory = field(factory=LengthHistory)
    values: dict[str, ValueHistory] = field(factory=dict)
    asked: bool = False
    tables: dict[str, tuple[DispatchTable, float]] = field(factory=dict)
    regimes: dict[str, Chosen] = field(factory=dict)


def live_table(
    regime: Regime, lengths: LengthHistory, values: ValueHistory | None, server: TargetView, policy: DispatchPolicy
) -> DispatchTable:
    """The plan by lengths, and where enough requests were seen of it also by what the server saves."""
    table = make_table(regime, lengths, server.ttft, policy.budget_ratio, policy.tail_ratio)
    if regime == "device_constrained" or values is None or len(values) < LEAST:
        return table
    spendable = values.spendable_ratio(policy.budget_ratio)
    late_s = server.ttft.quantile_s(1.0 - policy.tail_ratio)
    return evolve(table, worth=values.worth(server.ttft, spendable, policy.tail_ratio), tail_wait_s=late_s)


def within_account(table: DispatchTable, values: ValueHistory | None, policy: DispatchPolicy) -> DispatchTable:
    """The plan, or one that asks the server for nothing until what was overspent is settled."""
    if table.worth is None or values is None or not values.overdrawn(policy.budget_ratio):
        return table
    return evolve(table, worth=evolve(NOTHING, mean_queue_s=table.worth.mean_queue_s))


class Plans:
    """Tables by model and server, made anew by `refresh` and never by a request that finds one.

    answer_tokens: mean length of answers as seen.
    """

    def __init__(self, answer_tokens: Callable[[], float]) -> None:
        self.energy = EnergyModel()
        self.power = PowerState()
        self._answer_tokens = answer_tokens
        self._models: OrderedDict[str, _Learnt] = OrderedDict()
        self._news: list[Chosen] = []

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
        table, device, server = None, None, None
        if policy.budget_ratio < 1.0:
            device, server = sides(targets, constraints)
            if device is not None and server is not None:
                table = self._table(model, learnt, device, server, policy)
                table = within_account(table, learnt.values.get(server.name), policy)
        found = dispatch(table, prompt_tokens, targets, constraints, draw, policy, patience_s)
        if table is not None and device is not None and server is not None:
            history = learnt.values.setdefault(server.name, ValueHistory())
            asked = (server.name, 0.0) in found.starts
            history.add(prompt_tokens, device.prefill_seconds(prompt_tokens), device.queue_s, asked)
        self._count(learnt, prompt_tokens)
        return found

    def alone(self, model: str, prompt_tokens: int, name: str, policy: DispatchPolicy) -> DispatchPlan:
        """The start of a request that one target alone may answer; its length is learnt like any other."""
        self._count(self._of(model), prompt_tokens)
        return alone(name, policy)

    def _count(self, learnt: _Learnt, prompt_tokens: int) -> None:
        # A few steps now: a second's requests counted at once would hold up those that come then.
        learnt.lengths.add(prompt_tokens)
        learnt.asked = True

    def refresh(
        self, views: Callable[[str], Sequence[TargetView]], policy: DispatchPolicy, power: PowerState
    ) -> Sequence[Chosen]:
        """Make the tables of models that were asked anew; the regimes that are new since then."""
        self.power = power
        for model, learnt in self._models.items():
            asked, learnt.asked = learnt.asked, False
            if asked and policy.budget_ratio < 1.0:
                self._made_anew(model, learnt, views(model), policy)
        news, self._news = self._news, []
        return news

    def regimes(self) -> Sequence[Chosen]:
        """The regime of every model and server that a plan was made for."""
        return [chosen for learnt in self._models.values() for chosen in learnt.regimes.values()]

    def _made_anew(self, model: str, learnt: _Learnt, views: Sequence[TargetView], policy: DispatchPolicy) -> None:
        device, _ = sides(views, Constraints())
        learnt.tables = {}
        if device is None:
            return
        servers = [view for view in views if not view.local]
        for server in servers:
            self._make(model, learnt, device, server, policy)
        known = {server.name for server in servers}
        learnt.regimes = {name: chosen for name, chosen in learnt.regimes.items() if name in known}
        learnt.values = {name: history for name, history in learnt.values.items() if name in known}

    def priced(self, view: TargetView, policy: DispatchPolicy) -> TargetView:
        """The view at what its tokens cost now, the device's energy included: for moves of running answers."""
        return with_energy(view, self.energy, money_per_joule(policy, self.power))

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
        learnt.regimes[server.name] = chosen = Chosen(model, server.name, regime, money, rate)
        if held is None or held.regime != regime:
            self._news = [*self._news, chosen][-MAX_MODELS:]
        table = live_table(regime, learnt.lengths, learnt.values.get(server.name), server, policy)
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
