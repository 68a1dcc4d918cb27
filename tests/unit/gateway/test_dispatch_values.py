"""What a server token buys: lengths on an idle device, queues on a busy one, and an account that evens out."""

from __future__ import annotations

from math import inf

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch_plans import within_account
from gateway.dispatch_table import server_table
from gateway.dispatch_values import ValueHistory, Worth, value
from gateway.ttft import Ecdf, ecdf
from protocol.policy import DispatchPolicy
from tests.unit.gateway.test_dispatch_table import history as lengths_of

SERVER = ecdf([0.3, 0.4, 0.5, 0.9])
PREFILL_S = 0.02


def history(requests: list[tuple[int, float]], asked: bool = False) -> ValueHistory:
    """Requests of (prompt tokens, seconds of queue)."""
    found = ValueHistory()
    for tokens, queue_s in requests:
        found.add(tokens, queue_s + PREFILL_S * tokens, queue_s, asked)
    return found


def asks(plan: Worth, server: Ecdf, tokens: int, queue_s: float = 0.0, draw: float = 0.5) -> bool:
    alone_s = queue_s + PREFILL_S * tokens
    return plan.asks(value(server, tokens, alone_s), alone_s, draw)


@given(st.lists(st.integers(1, 400), min_size=4, max_size=60), st.floats(0, 1))
def test_on_an_idle_device_it_is_the_threshold_on_the_length(lengths: list[int], budget: float) -> None:
    plan = history([(tokens, 0.0) for tokens in lengths]).worth(SERVER, budget, 0.0)
    table = server_table(lengths_of(lengths), budget)
    for tokens in set(lengths):
        # Prompts that the device answers before the server ever spoke save nothing: they tie, and are left out.
        if PREFILL_S * tokens > SERVER.values_s[0] and tokens != table.boundary_tokens:
            assert asks(plan, SERVER, tokens) == table.server_starts(tokens, 0.5)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0, 30)), min_size=1, max_size=60),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_expected_spending_is_what_was_asked_for(requests: list[tuple[int, float]], budget: float, tail: float) -> None:
    seen = history(requests)
    plan = seen.worth(SERVER, budget, tail)
    assert seen.expected_ratio(SERVER, plan) == pytest.approx(budget, abs=1e-9)


def test_a_short_prompt_behind_a_queue_is_worth_more_than_a_long_one_without() -> None:
    assert value(SERVER, 20, 10.0) > value(SERVER, 400, 8.0) > value(SERVER, 20, 0.4)
    plan = history([(20, 0.0)] * 20 + [(20, 15.0)] * 10 + [(300, 0.0)] * 5).worth(SERVER, 0.1, 0.0)
    assert asks(plan, SERVER, 20, 15.0)
    assert not asks(plan, SERVER, 20)
    assert not asks(plan, SERVER, 300)


def test_the_longest_waits_are_served_first_by_the_tails_share() -> None:
    seen = history([(20, 4.0)] * 20 + [(300, 0.0)] * 5 + [(900, 0.0)])
    assert not asks(seen.worth(SERVER, 0.15, 0.0), SERVER, 900)
    protected = seen.worth(SERVER, 0.5, 0.5)
    assert asks(protected, SERVER, 900)


def test_what_was_overspent_is_taken_back_and_what_was_saved_is_spent() -> None:
    spent, saved = history([(50, 0.0)] * 300, asked=True), history([(50, 0.0)] * 300, asked=False)
    assert spent.spendable_ratio(0.3) == 0.0
    assert saved.spendable_ratio(0.3) == 1.0
    for budget in (0.0, 1.0):
        assert spent.spendable_ratio(budget) == budget
    for place in range(4_000):
        spent.add(50, 1.0, 0.0, place % 10 < 3)
    assert spent.spendable_ratio(0.3) < 0.3
    for place in range(60_000):
        spent.add(50, 1.0, 0.0, place % 10 < 3)
    assert spent.spendable_ratio(0.3) == pytest.approx(0.3, abs=0.01)


def test_the_mean_queue_follows_the_load() -> None:
    seen = history([(50, 0.0)] * 300)
    assert seen.worth(SERVER, 0.3, 0.05).mean_queue_s == 0.0
    for _ in range(300):
        seen.add(50, 9.0, 8.0, False)
    assert seen.worth(SERVER, 0.3, 0.05).mean_queue_s == pytest.approx(8.0, rel=0.05)


def test_a_prompt_without_tokens_costs_nothing_and_is_always_asked_for() -> None:
    assert value(SERVER, 0, 1.0) == inf
    assert asks(Worth(1e9, 0.0), SERVER, 0)


def test_a_burst_may_overdraw_by_some_prompts_only() -> None:
    seen = history([(50, 0.0)] * 300)
    for _ in range(400):
        seen.add(50, 90.0, 89.0, not seen.overdrawn(0.1))
    assert seen.overdrawn(0.1)
    # 10 % of 700 prompts and the credit.
    assert seen.spent_tokens == pytest.approx(50 * (0.1 * 700 + 24), rel=0.15)
    plan = evolve(server_table(lengths_of([50]), 0.1), worth=Worth(-inf, 1.0, 5.0, 40.0))
    policy = DispatchPolicy(budget_ratio=0.1)
    closed = within_account(plan, seen, policy).worth
    assert closed is not None
    assert not closed.asks(1e9, 1e9, 0.0)
    assert closed.mean_queue_s == 40.0
    assert within_account(plan, history([(50, 0.0)] * 9), policy) is plan
