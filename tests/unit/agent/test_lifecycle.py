"""The three tracks: READY is serving's own, tracks never move each other, every state has a way out."""

from __future__ import annotations

import pytest

from agent.lifecycle import TABLES, Life, Track, advance


def run(track: Track, *events: str) -> str:
    life = Life()
    for event in events:
        life = advance(life, track, event)
    return str(getattr(life, track))


def test_ready_needs_neither_coordinator_nor_profile() -> None:
    life = advance(advance(Life(), "serving", "start"), "serving", "listening")
    assert life == Life(serving="ready", connected="alone", profiled="unknown")


@pytest.mark.parametrize(
    ("events", "state"),
    [
        (("search", "nothing_found", "found", "up"), "connected"),
        (("search", "found", "up", "down", "up"), "connected"),
        (("search", "clock_wrong"), "wait_clock"),
        (("search", "clock_wrong", "search", "found", "up"), "connected"),
        (("search", "found", "up", "duplicate", "up"), "duplicate"),
        (("search", "found", "up", "duplicate", "search"), "searching"),
        (("search", "found", "up", "down", "search", "found", "up"), "connected"),
        (("up",), "alone"),
    ],
)
def test_the_connected_track(events: tuple[str, ...], state: str) -> None:
    assert run("connected", *events) == state


@pytest.mark.parametrize("track", list(TABLES))
def test_every_state_that_can_be_reached_can_be_left(track: Track) -> None:
    table = TABLES[track]
    left = {source for source, _ in table}
    assert set(table.values()) <= left


@pytest.mark.parametrize("track", list(TABLES))
def test_an_event_without_a_row_changes_nothing(track: Track) -> None:
    assert advance(Life(), track, "nonsense") == Life()
