"""Putting a policy into force, section by section: what changed, what each part of the agent did about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from agent.bounds import changed_sections
from protocol.errors import MidstreamError
from protocol.policy import Policy

Action = Callable[[Policy], None]
"""Takes the whole new policy; raises a MidstreamError when its part cannot follow. Must not block."""


class Queueing(Protocol):
    """A part whose queues follow a wait target."""

    def set_wait_target(self, seconds: float) -> None: ...


LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def apply(old: Policy, new: Policy, actions: Mapping[str, Action]) -> dict[str, str]:
    """Run the action of every changed section; one that fails holds up no other.

    Sections without an action are read from the policy source by whoever needs them, so they are in force at once.
    Returns section -> `applied` or `failed: <reason>`.
    """
    reported: dict[str, str] = {}
    for section in changed_sections(old, new):
        action = actions.get(section)
        try:
            if action is not None:
                action(new)
            reported[section] = "applied"
        except MidstreamError as err:
            reported[section] = f"failed: {err.message}"
    return reported


def set_log_level(policy: Policy) -> None:
    """The action of `log_level`."""
    logging.getLogger("midstream").setLevel(LEVELS[policy.log_level])


def set_wait_target(parts: Iterable[Queueing]) -> Action:
    """The action of `engines`: `parts` is read at each change, so it may be filled after the policy is held."""

    def act(policy: Policy) -> None:
        for part in parts:
            part.set_wait_target(policy.engines.wait_target_s)

    return act
