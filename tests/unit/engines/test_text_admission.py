"""Admission of text requests from measured rates: pure, no engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.text_admission import (
    MOST_BATCH_TOKENS,
    PRIOR_ANSWER_TOKENS,
    STOP_S,
    Running,
    TextAdmission,
    Work,
    prefill_batch,
)

works = st.builds(Work, prompt_bytes=st.integers(0, 10_000), max_tokens=st.integers(1, 500))


def taught(slots: int = 1, target_s: float = 5.0, token_s: float = 0.1, byte_s: float = 0.01) -> TextAdmission:
    admission = TextAdmission(slots, target_s)
    admission.learn_prefill(100, 100 * byte_s, 1)
    admission.learn_decode(50, 50 * token_s, 1)
    admission.learn_length(40)
    return admission


def test_the_wait_is_the_work_ahead_over_the_rate() -> None:
    admission = taught()
    running = [Running(Work(100, 200), made=10)]
    assert admission.wait_s(running, []) == pytest.approx(30 * 0.1)
    assert admission.wait_s(running, [Work(100, 200)]) == pytest.approx(30 * 0.1 + 1.0 + 40 * 0.1)
    assert admission.wait_s([Running(Work(100, 5), made=None)], []) == pytest.approx(1.0 + 5 * 0.1)
    assert admission.wait_s([Running(Work(100, 200), made=60)], []) == pytest.approx(10 * 0.1), "longer than usual"
    assert admission.wait_s([Running(Work(100, 62), made=60)], []) == pytest.approx(2 * 0.1)


def test_nothing_waits_while_a_slot_is_free() -> None:
    admission = taught(slots=2)
    assert admission.wait_s([Running(Work(1, 500), made=0)], []) == 0.0
    assert admission.decide([Running(Work(1, 500), made=0)], []).act == "queue"


def test_before_anything_was_measured_one_per_slot_may_wait() -> None:
    admission = TextAdmission(2, 5.0)
    full = [Running(Work(1, 9), made=1)] * 2
    assert admission.decide(full, [Work(1, 9)]).act == "queue"
    assert admission.decide(full, [Work(1, 9)] * 2).act == "refuse"
    assert admission.capacity == 2


def test_the_capacity_follows_the_decode_rate_and_the_wait_target() -> None:
    fast, slow = taught(token_s=0.01), taught(token_s=0.1)
    assert (fast.capacity, slow.capacity) == (12, 1)
    slow.set_wait_target(60.0)
    assert slow.capacity == 15
    for _ in range(100):
        slow.learn_decode(50, 0.5, 1)
    assert slow.capacity > 100


@given(st.integers(1, 4), st.lists(works, max_size=12), st.lists(works, max_size=12), st.floats(0.01, 60.0))
def test_whoever_is_let_in_waits_no_longer_than_the_target(
    slots: int, running: list[Work], waiting: list[Work], target_s: float
) -> None:
    admission = taught(slots=slots, target_s=target_s)
    views = [Running(work, made=0) for work in running[:slots]]
    decision = admission.decide(views, waiting)
    wait_s = admission.wait_s(views, waiting)
    if decision.act == "refuse":
        assert waiting and wait_s > target_s
        assert decision.retry_after_s == pytest.approx(wait_s - target_s)
    elif waiting:
        assert wait_s <= target_s


@given(st.lists(works, min_size=1, max_size=8))
def test_one_more_ahead_never_shortens_the_wait(waiting: list[Work]) -> None:
    admission = taught()
    running = [Running(Work(10, 100), made=3)]
    assert admission.wait_s(running, waiting) >= admission.wait_s(running, waiting[:-1])


def test_a_rate_from_elsewhere_holds_until_one_was_measured_here() -> None:
    admission = TextAdmission(1, 5.0)
    admission.expect(10.0)
    assert admission.service_s == pytest.approx(PRIOR_ANSWER_TOKENS / 10)
    admission.learn_decode(10, 0.1, 1)
    assert admission.token_s == pytest.approx(0.01)
    admission.expect(None)
    assert admission.token_s == pytest.approx(0.01)


def test_targets_and_slots_are_above_zero() -> None:
    for slots, target_s in ((0, 1.0), (1, 0.0), (1, -1.0)):
        with pytest.raises(ValueError):
            TextAdmission(slots, target_s)


def test_the_prefill_batch_is_sized_to_stop_in_time() -> None:
    for rate in (40.0, 90.0, 250.0, 700.0):
        assert prefill_batch(rate) / rate <= STOP_S
    assert prefill_batch(1e6) == MOST_BATCH_TOKENS
