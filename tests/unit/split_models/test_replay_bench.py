"""What the requests of the replay bench cost: what they took themselves, or what the nearest run took."""

from __future__ import annotations

from benchmarks.split_replay.lived import Lived, around, as_lived, cost_of
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.arms import Spent
from split_models.costs import ENVELOPE_BYTES
from split_models.replay import LINK

CUT, CLOUD = Arm("cut", "007", "int8", LINK), Arm("cloud", link=LINK)
PLANNED = (ArmCost(DEVICE_ARM, 0.4), ArmCost(CUT, 0.1, 40_000, 1_000, 0.02, rest_s=0.3), ArmCost(CLOUD, 0.0, 100_000))


def test_a_request_costs_what_it_took_itself_or_what_the_nearest_run_took() -> None:
    runs = [Lived(number, ArmCost(DEVICE_ARM, seconds)) for number, seconds in ((0, 0.3), (1, 0.5), (7, 0.9))]
    took = as_lived(runs, PLANNED)
    assert [took(number, DEVICE_ARM).device_s for number in (0, 1, 4, 5, 30)] == [0.3, 0.5, 0.5, 0.9, 0.9]
    assert took(3, CLOUD) == PLANNED[2], "an arm that never ran costs what is planned with"


def test_a_cut_that_ran_keeps_what_its_rest_would_cost_here() -> None:
    took = as_lived([Lived(2, ArmCost(CUT, 0.2, 41_000, 1_100, 0.05))], PLANNED)
    assert took(0, CUT) == ArmCost(CUT, 0.2, 41_000, 1_100, 0.05, rest_s=0.3)


def test_runs_around_the_requests_are_nearest_to_the_first_and_to_the_last() -> None:
    before, after = ([ArmCost(DEVICE_ARM, seconds) for seconds in some] for some in ((0.1, 0.2), (0.3, 0.4)))
    took = as_lived(around(before, after, 10), PLANNED)
    assert [took(number, DEVICE_ARM).device_s for number in (0, 4, 6, 9)] == [0.2, 0.2, 0.3, 0.3]


def test_a_cost_has_the_stages_here_and_the_far_end_and_not_the_link() -> None:
    spent = Spent(0.01, 0.02, 0.03, 0.04, 5.0, 6.0, 0.05, 0.06, 7.0, 0.07, 1_000, 100)
    assert cost_of(CUT, spent) == ArmCost(CUT, 0.17, 1_000 + ENVELOPE_BYTES, 100 + ENVELOPE_BYTES, 0.11)
    assert cost_of(DEVICE_ARM, Spent(before_s=0.1), 0.25) == ArmCost(DEVICE_ARM, 0.25)
