"""The connect machine of a control channel: what happened last -> state to show and seconds until the next attempt.

Pure: time and chance are arguments. The backoff has full jitter and is reset by a session that lived, never by the
broker's welcome alone, so two clients with one identity cannot fight at full speed.
"""

from __future__ import annotations

from typing import Literal

from attrs import evolve, frozen

from links.port import ControlState

Cause = Literal["network", "silent", "protocol", "refused", "identity", "clock", "taken_over"]
"""Why an attempt failed or a session ended.

`protocol`: the broker does not speak this MQTT version. `silent`: it took the connection and then said nothing, as
amqtt does when it misreads an MQTT 5 CONNECT with properties.
"""


@frozen
class SessionRules:
    """All waits in seconds.

    base_s, cap_s: the wait before attempt n is drawn from 0 to min(cap_s, base_s * 2**n).
    least_s: no wait is shorter.
    spread_s: after a session that lived, the first attempt is drawn from 0 to this: a broker's restart must not bring
        the whole fleet back within a second.
    stable_s: a session that lived this long resets the backoff.
    short_s, duplicate_after: so many sessions in a row shorter than short_s mean that somebody else has this identity.
    duplicate_s, refused_s, clock_s: the wait in these states is drawn from half to the whole of it.
    """

    base_s: float = 1.0
    cap_s: float = 120.0
    least_s: float = 0.1
    spread_s: float = 30.0
    stable_s: float = 45.0
    short_s: float = 10.0
    duplicate_after: int = 3
    duplicate_s: float = 300.0
    refused_s: float = 120.0
    clock_s: float = 20.0


DEFAULT_RULES = SessionRules()


@frozen
class Connected:
    """The broker said welcome."""

    at_s: float


@frozen
class Failed:
    """An attempt did not lead to a session. `draw` is uniform in [0, 1)."""

    cause: Cause
    draw: float


@frozen
class Lost:
    """A session ended that was not ended by us."""

    cause: Cause
    at_s: float
    draw: float


SessionEvent = Connected | Failed | Lost


@frozen
class Session:
    """Everything the next decision depends on.

    version: the MQTT version to try: 5, or 4 for MQTT 3.1.1.
    proven: this broker has welcomed us with this version.
    """

    state: ControlState = "down"
    version: Literal[4, 5] = 5
    proven: bool = False
    attempt: int = 0
    short_lives: int = 0
    up_since_s: float = 0.0


def step(session: Session, event: SessionEvent, rules: SessionRules = DEFAULT_RULES) -> tuple[Session, float]:
    """The session after `event`, and the seconds to wait before the next attempt (0 while connected)."""
    if isinstance(event, Connected):
        return evolve(session, state="up", proven=True, up_since_s=event.at_s), 0.0
    if isinstance(event, Failed):
        return _after_failure(session, event, rules)
    return _after_loss(session, event, rules)


def _after_failure(session: Session, event: Failed, rules: SessionRules) -> tuple[Session, float]:
    if event.cause == "protocol" and session.version == 5:
        return evolve(session, version=4, proven=False), 0.0
    if event.cause == "silent" and session.version == 5 and not session.proven:
        return evolve(session, version=4), 0.0
    if event.cause in ("refused", "identity", "protocol"):
        return evolve(session, state="refused"), _half_to_whole(rules.refused_s, event.draw)
    if event.cause == "clock":
        return evolve(session, state="clock"), _half_to_whole(rules.clock_s, event.draw)
    if not session.proven:
        session = evolve(session, version=5)
    return _back_off(evolve(session, state="down"), event.draw, rules)


def _after_loss(session: Session, event: Lost, rules: SessionRules) -> tuple[Session, float]:
    lived_s = event.at_s - session.up_since_s
    if event.cause == "taken_over" or lived_s < rules.short_s:
        session = evolve(session, short_lives=session.short_lives + 1)
        if session.short_lives >= rules.duplicate_after:
            return evolve(session, state="duplicate", short_lives=0), _half_to_whole(rules.duplicate_s, event.draw)
    elif lived_s >= rules.stable_s:
        fresh = evolve(session, state="down", attempt=0, short_lives=0)
        return fresh, max(rules.least_s, event.draw * rules.spread_s)
    return _back_off(evolve(session, state="down"), event.draw, rules)


def _back_off(session: Session, draw: float, rules: SessionRules) -> tuple[Session, float]:
    longest_s = min(rules.cap_s, rules.base_s * 2 ** min(session.attempt, 30))
    return evolve(session, attempt=session.attempt + 1), max(rules.least_s, draw * longest_s)


def _half_to_whole(whole_s: float, draw: float) -> float:
    return whole_s * (0.5 + draw / 2)
