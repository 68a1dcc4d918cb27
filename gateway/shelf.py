"""What there is to choose from for one request: looked up when it is first asked for, and once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from gateway.context import Caller, Constraints
from gateway.ports import Signals
from gateway.targets import Target, TargetView


@define(eq=False)
class Shelf:
    """`gateway.ports.Offer`. targets: as the policy offers them. constraints: the policy's own. view: of one target."""

    targets: Sequence[Target]
    constraints: Constraints
    view: Callable[[Target, str], TargetView]
    told: Callable[[Caller], Signals]
    _models: Mapping[str, tuple[str, ...]] | None = field(default=None, init=False)
    _views: dict[str, Sequence[TargetView]] = field(factory=dict, init=False)

    def models(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the targets by model, allowed ones only."""
        if self._models is None:
            found: dict[str, list[str]] = {}
            for target in self.targets:
                if self.constraints.allows(target.name, target.local):
                    for model in sorted(target.models):
                        found.setdefault(model, []).append(target.name)
            self._models = {model: tuple(names) for model, names in sorted(found.items())}
        return self._models

    def views(self, model: str) -> Sequence[TargetView]:
        """What may be known of the targets that have `model`."""
        found = self._views.get(model)
        if found is None:
            found = self._views[model] = [self.view(target, model) for target in self.having(model)]
        return found

    def having(self, model: str) -> list[Target]:
        """The targets that have `model`, allowed or not."""
        return [target for target in self.targets if model in target.models]

    def signals(self, caller: Caller) -> Signals:
        """Budgets and the state of this machine."""
        return self.told(caller)
