"""What there is to choose from for one request: models and targets of this machine, and of the cloud. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from attrs import define

from gateway.context import Caller, Constraints
from gateway.ports import Offer
from gateway.targets import TargetView
from protocol.policy_routing import RoutingPolicy, is_cloud, is_edge

Start = Literal["device", "cloud"]


@define
class Side:
    """One side's model, and the targets that have it and may see the request.

    Made anew for each request and changed by nobody; not frozen, which would take three times as long.
    """

    start: Start
    model: str
    views: tuple[TargetView, ...]

    @property
    def up(self) -> bool:
        """Whether one of them is not resting after failures."""
        for view in self.views:  # noqa: SIM110 - several times per decision, and a plain loop costs a third
            if view.up:
                return True
        return False


@define
class Sides:
    """Both sides; None where nothing may answer."""

    edge: Side | None
    cloud: Side | None

    def of(self, start: Start) -> Side | None:
        """The side of this name."""
        return self.edge if start == "device" else self.cloud


def sides(offer: Offer, routing: RoutingPolicy, caller: Caller, constraints: Constraints) -> Sides:
    """The policy's models first, then all that are offered, until each side has one."""
    edge = cloud = None
    if routing.models:
        edge = _wanted("device", routing.models.get("edge"), offer, caller, constraints)
        cloud = _wanted("cloud", routing.models.get("cloud"), offer, caller, constraints)
    for model in _models(offer, caller):
        if edge is not None and (cloud is not None or constraints.local_only):
            break
        here, there = _parted(offer, model, constraints)
        if edge is None and here:
            edge = Side("device", model, here)
        if cloud is None and there:
            cloud = Side("cloud", model, there)
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


def _wanted(start: Start, model: str | None, offer: Offer, caller: Caller, constraints: Constraints) -> Side | None:
    """The side with the model that the policy names for it."""
    if model is None or (caller.models is not None and model not in caller.models):
        return None
    here, there = _parted(offer, model, constraints)
    views = here if start == "device" else there
    return Side(start, model, views) if views else None


def _parted(
    offer: Offer, model: str, constraints: Constraints
) -> tuple[tuple[TargetView, ...], tuple[TargetView, ...]]:
    """The model's targets that may see the request: here, and elsewhere."""
    here: list[TargetView] = []
    there: list[TargetView] = []
    for view in offer.views(model):
        if constraints.allows(view.name, view.local):
            (here if view.local else there).append(view)
    return tuple(here), tuple(there)


def _models(offer: Offer, caller: Caller) -> Iterable[str]:
    models = offer.models()
    return models if caller.models is None else [model for model in models if model in caller.models]


def _allowed(offer: Offer, model: str, constraints: Constraints) -> Sequence[TargetView]:
    return [view for view in offer.views(model) if constraints.allows(view.name, view.local)]


def _is(target: str, view: TargetView) -> bool:
    if is_edge(target):
        return view.local
    return not view.local if is_cloud(target) else view.name == target or view.name.startswith(f"{target}/")
