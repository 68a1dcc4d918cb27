"""Where an answer begins: tables of views and policies."""

from __future__ import annotations

from math import inf

import pytest
from attrs import evolve

from gateway.context import Constraints, constraints_of
from gateway.dispatch import patience, plan
from gateway.targets import TargetView
from protocol.policy import DispatchPolicy, Policy, PrivacyPolicy, RoutingPolicy

DEVICE = TargetView("device", local=True)
CLOUD = TargetView("cloud", local=False)
PEER = TargetView("peer", local=False, queue_s=0.5)
ANY = Constraints()


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
        (evolve(CLOUD, ttft_s=(0.1, 0.1, 0.1, 0.1)), 5.0),
        (evolve(CLOUD, ttft_s=(0.1, 0.1, 0.1, 0.1, 0.1)), 0.25),
        (evolve(CLOUD, ttft_s=(0.5, 0.6, 0.7, 0.8, 1.0)), 1.5),
        (evolve(CLOUD, ttft_s=(0.5, 0.6, 0.7, 0.8, 90.0)), 5.0),
        (evolve(CLOUD, ttft_s=(0.5, 0.6, 0.7, 0.8, inf)), 5.0),
        (DEVICE, 5.0),
        (evolve(DEVICE, prefill_s=0.5, queue_s=3.0), 26.0),
    ],
)
def test_patience_follows_what_was_seen(view: TargetView, seconds: float) -> None:
    assert patience(view, 20, 5.0) == pytest.approx(seconds)
