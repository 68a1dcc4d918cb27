"""The connect machine: the table of states and events, and what a whole fleet does."""

from __future__ import annotations

import random

import pytest
from attrs import evolve

from links.session import Connected, Failed, Lost, Session, SessionRules, step

RULES = SessionRules()
DOWN = Session()
UP = Session(state="up", proven=True, up_since_s=100.0)
OLD = Session(version=4)


@pytest.mark.parametrize(
    ("before", "event", "state", "version", "wait_s"),
    [
        (DOWN, Connected(5.0), "up", 5, 0.0),
        (DOWN, Failed("network", 0.5), "down", 5, 0.5),
        (evolve(DOWN, attempt=3), Failed("network", 0.5), "down", 5, 4.0),
        (evolve(DOWN, attempt=99), Failed("network", 0.5), "down", 5, 60.0),
        (DOWN, Failed("network", 0.0), "down", 5, RULES.least_s),
        (DOWN, Failed("protocol", 0.5), "down", 4, 0.0),
        (OLD, Failed("protocol", 0.5), "refused", 4, 90.0),
        (DOWN, Failed("silent", 0.5), "down", 4, 0.0),
        (OLD, Failed("silent", 0.5), "down", 5, 0.5),
        (evolve(OLD, proven=True), Failed("network", 0.5), "down", 4, 0.5),
        (evolve(DOWN, proven=True), Failed("silent", 0.5), "down", 5, 0.5),
        (DOWN, Failed("refused", 0.0), "refused", 5, 60.0),
        (DOWN, Failed("identity", 1.0), "refused", 5, 120.0),
        (DOWN, Failed("clock", 0.0), "clock", 5, 10.0),
        (UP, Lost("network", 100.0 + 45, 0.5), "down", 5, 15.0),
        (UP, Lost("network", 100.0 + 20, 0.5), "down", 5, 0.5),
        (UP, Lost("network", 100.0 + 2, 0.5), "down", 5, 0.5),
        (evolve(UP, short_lives=2), Lost("network", 102.0, 0.0), "duplicate", 5, 150.0),
        (evolve(UP, short_lives=2), Lost("taken_over", 9999.0, 1.0), "duplicate", 5, 300.0),
        (evolve(UP, short_lives=2), Lost("network", 200.0, 0.5), "down", 5, 15.0),
    ],
)
def test_table(before: Session, event: Connected | Failed | Lost, state: str, version: int, wait_s: float) -> None:
    after, wait = step(before, event)
    assert f"{after.state} {after.version}" == f"{state} {version}"
    assert wait == pytest.approx(wait_s)


def test_only_a_session_that_lived_resets_the_backoff() -> None:
    """MQ1: a welcome followed by a kick must not reset the wait."""
    session = DOWN
    for attempt in range(4):
        session, _ = step(session, Connected(attempt * 20.0))
        session, _ = step(session, Lost("network", attempt * 20.0 + 15, 0.5))
    assert session.attempt == 4
    session, _ = step(session, Connected(1000.0))
    session, _ = step(session, Lost("network", 1000.0 + RULES.stable_s, 0.5))
    assert session.attempt == 0


def _fight(seconds: float, seed: int) -> tuple[int, set[str]]:
    """Two clients with one identity; the broker kicks the older one. Returns all connects and the states seen."""
    rng = random.Random(seed)
    now_s, connects = 0.0, 0
    sessions, due_s = [Session(), Session()], [0.0, 5.0]
    holder: int | None = None
    seen: set[str] = set()
    while True:
        who = min((0, 1), key=lambda i: due_s[i] if i != holder else float("inf"))
        now_s = due_s[who]
        if now_s > seconds:
            return connects, seen
        if holder is not None:
            sessions[holder], wait_s = step(sessions[holder], Lost("network", now_s, rng.random()))
            seen.add(sessions[holder].state)
            due_s[holder] = now_s + wait_s
        sessions[who], _ = step(sessions[who], Connected(now_s))
        holder, connects = who, connects + 1


@pytest.mark.parametrize("seed", range(5))
def test_two_clients_with_one_identity_stop_fighting(seed: int) -> None:
    """MQ1, MQ2: at most a few connects per minute, and one of them says duplicate."""
    connects, states = _fight(3600.0, seed)
    assert "duplicate" in states
    assert connects / 60 < 3


def test_a_fleet_does_not_come_back_within_a_second() -> None:
    """MQ3: 200 agents lose a session that had lived; their first attempts spread over half a minute."""
    rng = random.Random(7)
    waits = sorted(step(UP, Lost("network", 10_000.0, rng.random()))[1] for _ in range(200))
    assert waits[-1] - waits[0] > 25
    assert max(sum(1 for w in waits if second <= w < second + 1) for second in range(30)) < 20
