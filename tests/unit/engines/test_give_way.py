"""Work on many answers stands back for a user's, at its beginning and within, but never for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from engines.executor import BoundedExecutor
from engines.give_way import GIVE_WAY_S, behind, give_way, given_way_s
from protocol.events import QueueSampled


@pytest.fixture
def users() -> Iterator[BoundedExecutor]:
    found = BoundedExecutor("users", 1)
    yield found
    found.close()


@pytest.fixture
def sampled() -> list[QueueSampled]:
    return []


@pytest.fixture
def bulk(users: BoundedExecutor, sampled: list[QueueSampled]) -> Iterator[BoundedExecutor]:
    def emit(event: object) -> None:
        assert isinstance(event, QueueSampled)
        sampled.append(event)

    found = BoundedExecutor("bulk", 1, first=users, max_waiting=1, emit=emit)
    yield found
    found.close()


def test_work_begins_when_the_users_work_is_done(users: BoundedExecutor, bulk: BoundedExecutor) -> None:
    done: list[str] = []

    def work(name: str, gate: threading.Event) -> None:
        gate.wait(GIVE_WAY_S / 5)
        done.append(name)

    never, open_gate = threading.Event(), threading.Event()
    open_gate.set()
    users.submit(work, "user's", never, on_done=lambda result, error: None)
    bulk.call(work, "bulk", open_gate)
    assert done == ["user's", "bulk"]


def test_long_work_stands_back_in_its_midst_and_what_it_waited_is_no_cost_of_it(
    users: BoundedExecutor, bulk: BoundedExecutor, sampled: list[QueueSampled]
) -> None:
    done: list[str] = []

    def users_work() -> None:
        time.sleep(GIVE_WAY_S / 5)
        done.append("user's")

    def work() -> float:
        users.submit(users_work, on_done=lambda result, error: None)
        give_way()
        done.append("bulk")
        return given_way_s()

    stood_back_s = bulk.call(work)
    assert done == ["user's", "bulk"]
    assert stood_back_s > 0
    assert bulk.service_s is not None and bulk.service_s >= stood_back_s, "who comes next waits for that too"
    assert sampled[-1].service_s < stood_back_s


def test_nobody_stands_back_for_good(users: BoundedExecutor, bulk: BoundedExecutor) -> None:
    gate = threading.Event()
    try:
        users.submit(gate.wait, 10, on_done=lambda result, error: None)
        assert bulk.call(given_way_s) >= GIVE_WAY_S, "so long, and no longer, while the user's work goes on"
        assert users.busy
    finally:
        gate.set()


def test_where_nobody_comes_first_nothing_is_waited_for() -> None:
    with behind(None):
        give_way()
        assert given_way_s() == 0.0
