"""A configuration that is read anew: what a running agent takes at once, and what waits for its next start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attrs import evolve, fields, frozen

from agent.config import AgentConfig, PolicyBounds
from gateway.providers import Providers

LIVE = ("bounds", "labels", "providers")
"""Parts of the configuration that change while the agent runs; `bounds` are those of BOUND_NAMES."""
BOUND_NAMES = tuple(f.name for f in fields(PolicyBounds))


@frozen
class Changes:
    """Names of settings that differ, as they stand in agent.toml: those in force now, those of the next start."""

    applied: tuple[str, ...] = ()
    next_start: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One sentence."""
        now = f"in force now: {', '.join(self.applied)}" if self.applied else "nothing changed that can change now"
        later = f"; at the next start: {', '.join(self.next_start)}" if self.next_start else ""
        return now + later


class Reconfigured(Protocol):
    """A running agent as its configuration reaches it."""

    def rebound(self, bounds: PolicyBounds) -> None: ...
    def relabel(self, labels: Mapping[str, str]) -> None: ...
    def reprovide(self, providers: Providers) -> None: ...


def compare(running: AgentConfig, found: AgentConfig) -> Changes:
    """What differs between the configuration in force and the one that was read."""
    bounds = tuple(n for n in BOUND_NAMES if getattr(running.bounds, n) != getattr(found.bounds, n))
    live: tuple[str, ...] = ("labels",) if dict(running.labels) != dict(found.labels) else ()
    live += ("providers",) if running.providers != found.providers else ()
    names = [f.name for f in fields(AgentConfig) if f.name not in LIVE]
    return Changes(bounds + live, tuple(n for n in names if getattr(running, n) != getattr(found, n)))


def take(agent: Reconfigured, running: AgentConfig, found: AgentConfig) -> tuple[AgentConfig, Changes]:
    """Put into force what can be; returns the configuration in force afterwards and what changed."""
    changes = compare(running, found)
    if running.bounds != found.bounds:
        agent.rebound(found.bounds)
    if "labels" in changes.applied:
        agent.relabel(found.labels)
    if "providers" in changes.applied:
        agent.reprovide(found.providers)
    return evolve(running, bounds=found.bounds, labels=found.labels, providers=found.providers), changes
