"""The floor of a link, as transfers of different sizes told it: kept when those have left the window."""

from __future__ import annotations

import pytest

from netprobe.change import DEFAULT_RULES
from netprobe.floor import TOLD, Floor
from netprobe.probe import LinkProbe
from netprobe.window import WINDOW, Pair
from protocol.events import TransferSample
from tests.unit.netprobe.link import Link

IDLE_S = DEFAULT_RULES.idle_s
SMALL, LARGE = 40_000, 160_000


def told(*pairs: Pair) -> float | None:
    return Floor.of(pairs, IDLE_S).seconds


def asked_for(link: Link, times: int) -> None:
    """Both sizes in turn."""
    for _ in range(times):
        link.send(SMALL)
        link.send(LARGE)


def test_what_sizes_told_of_the_floor_is_known_when_they_have_left_the_window() -> None:
    link = Link(floor_s=0.15, rate=4e5)
    asked_for(link, 3)
    link.rate /= 2  # a slower link behind the same path
    for _ in range(2 * WINDOW):
        link.send(SMALL)
    view = link.probe.view("cloud")
    assert view.floor_s == pytest.approx(0.15)
    assert view.seconds_for(LARGE) == pytest.approx(link.truth(LARGE))


def test_without_other_sizes_half_of_the_shortest_transfer_may_be_floor() -> None:
    link = Link(floor_s=0.0, rate=4e5)
    link.send(SMALL, extra_s=0.3)
    link.send(SMALL)
    assert link.probe.view("cloud").floor_s == pytest.approx(0.05)


def test_the_floor_is_never_longer_than_what_a_transfer_took() -> None:
    link = Link(floor_s=0.15, rate=4e5)
    asked_for(link, TOLD)
    link.floor_s = 0.02
    link.rate *= 10
    for _ in range(WINDOW):
        link.send(SMALL)
    assert 0.0 <= link.probe.view("cloud").floor_s <= link.truth(SMALL)


def test_one_transfer_into_a_fade_moves_the_floor_little() -> None:
    link = Link(floor_s=0.15, rate=4e5)
    asked_for(link, 3)
    link.send(SMALL, extra_s=2.0)
    link.rate /= 2
    for _ in range(WINDOW):
        link.send(SMALL)
    assert link.probe.view("cloud").floor_s == pytest.approx(0.15, rel=0.1)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (Pair(LARGE, 0.5, 10.3), "it ran beside the first"),
        (Pair(LARGE, 0.5, 10.5 + 2 * IDLE_S), "the link may be another one by then"),
        (Pair(SMALL + 1_000, 0.5, 10.5), "it is about as large"),
    ],
)
def test_two_transfers_tell_nothing_when(second: Pair, why: str) -> None:
    first = Pair(SMALL, 0.2, 10.0)
    assert told(first, second) == told(first), why


def test_two_transfers_one_after_the_other_tell_the_floor_whichever_came_first() -> None:
    small, large = Pair(SMALL, 0.25, 10.0), Pair(LARGE, 0.55, 10.55)
    assert list(Floor.of([small, large], IDLE_S).told_s) == [pytest.approx(0.15)]
    large, small = Pair(LARGE, 0.55, 10.0), Pair(SMALL, 0.25, 10.25)
    assert list(Floor.of([large, small], IDLE_S).told_s) == [pytest.approx(0.15)]


def test_a_floor_is_not_negative_and_a_faster_large_transfer_bounds_it() -> None:
    assert list(Floor.of([Pair(SMALL, 0.05, 10.0), Pair(LARGE, 0.55, 10.55)], IDLE_S).told_s) == [0.0]
    assert list(Floor.of([Pair(SMALL, 0.5, 10.0), Pair(LARGE, 0.3, 10.3)], IDLE_S).told_s) == [0.3]


def test_the_floor_survives_a_restart() -> None:
    link = Link(floor_s=0.15, rate=4e5)
    asked_for(link, WINDOW // 2)
    again = Link(floor_s=0.15, rate=2e5)
    again.probe.recall("cloud", link.probe.past("cloud"))
    for _ in range(2 * WINDOW):
        again.send(SMALL)
    assert again.predicted(LARGE) == pytest.approx(again.truth(LARGE))


def test_an_answer_is_measured_from_its_first_byte_on_and_shows_its_pace_at_once() -> None:
    link = Link(floor_s=0.04, rate=1e6)
    for _ in range(5):
        link.send(200)  # a round trip of 40 ms is known
    down = Link(floor_s=0.0, rate=1e6)
    down.probe = link.probe
    for _ in range(WINDOW):
        down.send(200_000, direction="down")
    assert link.probe.view("cloud", "down").floor_s == 0.0
    slow = TransferSample(
        at_s=down.clock(), link="cloud", direction="down", size_bytes=200_000, seconds=0.03, complete=False,
        moved_bytes=3_000,
    )  # fmt: skip
    link.probe.watch("cloud", lambda: slow)
    assert link.probe.view("cloud", "down", down.clock()).seconds_for(200_000) > 0.3


def test_nothing_is_known_of_a_way_without_transfers() -> None:
    assert Floor().seconds is None
    assert LinkProbe(lambda: 0.0).view("cloud").floor_s == 0.0
