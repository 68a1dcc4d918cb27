"""Where an answer begins: tables of views and policies."""

from __future__ import annotations

from math import inf

import pytest
from attrs import evolve

from gateway.context import Constraints, constraints_of
from gateway.dispatch import dispatch, patience, plan
from gateway.dispatch_table import EVERY_LENGTH, DispatchTable
from gateway.dispatch_values import Worth
from gateway.targets import TargetView
from gateway.ttft import ecdf
from protocol.policy import DispatchPolicy, Policy, PrivacyPolicy, RoutingPolicy

DEVICE = TargetView("device", local=True)
CLOUD = TargetView("cloud", local=False)
PEER = TargetView("peer", local=False, queue_s=0.5)
ANY = Constraints()


def seen(*ttfts_s: float) -> TargetView:
    """The cloud with this history."""
    return evolve(CLOUD, ttft=ecdf(ttfts_s), seen=len(ttfts_s))


def names(targets: list[TargetView], policy: DispatchPolicy, constraints: Constraints = ANY) -> list[tuple[str, float]]:
    return list(plan(20, targets, constraints, policy, 5.0).starts)


@pytest.mark.parametrize(
    ("start", "starts"),
    [
        ("device", [("device", 0.0), ("cloud", 5.0), ("peer", 10.0)]),
        ("cloud", [("cloud", 0.0), ("peer", 5.0), ("device", 10.0)]),
        ("race", [("device", 0.0), ("cloud", 0.0), ("peer", 5.0)]),
    ],
)
def test_order_of_starts_by_policy(start: str, starts: list[tuple[str, float]]) -> None:
    assert names([CLOUD, PEER, DEVICE], DispatchPolicy(start=start)) == starts  # type: ignore[arg-type]


def test_local_only_leaves_nothing_remote_in_the_plan() -> None:
    constraints = constraints_of(Policy(privacy=PrivacyPolicy(local_only=True)))
    for start in ("device", "cloud", "race"):
        assert names([CLOUD, DEVICE], DispatchPolicy(start=start), constraints) == [("device", 0.0)]  # type: ignore[arg-type]
    nothing = plan(20, [CLOUD], constraints, DispatchPolicy(), 5.0)
    assert nothing.starts == ()
    assert "local_only" in nothing.reason


def test_routing_targets_bound_the_plan() -> None:
    constraints = constraints_of(Policy(routing=RoutingPolicy(targets=("device", "cloud"))))
    assert names([CLOUD, PEER, DEVICE], DispatchPolicy(), constraints) == [("device", 0.0), ("cloud", 5.0)]


def test_a_resting_target_is_skipped_unless_all_rest() -> None:
    tired = evolve(CLOUD, up=False)
    chosen = plan(20, [tired, DEVICE], ANY, DispatchPolicy(start="cloud"), 5.0)
    assert chosen.starts == (("device", 0.0),)
    assert "cloud" in chosen.reason
    assert names([tired, evolve(DEVICE, up=False)], DispatchPolicy(start="cloud")) == [("cloud", 0.0), ("device", 5.0)]


@pytest.mark.parametrize(
    ("view", "seconds"),
    [
        (CLOUD, 5.0),
        (seen(0.1, 0.1, 0.1, 0.1), 5.0),
        (seen(0.1, 0.1, 0.1, 0.1, 0.1), 0.25),
        (seen(0.5, 0.6, 0.7, 0.8, 1.0), 1.5),
        (seen(0.5, 0.6, 0.7, 0.8, 90.0), 5.0),
        (seen(0.5, 0.6, 0.7, 0.8, inf), 5.0),
        (DEVICE, 5.0),
        (evolve(DEVICE, prefill_s=0.5, queue_s=3.0), 26.0),
    ],
)
def test_patience_follows_what_was_seen(view: TargetView, seconds: float) -> None:
    assert patience(view, 20, 5.0) == pytest.approx(seconds)


SERVER = seen(0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0)
QUICK = evolve(DEVICE, prefill_s=0.01)
BOUNDED = DispatchTable("device_constrained", 0.3, 100, 0.5, 0.9, 1.0)
SPARED = DispatchTable("server_constrained", 0.3, 100, 0.5)


def starts(
    table: DispatchTable | None, tokens: int, views: list[TargetView], draw: float = 0.0, constraints: Constraints = ANY
) -> list[tuple[str, float]]:
    return list(dispatch(table, tokens, views, constraints, draw, DispatchPolicy(budget_ratio=0.3), 5.0).starts)


