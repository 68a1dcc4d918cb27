"""What a device begins with when its link becomes known, by its class."""

from __future__ import annotations

from attrs import evolve

from netprobe.view import UNKNOWN_LINK, LinkView
from profiles.strategy import UNCLASSED, Strategy
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.decider import SETTLING_PERIODS, Decider
from split_models.replay import Load, replay
from split_models.replay_link import LinkTrace

CLOUD, CUT = Arm("cloud", link="cloud"), Arm("cut", "007", "int8", "cloud")
KNOWN = {"cloud": LinkView(floor_s=0.01, bytes_per_s=1e6, rtt_s=None, samples=3, age_s=0.1)}
COSTS = (
    ArmCost(DEVICE_ARM, device_s=1.0),
    ArmCost(CLOUD, device_s=0.0, up_bytes=100_000, down_bytes=500, server_s=0.05),
    ArmCost(CUT, device_s=0.3, up_bytes=30_000, down_bytes=500, server_s=0.04),
)
POLICY = SplitPolicy()
SLOW = Strategy(start=("cloud", "cut"))


def test_a_slow_device_goes_over_the_link_as_soon_as_it_is_known() -> None:
    decider = Decider(0.0, lambda: ("cloud", "cut"))
    assert decider.decide(COSTS, {"cloud": UNKNOWN_LINK}, 0.0, POLICY, 0.1).arm == DEVICE_ARM
    decision = decider.decide(COSTS, KNOWN, 0.0, POLICY, 0.2)
    assert (decision.arm, decision.left) == (CLOUD, DEVICE_ARM)
    assert "to begin with" in decision.reason


def test_other_devices_wait_their_periods() -> None:
    decider = Decider(0.0)
    arms = []
    for number in range(8):
        arms.append(decider.decide(COSTS, KNOWN, 0.0, POLICY, number * POLICY.period_s).arm)
        decider.finished()
    assert arms[: POLICY.periods] == [DEVICE_ARM] * POLICY.periods
    assert arms[-1] == CLOUD


def test_only_kinds_of_the_class_are_begun_with() -> None:
    decider = Decider(0.0, lambda: ("cut",))
    assert decider.decide(COSTS, KNOWN, 0.0, POLICY, 0.1).arm == DEVICE_ARM


def test_the_beginning_comes_once_and_never_takes_a_worse_arm() -> None:
    decider = Decider(0.0, lambda: ("cloud", "cut"))
    fast = (evolve(COSTS[0], device_s=0.01), *COSTS[1:])
    assert decider.decide(fast, KNOWN, 0.0, POLICY, 0.1).arm == DEVICE_ARM
    assert decider.decide(COSTS, KNOWN, 0.0, POLICY, 0.2).arm == DEVICE_ARM


def test_a_cut_whose_head_is_not_loaded_does_not_use_up_the_beginning() -> None:
    decider = Decider(0.0, lambda: ("cloud", "cut"))
    raw = (COSTS[0], evolve(COSTS[2], loaded=False))
    assert decider.decide(raw, KNOWN, 0.0, POLICY, 0.1).arm == DEVICE_ARM
    assert decider.decide((COSTS[0], COSTS[2]), KNOWN, 0.0, POLICY, 0.2).arm == CUT


def test_a_replay_of_a_slow_device_gains_by_its_class_and_keeps_its_bounds() -> None:
    trace = LinkTrace("steady", 1.0, (1e6,) * 10, (1e6,) * 10, (0.01,) * 10)
    load = Load(2.0, 20)
    plain = replay(trace, COSTS, POLICY, load)
    classed = replay(trace, COSTS, POLICY, load, strategy=SLOW)
    assert sum(classed.latencies_s) < sum(plain.latencies_s)
    kept_home = replay(trace, COSTS, POLICY, load, strategy=evolve(SLOW, arms=("device",)))
    assert set(kept_home.arms) == {"device"}
    hedged = replay(trace, COSTS, evolve(POLICY, hedge_ratio=1.0), load, strategy=evolve(UNCLASSED, hedge_ratio=0.0))
    assert hedged.hedges == 0


def test_what_was_begun_with_is_revised_for_less_than_the_ratio_until_it_has_settled() -> None:
    def after(settled_periods: int) -> Arm:
        decider, now_s = Decider(0.0, lambda: ("cloud",)), 0.0
        decider.decide(COSTS, KNOWN, 0.0, POLICY, now_s)
        near = (*COSTS, evolve(COSTS[1], arm=Arm("cloud", link="other"), up_bytes=98_000))
        for number in range(settled_periods + 2 * POLICY.periods):
            decider.finished()
            now_s += POLICY.period_s
            costs = COSTS if number < settled_periods else near
            decider.decide(costs, {**KNOWN, "other": KNOWN["cloud"]}, 0.0, POLICY, now_s)
        return decider.held().arm

    assert after(0) == Arm("cloud", link="other"), "1 % better"
    assert after(SETTLING_PERIODS) == CLOUD
