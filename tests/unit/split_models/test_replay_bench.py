"""What the replay bench draws for its requests: of the runs that were measured, the same for the same seed."""

from __future__ import annotations

from benchmarks.split_replay.live import drawn
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.replay import LINK

CUT, CLOUD = Arm("cut", "007", "int8", LINK), Arm("cloud", link=LINK)
PLANNED = (ArmCost(DEVICE_ARM, 0.4), ArmCost(CUT, 0.1, 40_000, 1_000, 0.02, rest_s=0.3), ArmCost(CLOUD, 0.0, 100_000))
RUNS = {
    DEVICE_ARM: [ArmCost(DEVICE_ARM, seconds) for seconds in (0.3, 0.5, 0.9)],
    CUT: [ArmCost(CUT, 0.2, 41_000, 1_100, 0.05)],
}


def test_requests_take_measured_runs_and_what_was_not_run_costs_what_was_planned() -> None:
    took = drawn(RUNS, PLANNED, 1)
    costs = [took(number, DEVICE_ARM) for number in range(60)]
    assert set(costs) == set(RUNS[DEVICE_ARM])
    assert took(0, CLOUD) == PLANNED[2]
    assert took(0, CUT) == ArmCost(CUT, 0.2, 41_000, 1_100, 0.05, rest_s=0.3)
    assert [took(number, DEVICE_ARM) for number in range(60)] == costs, "asked again, a request costs the same"
    assert [drawn(RUNS, PLANNED, 1)(number, DEVICE_ARM) for number in range(60)] == costs
    assert [drawn(RUNS, PLANNED, 2)(number, DEVICE_ARM) for number in range(60)] != costs
