"""What a request costs on either side in money, and which side is therefore the dear one that a budget bounds. Pure."""

from __future__ import annotations

from attrs import evolve, frozen

from gateway.dispatch_table import Regime
from gateway.targets import TargetView
from profiles.energy import EnergyModel, flops_per_token
from protocol.policy import DispatchPolicy

HELD_FACTOR = 1.2
"""A regime is left only for a side that is dearer by this much: charge and heat move a joule's worth all the time."""


@frozen
class Workload:
    """The usual request: mean prompt and answer."""

    prompt_tokens: float
    answer_tokens: float


@frozen
class Costs:
    """Money of the usual request, answered by one side alone."""

    device: float
    server: float


def costs(device: TargetView, server: TargetView, work: Workload, energy: EnergyModel, money_per_joule: float) -> Costs:
    """The device's energy of uncached prefill and decoding at lambda, and what each side asks."""
    fresh = work.prompt_tokens * (1.0 - device.cached_ratio)
    joules = energy.joules(flops_per_token(device.parameters), fresh, work.answer_tokens)
    return Costs(joules * money_per_joule + asked(device, work), asked(server, work))


def with_energy(view: TargetView, energy: EnergyModel, money_per_joule: float) -> TargetView:
    """The view with what a token costs in energy here added to its prices; a server's energy is in its price."""
    if not view.local or money_per_joule <= 0:
        return view
    flops = flops_per_token(view.parameters)
    return evolve(
        view,
        price_in=view.price_in + energy.joules(flops, 1.0, 0.0) * money_per_joule,
        price_out=view.price_out + energy.joules(flops, 0.0, 1.0) * money_per_joule,
    )


def asked(view: TargetView, work: Workload) -> float:
    """What a target charges: input, cached input and output."""
    cached_price = view.price_in if view.price_cached_in is None else view.price_cached_in
    per_prompt_token = view.cached_ratio * cached_price + (1.0 - view.cached_ratio) * view.price_in
    return work.prompt_tokens * per_prompt_token + work.answer_tokens * view.price_out


def regime_of(found: Costs, policy: DispatchPolicy, held: Regime | None) -> Regime:
    """The dear side is the one to spare. Where neither costs more, it is the side that the policy does not prefer."""
    if held == "device_constrained" and found.device > 0 and found.device * HELD_FACTOR >= found.server:
        return held
    if held == "server_constrained" and found.server > 0 and found.server * HELD_FACTOR >= found.device:
        return held
    if found.device == found.server:
        return "device_constrained" if policy.start == "cloud" else "server_constrained"
    return "device_constrained" if found.device > found.server else "server_constrained"
