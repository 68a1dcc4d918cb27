"""Capacity by Little's law, and what happens to newcomers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.admission import MAX_WAITING, Admission, Load, ServiceTime, WhenFull


def measured(service_s: float, *, workers: int = 4, wait_target_s: float = 0.1, parallel: float = 4.0) -> Admission:
    admission = Admission(workers, wait_target_s, parallel=parallel)
    for _ in range(31):
        admission.add(service_s, 1)
    return admission


@pytest.mark.parametrize(
    ("service_s", "workers", "parallel", "wait_target_s", "capacity"),
    [
        (0.010, 4, 4.0, 0.1, 40),
        (0.015, 4, 2.0, 0.03, 4),
        (0.020, 1, 1.0, 0.1, 5),
        (5.0, 4, 4.0, 0.1, 1),
        (1e-9, 4, 4.0, 0.1, MAX_WAITING),
    ],
)
def test_capacity_is_the_wait_target_over_the_time_per_departure(
    service_s: float, workers: int, parallel: float, wait_target_s: float, capacity: int
) -> None:
    found = measured(service_s, workers=workers, parallel=parallel, wait_target_s=wait_target_s)
    assert abs(found.capacity - capacity) <= (1 if capacity > 1 and capacity < MAX_WAITING else 0)


def test_capacity_before_the_first_run_is_one_per_worker() -> None:
    assert Admission(3, 0.1, parallel=2.0).capacity == 3


def test_capacity_follows_a_drift_and_ignores_a_stray_run() -> None:
    admission = measured(0.01)
    before = admission.capacity
    admission.add(10.0, 1)
    assert admission.capacity > before * 0.8
    for _ in range(31):
        admission.add(0.04, 1)
    assert admission.capacity == pytest.approx(before / 4, abs=1)


def test_service_time_is_the_same_on_a_crowded_machine() -> None:
    alone, crowded = ServiceTime(parallel=2.0), ServiceTime(parallel=2.0)
    for _ in range(10):
        alone.add(0.015, 1)
        crowded.add(0.0375, 5)
    assert alone.seconds == pytest.approx(crowded.seconds)


@given(
    service_s=st.floats(1e-6, 100),
    waiting=st.integers(0, 1000),
    running=st.integers(0, 8),
    workers=st.integers(1, 8),
    when_full=st.sampled_from(["caller_runs", "refuse", "wait"]),
)
def test_nobody_is_let_in_beyond_the_wait_target(
    service_s: float, waiting: int, running: int, workers: int, when_full: WhenFull
) -> None:
    admission = measured(service_s, workers=workers, parallel=float(workers))
    load = Load(waiting=waiting, running=min(running, workers), workers=workers)
    decision = admission.decide(load, when_full)
    if load.waiting + load.running < workers:
        assert decision.act == "queue"
    elif decision.act == "queue":
        assert waiting < admission.capacity <= MAX_WAITING
        assert admission.capacity == 1 or admission.wait_s(load) <= 0.1 * 1.0001
    else:
        assert decision.act == when_full
        assert waiting >= admission.capacity - admission.reserved
        assert when_full != "refuse" or decision.retry_after_s > 0


def test_callers_that_can_run_work_leave_room_for_those_that_cannot() -> None:
    admission = measured(0.010)
    load = Load(waiting=admission.capacity - 1, running=4, workers=4)
    assert admission.decide(load, "caller_runs").act == "caller_runs"
    assert admission.decide(load, "refuse").act == "queue"


@pytest.mark.parametrize(("workers", "reserved"), [(1, 1), (4, 0)])
def test_where_two_may_wait_one_place_is_kept_if_no_core_idles_for_it(workers: int, reserved: int) -> None:
    admission = Admission(workers, 0.05, parallel=1)
    admission.add(0.02, 1)
    assert (admission.capacity, admission.reserved) == (2, reserved)


def test_unbounded_lets_everything_in() -> None:
    admission = Admission(1, 0.1, parallel=1.0, bounded=False)
    assert admission.decide(Load(10_000, 1, 1), "refuse").act == "queue"


@pytest.mark.parametrize("bad", [{"workers": 0}, {"wait_target_s": 0.0}, {"max_waiting": 0}, {"parallel": 0.0}])
def test_senseless_settings_are_bugs(bad: dict[str, float]) -> None:
    settings: dict[str, float] = {"workers": 1, "wait_target_s": 0.1, "parallel": 1.0} | bad
    with pytest.raises(ValueError, match="above 0"):
        Admission(
            int(settings["workers"]),
            settings["wait_target_s"],
            parallel=settings["parallel"],
            max_waiting=int(settings.get("max_waiting", 5)),
        )
