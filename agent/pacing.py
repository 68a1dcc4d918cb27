"""Pure: how often an agent that is a guest may use the network, from what its host says of battery and network."""

from __future__ import annotations

from attrs import frozen

from agent.host_bridge import HostState
from links.session import DEFAULT_RULES, SessionRules

AWAKE_KEEPALIVE_S = 30
CALM_KEEPALIVE_S = 240
"""Rarely enough to let a radio sleep, and below the five minutes after which mobile networks forget a connection."""

CALM_RULES = SessionRules(base_s=5.0, cap_s=900.0, spread_s=60.0, clock_s=60.0)
HOT = ("severe", "critical", "emergency", "shutdown")


@frozen
class Pace:
    """may_dial: an attempt to connect makes sense. asleep: the system will not let the agent keep a session.

    may_fetch: large files may be fetched. reason: of the keepalive, in a word.
    """

    keepalive_s: int
    rules: SessionRules
    may_dial: bool
    may_fetch: bool
    asleep: bool
    reason: str


def pace(state: HostState) -> Pace:
    """What the state of a host allows."""
    connected = state.network != "none" and state.validated
    calm = _calm(state)
    return Pace(
        keepalive_s=CALM_KEEPALIVE_S if calm else AWAKE_KEEPALIVE_S,
        rules=CALM_RULES if calm else DEFAULT_RULES,
        may_dial=connected and not state.idle,
        may_fetch=connected and not state.idle and not state.metered and not (state.power_save and not state.charging),
        asleep=state.idle,
        reason=calm or "awake",
    )


def _calm(state: HostState) -> str:
    """Why to use the radio seldom; empty while nothing speaks for it. A charger outweighs all but mobile data."""
    if state.network == "cellular":
        return "cellular"
    if state.charging:
        return ""
    if state.power_save:
        return "power save"
    return "background" if state.background else ""


def too_hot(state: HostState) -> bool:
    """Whether the system already slows everything down, or is about to stop programs."""
    return state.thermal in HOT
