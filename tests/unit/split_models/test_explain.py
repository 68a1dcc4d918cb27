"""What the arms would cost at other bandwidths: the planner's own numbers, and laws that any such picture obeys."""

from __future__ import annotations

from math import inf

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from netprobe.view import UNKNOWN_LINK, LinkView
from protocol.decode import decode, encode
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.explain import (
    MBIT,
    REPORT_SCHEMA,
    SplitReport,
    bandwidths,
    best_at,
    curves,
    now,
    shown,
    spans,
)

CLOUD, CUT = Arm("cloud", link="cloud"), Arm("cut", "007", "int8", "cloud")
COSTS = (
    ArmCost(DEVICE_ARM, device_s=0.4),
    ArmCost(CUT, device_s=0.1, up_bytes=20_000, down_bytes=400, server_s=0.02, loaded=False),
    ArmCost(CLOUD, device_s=0.0, up_bytes=200_000, down_bytes=400, server_s=0.03),
)
KNOWN = LinkView(floor_s=0.02, bytes_per_s=2 * MBIT, rtt_s=0.02, samples=5, age_s=3.0)
REPORT = SplitReport(
    schema=REPORT_SCHEMA, model="det", digest="ab" * 32, held="device", reason="", device_wait_s=0.0,
    links=(shown("cloud", KNOWN),), costs=COSTS, policy=SplitPolicy(),
)  # fmt: skip
RATES = bandwidths(0.1 * MBIT, 1000 * MBIT, 81)


def test_a_report_survives_its_wire_form_also_for_a_link_nobody_used() -> None:
    silent = evolve(REPORT, links=(shown("cloud", UNKNOWN_LINK),))
    for report in (REPORT, silent):
        assert decode(SplitReport, encode(report), what="report", max_bytes=1 << 20) == report
    assert [entry.arm for entry in now(silent) if not entry.excluded] == [DEVICE_ARM]


def test_now_is_what_the_planner_says() -> None:
    ranking = now(REPORT)
    assert {entry.arm: entry.excluded for entry in ranking} == {DEVICE_ARM: "", CLOUD: "", CUT: "not loaded"}
    cloud = next(entry for entry in ranking if entry.arm == CLOUD)
    assert cloud.predicted_s == pytest.approx(0.02 + (200_000 + 400) / (2 * MBIT) + 0.03)


def test_the_best_arm_moves_from_the_device_over_the_cut_to_the_cloud() -> None:
    found = spans(best_at(curves(REPORT, RATES)), RATES)
    assert [arm for arm, _, _ in found] == [DEVICE_ARM, CUT, CLOUD]
    assert found[0][1] == RATES[0] and found[-1][2] == RATES[-1]
    # device and cut meet where the cut's bytes take what the device would: 0.4 = 0.12 + 0.02 + 20,400 B / rate
    assert found[0][2] <= 20_400 / 0.26 <= found[1][1]


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=6),
    st.floats(0, 0.3),
)
def test_more_bandwidth_never_costs_and_the_best_is_the_least(
    arms: list[tuple[float, int, float]], floor_s: float
) -> None:
    cuts = [
        ArmCost(Arm("cut", f"{k:03d}", "raw", "cloud"), device_s=d, up_bytes=up, server_s=s)
        for k, (d, up, s) in enumerate(arms)
    ]
    drawn = curves(evolve(REPORT, costs=(COSTS[0], *cuts)), RATES, floor_s)
    assert all(a >= b - 1e-12 for curve in drawn for a, b in zip(curve.seconds, curve.seconds[1:], strict=False))
    by_arm = {curve.arm: curve.seconds for curve in drawn}
    for place, arm in enumerate(best_at(drawn)):
        assert arm is not None
        assert by_arm[arm][place] == min(seconds[place] for seconds in by_arm.values()) < inf


def test_what_policy_forbids_is_drawn_and_never_best() -> None:
    private = evolve(REPORT, policy=SplitPolicy(raw_input_leaves=False))
    drawn = curves(private, RATES)
    assert {curve.arm: curve.excluded for curve in drawn}[CLOUD] == "raw input may not leave"
    assert CLOUD not in best_at(drawn)


@pytest.mark.parametrize("ends", [(0.0, 1.0, 5), (2.0, 1.0, 5), (1.0, 2.0, 1)])
def test_bandwidths_need_two_ends(ends: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="two bandwidths"):
        bandwidths(*ends)
