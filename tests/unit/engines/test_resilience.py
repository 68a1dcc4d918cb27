"""Breaker, retry budget and key pool: their laws over any order of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engines.breaker import Breaker, BreakerRules
from engines.key_pool import CoolDown, KeyPool
from engines.retrying import RetryBudget, RetryRules, wait_s

RULES = BreakerRules(in_a_row=3, first_s=2.0, longest_s=8.0)


def test_it_opens_after_failures_in_a_row_and_one_trial_closes_it() -> None:
    breaker = Breaker(RULES)
    for _ in range(3):
        assert breaker.wait_s(0.0) == 0.0
        breaker.began(0.0)
        breaker.failed(0.0)
    assert breaker.state(1.0) == "open" and breaker.wait_s(0.5) == 1.5
    assert breaker.state(2.0) == "half open" and breaker.wait_s(2.0) == 0.0
    breaker.began(2.0)
    assert breaker.wait_s(2.0) > 0, "one trial at a time"
    breaker.succeeded(2.1)
    assert breaker.state(2.1) == "closed" and breaker.wait_s(2.1) == 0.0


def test_failed_trials_double_the_rest_up_to_a_bound() -> None:
    breaker, now_s, rests = Breaker(RULES), 0.0, []
    for _ in range(3):
        breaker.failed(now_s)
    for _ in range(5):
        rests.append(breaker.wait_s(now_s))
        now_s += rests[-1]
        breaker.began(now_s)
        breaker.failed(now_s)
    assert rests == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_trial_that_was_given_up_makes_room_for_the_next() -> None:
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.failed(0.0)
    breaker.began(2.0)
    breaker.dropped(2.5)
    assert breaker.wait_s(2.5) == 0.0


def test_a_server_that_mostly_fails_is_left_alone_though_some_succeed() -> None:
    breaker = Breaker(BreakerRules(in_a_row=100, least=10))
    for number in range(10):
        (breaker.failed if number % 2 else breaker.succeeded)(float(number) / 10)
    assert breaker.state(1.0) == "open"


class BreakerLaws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(RULES)
        self.now_s = 0.0
        self.bad_in_a_row = 0

    @rule(seconds=st.floats(0.0, 10.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(end=st.sampled_from(["good", "bad", "dropped"]))
    def request(self, end: str) -> None:
        if self.breaker.wait_s(self.now_s) > 0:
            return
        self.breaker.began(self.now_s)
        if end == "good":
            self.breaker.succeeded(self.now_s)
            self.bad_in_a_row = 0
        elif end == "bad":
            self.breaker.failed(self.now_s)
            self.bad_in_a_row += 1
        else:
            self.breaker.dropped(self.now_s)

    @invariant()
    def it_never_rests_longer_than_its_bound_and_never_without_failures(self) -> None:
        assert self.breaker.wait_s(self.now_s) <= RULES.longest_s
        if self.bad_in_a_row == 0 and self.breaker.state(self.now_s) == "open":
            raise AssertionError("open after a success")


BreakerLaws.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestBreakerLaws = BreakerLaws.TestCase


@given(st.lists(st.booleans(), max_size=300))
def test_retries_never_exceed_what_first_attempts_earned(order: list[bool]) -> None:
    rules = RetryRules(budget_ratio=0.2, budget_most=10.0)
    budget, firsts, retries = RetryBudget(rules), 0, 0
    for first in order:
        if first:
            budget.earned()
            firsts += 1
        else:
            retries += budget.spend()
        assert 0.0 <= budget.saved <= rules.budget_most
    assert retries <= rules.budget_most + rules.budget_ratio * firsts


@given(
    failed=st.integers(1, 5),
    asked=st.none() | st.floats(0.0, 100.0),
    left_s=st.floats(0.0, 100.0),
    draw=st.floats(0.0, 1.0, exclude_max=True),
)
def test_waits_keep_to_every_bound(failed: int, asked: float | None, left_s: float, draw: float) -> None:
    rules = RetryRules()
    found = wait_s(rules, failed, asked, left_s, draw)
    if found is None:
        return
    assert failed < rules.attempts and found < left_s
    if asked is None:
        assert found <= rules.longest_s
    else:
        assert asked <= found <= 1.1 * rules.retry_after_most_s


class KeyLaws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = KeyPool(CoolDown(first_s=1.0, longest_s=8.0, refused_s=20.0))
        self.now_s = 0.0
        self.until_s: dict[str, float] = {}

    @rule(seconds=st.floats(0.0, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(keys=st.lists(st.sampled_from("abcd"), max_size=4))
    def rotated(self, keys: list[str]) -> None:
        self.pool.replace(keys)
        self.until_s = {key: self.until_s.get(key, 0.0) for key in keys}

    @rule(key=st.sampled_from("abcd"), after_s=st.floats(0.0, 50.0))
    def told_to_wait(self, key: str, after_s: float) -> None:
        self.pool.limited(key, self.now_s, after_s)
        if key in self.until_s:
            self.until_s[key] = max(self.until_s[key], self.now_s + after_s)

    @rule(key=st.sampled_from("abcd"))
    def refused(self, key: str) -> None:
        self.pool.refused(key, self.now_s)
        if key in self.until_s:
            self.until_s[key] = max(self.until_s[key], self.now_s + 20.0)

    @rule()
    def chosen(self) -> None:
        key = self.pool.choose(self.now_s)
        free = [name for name, until_s in self.until_s.items() if until_s <= self.now_s]
        assert (key in free) if free else key is None
        assert (self.pool.wait_s(self.now_s) == 0) is bool(free)


KeyLaws.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestKeyLaws = KeyLaws.TestCase


def test_keys_take_turns() -> None:
    pool = KeyPool()
    pool.replace(["a", "b", "c"])
    assert [pool.choose(0.0) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_a_limited_key_without_a_time_rests_longer_each_time() -> None:
    pool = KeyPool(CoolDown(first_s=1.0, longest_s=4.0))
    pool.replace(["a"])
    rests, now_s = [], 0.0
    for _ in range(4):
        pool.limited("a", now_s, None)
        rests.append(pool.wait_s(now_s))
        now_s += rests[-1]
    assert rests == [1.0, 2.0, 4.0, 4.0]
    pool.succeeded("a")
    pool.limited("a", now_s, None)
    assert pool.wait_s(now_s) == 1.0