@pytest.mark.parametrize(
    ("table", "tokens", "draw", "expected"),
    [
        (BOUNDED, 99, 0.9, [("cloud", 0.0), ("device", 0.0)]),
        (BOUNDED, 100, 0.4, [("cloud", 0.0), ("device", 0.0)]),
        (BOUNDED, 100, 0.6, [("cloud", 0.0), ("device", 0.9)]),
        (BOUNDED, 101, 0.0, [("cloud", 0.0), ("device", 0.9)]),
        (evolve(BOUNDED, protected_ratio=0.2), 101, 0.5, [("cloud", 0.0), ("device", 5.0)]),
        (SPARED, 99, 0.9, [("device", 0.0), ("cloud", 5.0)]),
        (SPARED, 100, 0.6, [("device", 0.0), ("cloud", 0.0)]),
        (SPARED, 101, 0.0, [("device", 0.0), ("cloud", 0.0)]),
    ],
)
def test_a_budget_decides_by_length(
    table: DispatchTable, tokens: int, draw: float, expected: list[tuple[str, float]]
) -> None:
    assert starts(table, tokens, [QUICK, SERVER], draw) == expected


def test_a_device_that_cannot_be_first_is_not_started_at_once() -> None:
    busy = evolve(QUICK, queue_s=30.0)
    found = dispatch(BOUNDED, 10, [busy, SERVER], ANY, 0.0, DispatchPolicy(budget_ratio=0.3), 5.0)
    assert found.starts == (("cloud", 0.0), ("device", 0.9))
    assert "cannot be first" in found.reason
    # Without history nothing is known of the server's slowest answers.
    assert starts(BOUNDED, 10, [busy, CLOUD]) == [("cloud", 0.0), ("device", 0.0)]


def test_a_budget_never_leaves_the_allowed_set() -> None:
    here = constraints_of(Policy(privacy=PrivacyPolicy(local_only=True)))
    for table in (BOUNDED, SPARED, None):
        for tokens in (1, 100, 1000):
            assert starts(table, tokens, [QUICK, SERVER, PEER], constraints=here) == [("device", 0.0)]
            there = starts(table, tokens, [QUICK, SERVER, PEER], constraints=Constraints(targets=frozenset({"cloud"})))
            assert there == [("cloud", 0.0)]


def test_of_several_servers_the_soonest_is_in_the_plan_and_the_others_wait() -> None:
    slow = evolve(seen(3.0, 4.0, 5.0, 5.0, 5.0), name="peer")
    found = starts(BOUNDED, 10, [slow, QUICK, SERVER])
    assert [name for name, _ in found] == ["cloud", "device", "peer"]
    assert found[2][1] == pytest.approx(5.0)


def test_a_full_budget_and_none_are_told_apart_in_the_reason() -> None:
    every = dispatch(evolve(BOUNDED, boundary_tokens=EVERY_LENGTH), 9, [QUICK, SERVER], ANY, 0.0, DispatchPolicy(), 5.0)
    assert "any length is short" in every.reason
    assert every.regime == "device_constrained"
    preferred = dispatch(None, 9, [QUICK, SERVER], ANY, 0.0, DispatchPolicy(start="cloud"), 5.0)
    assert preferred.regime == "cloud"


WORTH = evolve(SPARED, worth=Worth(0.01, 0.5, 20.0, 0.1), tail_wait_s=0.8)


@pytest.mark.parametrize(
    ("tokens", "queue_s", "expected"),
    [
        # Alone in 0.3 s: a server of 0.2 s and more saves less than 10 ms a token.
        (30, 0.0, [("device", 0.0), ("cloud", 5.0)]),
        # Behind a queue the same prompt is worth it, and the device is left to those that get no server.
        (30, 9.0, [("cloud", 0.0), ("device", 0.8)]),
        # Longest waits are for the tail's share of the budget, whatever they save per token.
        (3000, 0.0, [("cloud", 0.0), ("device", 0.8)]),
    ],
)
def test_a_server_token_goes_where_it_saves_most(
    tokens: int, queue_s: float, expected: list[tuple[str, float]]
) -> None:
    assert starts(WORTH, tokens, [evolve(QUICK, queue_s=queue_s), SERVER]) == expected


def test_an_idle_device_joins_the_server_at_once_only_where_that_helps_more_than_it_costs_others() -> None:
    # 0.6 s alone: against a server of 0.2-2 s that helps by some 40 ms.
    wanted, idle = (evolve(WORTH, worth=Worth(0.0, 0.5, 20.0, mean_s)) for mean_s in (1.0, 0.0))
    assert starts(wanted, 60, [QUICK, SERVER]) == [("cloud", 0.0), ("device", 0.8)]
    assert starts(idle, 60, [QUICK, SERVER]) == [("device", 0.0), ("cloud", 0.0)]
