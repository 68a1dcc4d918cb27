"""What there is to choose from for one request: models and targets of this machine, and of the cloud. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from attrs import frozen

from gateway.context import Caller, Constraints
from gateway.ports import Offer
from gateway.targets import TargetView
from protocol.policy_routing import RoutingPolicy, is_cloud, is_edge

Start = Literal["device", "cloud"]


@frozen
class Side:
    """One side's model, and the targets that have it and may see the request."""

    start: Start
    model: str
    views: tuple[TargetView, ...]

    @property
    def up(self) -> bool:
        """Whether one of them is not resting after failures."""
        return any(view.up for view in self.views)


@frozen
class Sides:
    """Both sides; None where nothing may answer."""

    edge: Side | None
    cloud: Side | None

    def of(self, start: Start) -> Side | None:
        """The side of this name."""
        return self.edge if start == "device" else self.cloud


def sides(offer: Offer, routing: RoutingPolicy, caller: Caller, constraints: Constraints) -> Sides:
    """The policy's models first, then all that are offered, until each side has one."""
    edge = _first(offer, routing, caller, constraints, "device")
    cloud = None if constraints.local_only else _first(offer, routing, caller, constraints, "cloud")
    return Sides(edge, cloud)


def side_of_target(
    target: str, model: str | None, offer: Offer, caller: Caller, constraints: Constraints
) -> Side | None:
    """The side of a rule or a plugin: edge, cloud, or the one of a target's name; with this model if one is given."""
    models = (model,) if model is not None else tuple(_models(offer, caller))
    for name in models:
        views = tuple(view for view in _allowed(offer, name, constraints) if _is(target, view))
        if views and (caller.models is None or name in caller.models):
            return Side("device" if views[0].local else "cloud", name, views)
    return None


def _first(offer: Offer, routing: RoutingPolicy, caller: Caller, constraints: Constraints, start: Start) -> Side | None:
    wanted = routing.models.get("edge" if start == "device" else "cloud")
    here = start == "device"
    for model in _models(offer, caller) if wanted is None else (wanted, *_models(offer, caller)):
        views = tuple([view for view in _allowed(offer, model, constraints) if view.local == here])
        if views and (caller.models is None or model in caller.models):
            return Side(start, model, views)
    return None


def _models(offer: Offer, caller: Caller) -> Iterable[str]:
    models = offer.models()
    return models if caller.models is None else [model for model in models if model in caller.models]


def _allowed(offer: Offer, model: str, constraints: Constraints) -> Sequence[TargetView]:
    return [view for view in offer.views(model) if constraints.allows(view.name, view.local)]


def _is(target: str, view: TargetView) -> bool:
    if is_edge(target):
        return view.local
    return not view.local if is_cloud(target) else view.name == target or view.name.startswith(f"{target}/")
