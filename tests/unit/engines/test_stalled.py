"""The alarm "a queue grows while the CPU is idle", told by stories and held to its laws."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engines.stalled import MAX_QUEUES, QueueDepths, StallRules, StallWatch
from protocol.events import QueueSampled

RULES = StallRules(least_waiting=4, idle_ratio=0.5, raise_looks=5, clear_looks=10)


def played(story: Sequence[tuple[int, float | None]]) -> list[bool]:
    """Whether the alarm of one queue is on after each look at (waiting, idle share)."""
    watch = StallWatch(RULES)
    return [bool(watch.look(float(at), {"post": depth}, idle)) for at, (depth, idle) in enumerate(story)]


def test_the_story_of_a_batching_that_jumped() -> None:
    """Calm; answers in batches of a thousand pile up before workers that wait for a lock; the lock is freed."""
    calm = [(depth, 0.6) for depth in (0, 2, 1, 3, 0, 2, 1, 0)]
    jump = [(depth, 0.85) for depth in (30, 120, 300, 480, 700, 970)]
    stuck = [(970, 0.9)] * 5
    over = [(depth, 0.3) for depth in (800, 500, 200, 40)] + [(1, 0.6)] * 10
    on = played(calm + jump + stuck + over)
    assert not any(on[: len(calm) + 4])
    assert all(on[len(calm) + 4 : len(calm) + len(jump) + len(stuck)])
    assert not on[-1]
    # It went on once and off once.
    assert sum(a != b for a, b in itertools.pairwise(on)) == 2


def test_it_names_the_queue_that_grows_and_no_other() -> None:
    watch = StallWatch(RULES)
    for at in range(20):
        alarms = watch.look(float(at), {"tensor": 2, "pictures": 5 + at, "post": 20 - at}, 0.8)
    assert [(alarm.queue, alarm.waiting) for alarm in alarms] == [("pictures", 24)]
    assert alarms[0].since_s == 4.0
    assert alarms[0].idle_ratio == 0.8


def test_a_long_queue_on_a_busy_machine_is_load_and_no_fault() -> None:
    assert not any(played([(10 * at, 0.05) for at in range(60)]))


def test_without_knowing_the_cpu_nothing_is_claimed() -> None:
    assert not any(played([(10 * at, None) for at in range(60)]))


def test_a_queue_that_stays_full_is_stuck_too() -> None:
    assert played([(8, 0.9)] * 5)[-1]


def test_a_burst_that_is_worked_off_raises_nothing() -> None:
    assert not any(played([(depth, 0.6) for depth in (900, 700, 500, 300, 150, 80, 20, 0, 0)]))


def test_one_quiet_look_does_not_clear_it() -> None:
    on = played([(20, 0.9)] * 5 + [(2, 0.9)] * 9 + [(20, 0.9)] + [(2, 0.9)] * 9)
    assert all(on[4:])
    assert not played([(20, 0.9)] * 5 + [(2, 0.9)] * 10)[-1]


depths = st.integers(0, 1_000)
shares = st.floats(0, 1)


@given(st.lists(st.tuples(depths, shares), max_size=80))
def test_changes_are_at_least_as_far_apart_as_the_rules_say(story: list[tuple[int, float]]) -> None:
    on = [False, *played(story)]
    changes = [at for at in range(1, len(on)) if on[at] != on[at - 1]]
    for first, second in itertools.pairwise(changes):
        assert second - first >= (RULES.clear_looks if on[first] else RULES.raise_looks)


@given(st.lists(st.tuples(depths, shares), max_size=60))
def test_short_queues_never_raise_it(story: list[tuple[int, float]]) -> None:
    assert not any(played([(min(depth, RULES.least_waiting - 1), idle) for depth, idle in story]))


def test_depths_are_folded_from_events_and_bounded() -> None:
    found = QueueDepths()
    for number in range(MAX_QUEUES + 10):
        event = QueueSampled(at_s=0.0, name=f"q{number}", waiting=number, running=1, capacity=9, outcome="queued")
        found(event)
    assert len(found.now()) == MAX_QUEUES
    assert found.now()["q5"] == 5
