"""The laws of the planner and the switch."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from netprobe.view import UNKNOWN_LINK, LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.planner import DOWN, Ranked, exploration, explore_now, link_seconds, propose, worth_a_look
from split_models.switch import Held, hold

CLOUD = Arm("cloud", link="cloud")
CUT = Arm("cut", "007", "int8", "cloud")
RAW_CUT = Arm("cut", "007", "raw", "cloud")
POLICY = SplitPolicy()

COSTS = (
    ArmCost(DEVICE_ARM, device_s=0.5),
    ArmCost(CUT, device_s=0.1, up_bytes=300_000, down_bytes=1_000, server_s=0.03, error_ratio=0.004),
    ArmCost(RAW_CUT, device_s=0.1, up_bytes=1_200_000, down_bytes=1_000, server_s=0.03),
    ArmCost(CLOUD, device_s=0.0, up_bytes=150_000, down_bytes=200, server_s=0.05),
)


def link(bytes_per_s: float, floor_s: float = 0.01, samples: int = 10) -> dict[str, LinkView]:
    return {"cloud": LinkView(floor_s=floor_s, bytes_per_s=bytes_per_s, rtt_s=None, samples=samples, age_s=0.1)}


costs = st.lists(
    st.builds(
        ArmCost,
        arm=st.builds(Arm, st.just("cut"), st.sampled_from(["001", "002", "003"]), st.just("int8"), st.just("cloud")),
        device_s=st.floats(0.001, 2.0),
        up_bytes=st.integers(1, 10_000_000),
        down_bytes=st.integers(0, 1_000_000),
        server_s=st.floats(0.0, 1.0),
    ),
    max_size=6,
).map(lambda cuts: [COSTS[0], COSTS[3], *cuts])
rates = st.floats(1e2, 1e10)


@given(costs, rates)
def test_never_worse_than_the_best_endpoint(found: list[ArmCost], rate: float) -> None:
    proposal = propose(found, link(rate), 0.0, POLICY)
    ends = [entry.predicted_s for entry in proposal.ranking if entry.arm.kind != "cut"]
    assert proposal.predicted_s <= min(ends)


@given(costs, rates, st.floats(1.0, 1e4))
def test_a_faster_uplink_never_makes_the_optimum_send_less(found: list[ArmCost], rate: float, faster: float) -> None:
    up = {cost.arm: cost.up_bytes + cost.down_bytes for cost in found}
    unique = [cost for index, cost in enumerate(found) if cost.arm not in {c.arm for c in found[:index]}]
    slow = propose(unique, link(rate), 0.0, POLICY)
    fast = propose(unique, link(rate * faster), 0.0, POLICY)
    slow_bytes = next(c.up_bytes + c.down_bytes for c in unique if c.arm == slow.arm)
    fast_bytes = next(c.up_bytes + c.down_bytes for c in unique if c.arm == fast.arm)
    assert fast_bytes >= slow_bytes or abs(slow.predicted_s - fast.predicted_s) < 1e-9
    assert up


@given(costs, st.sampled_from([0.0, -1.0]))
def test_zero_bandwidth_means_device(found: list[ArmCost], rate: float) -> None:
    assert propose(found, link(rate), 0.0, POLICY).arm == DEVICE_ARM


@given(costs)
def test_an_unknown_link_means_device(found: list[ArmCost]) -> None:
    assert propose(found, {}, 0.0, POLICY).arm == DEVICE_ARM
    assert propose(found, {"cloud": UNKNOWN_LINK}, 0.0, POLICY).arm == DEVICE_ARM


def test_infinite_bandwidth_and_a_fast_cloud_mean_cloud() -> None:
    fast = [*COSTS[:3], evolve(COSTS[3], server_s=0.001)]
    assert propose(fast, link(1e15, floor_s=0.0), 0.0, POLICY).arm == CLOUD


def test_a_link_in_between_favours_the_cut_when_raw_input_may_not_leave() -> None:
    private = evolve(POLICY, raw_input_leaves=False)
    proposal = propose(COSTS, link(1e6), 0.0, private)
    assert proposal.arm == CUT
    cloud = proposal.of(CLOUD)
    assert cloud is not None and cloud.excluded == "raw input may not leave"


def test_a_cut_that_sends_an_input_again_is_no_way_around_the_ban() -> None:
    """Token ids travel beside the first layer's output when a later layer reads them, too."""
    leaking = [COSTS[0], evolve(COSTS[1], sends_input=True)]
    proposal = propose(leaking, link(1e8), 0.0, evolve(POLICY, raw_input_leaves=False))
    assert proposal.arm == DEVICE_ARM
    assert [entry.excluded for entry in proposal.ranking if entry.arm == CUT] == ["raw input may not leave"]
    assert propose(leaking, link(1e8), 0.0, POLICY).arm == CUT


def test_codecs_and_errors_are_bounded_by_policy() -> None:
    policy = evolve(POLICY, raw_input_leaves=False, codecs=("raw",))
    assert propose(COSTS, link(1e8), 0.0, policy).arm == RAW_CUT
    strict = evolve(POLICY, raw_input_leaves=False, max_error_ratio=0.001)
    assert propose(COSTS, link(1e8), 0.0, strict).arm == RAW_CUT


def test_a_deadline_excludes_what_comes_late() -> None:
    cheap_cloud = [COSTS[0], evolve(COSTS[3], joules=0.0), evolve(COSTS[1], joules=9.0)]
    by_energy = evolve(POLICY, objective={"joules": 1.0}, deadline_s=0.4)
    device_late = propose([evolve(COSTS[0], joules=0.0), *cheap_cloud[1:]], link(1e6), 0.0, by_energy)
    assert device_late.arm == CLOUD
    hopeless = evolve(POLICY, deadline_s=0.001)
    assert propose(COSTS, link(1e6), 0.0, hopeless).arm == CLOUD  # the soonest, since none is in time


def test_weights_choose_between_seconds_and_server_seconds() -> None:
    assert propose(COSTS, link(1e8), 0.0, POLICY).arm == CLOUD
    frugal = evolve(POLICY, objective={"seconds": 1.0, "server_seconds": 100.0})
    assert propose(COSTS, link(1e8), 0.0, frugal).arm == DEVICE_ARM


def test_a_busy_device_sends_work_away() -> None:
    assert propose(COSTS, link(4e5), 0.0, POLICY).arm == CLOUD
    assert propose(COSTS, link(2.5e5), 0.0, POLICY).arm == DEVICE_ARM
    assert propose(COSTS, link(2.5e5), 1.0, POLICY).arm == CLOUD


def test_an_unloaded_arm_is_wanted_and_never_chosen() -> None:
    unloaded = [COSTS[0], evolve(COSTS[1], loaded=False)]
    proposal = propose(unloaded, link(1e8), 0.0, POLICY)
    assert proposal.arm == DEVICE_ARM
    assert proposal.wanted == CUT


def test_the_way_down_counts() -> None:
    both = {**link(1e8, 0.0), "cloud" + DOWN: LinkView(0.0, 1e3, None, 5, 0.1)}
    assert link_seconds(COSTS[1], both) == pytest.approx(300_000 / 1e8 + 1.0)
    assert link_seconds(COSTS[1], link(1e8, 0.0)) == pytest.approx(301_000 / 1e8)
    assert link_seconds(COSTS[0], {}) == 0.0


def test_small_frames_are_predicted_by_the_round_trip() -> None:
    quiet = {"cloud": LinkView(0.0, 0.0, rtt_s=0.03, samples=0, age_s=0.1)}
    assert link_seconds(ArmCost(CLOUD, device_s=0.0, up_bytes=900, down_bytes=12), quiet) == 0.03
    assert link_seconds(COSTS[1], quiet) == inf


def test_no_arms_at_all_still_names_the_device() -> None:
    proposal = propose([], {}, 0.0, POLICY)
    assert proposal.arm == DEVICE_ARM
    assert proposal.predicted_s == inf


@given(st.integers(1, 200), st.integers(1, 50))
def test_one_silent_request_in_n_looks_at_the_link(silent: int, one_in: int) -> None:
    policy = evolve(POLICY, explore_one_in=one_in)
    assert explore_now(silent, True, link(1e6)["cloud"], policy) == (silent % one_in == 0)


def test_the_first_request_looks_at_a_new_link_and_zero_means_never() -> None:
    assert explore_now(1, False, UNKNOWN_LINK, POLICY)
    assert not explore_now(2, True, UNKNOWN_LINK, POLICY)
    assert not explore_now(1, False, UNKNOWN_LINK, evolve(POLICY, explore_one_in=0))
    assert not explore_now(20, True, link(1e6)["cloud"], evolve(POLICY, explore_one_in=0))


def test_a_link_in_doubt_is_looked_at_by_the_next_request() -> None:
    doubtful = evolve(link(1e6)["cloud"], in_doubt=True)
    assert explore_now(1, True, doubtful, POLICY)
    assert not explore_now(1, True, doubtful, evolve(POLICY, explore_one_in=0))


def test_looks_that_were_saved_follow_a_link_that_was_left() -> None:
    """At once, then at ever longer distances; without any saved, one in N as ever."""
    known = link(1e6)["cloud"]
    soon = [n for n in range(1, 20) if explore_now(n, True, known, POLICY, credit=1.0)]
    assert soon == [1, 2, 4, 8, 16]
    assert not any(explore_now(n, True, known, POLICY, credit=0.9) for n in range(1, 20))
    assert not explore_now(1, True, known, evolve(POLICY, explore_one_in=0), credit=4.0)


def test_a_larger_arm_is_worth_a_look_only_if_it_may_be_better() -> None:
    """COSTS[3] sends 150 kB; the cut sends twice as much and computes less in the cloud, more here."""
    held = ArmCost(Arm("cut", "011", "int8", "cloud"), device_s=0.2, up_bytes=10_000, down_bytes=200, server_s=0.01)
    entry = Ranked(held.arm, 0.3, 0.3, link_s=0.09)
    assert worth_a_look([held, COSTS[3]], held, entry, POLICY) == COSTS[3]
    assert worth_a_look([held, COSTS[3]], held, evolve(entry, predicted_s=0.14), POLICY) is None
    assert worth_a_look([held, evolve(COSTS[3], up_bytes=15_000)], held, entry, POLICY) is None
    assert worth_a_look([held, COSTS[3]], held, entry, evolve(POLICY, raw_input_leaves=False)) is None


def test_a_hedge_covers_a_link_that_became_very_slow() -> None:
    """While the allowance suffices the device starts beside the link, and the arm is left by the periods alone."""
    slow = [COSTS[0], evolve(COSTS[3], server_s=9.0)]
    held, proposal = Held(CLOUD), propose(slow, link(1e8), 0.0, POLICY)
    assert hold(held, proposal, POLICY).arm == DEVICE_ARM
    for period in range(1, POLICY.periods):
        held = hold(held, proposal, POLICY, covered=True)
        assert (held.arm, held.periods) == (CLOUD, period)
    assert hold(held, proposal, POLICY, covered=True).arm == DEVICE_ARM


def test_exploration_takes_the_cheapest_allowed_arm() -> None:
    assert exploration(COSTS, POLICY) == COSTS[3]
    assert exploration(COSTS, evolve(POLICY, raw_input_leaves=False)) == COSTS[1]
    assert exploration([evolve(COSTS[1], loaded=False), COSTS[2]], POLICY) == COSTS[2]
    assert exploration([COSTS[0]], POLICY) is None


# -- hysteresis ------------------------------------------------------------------------------------------------------


def run(trace: list[float], held: Held | None = None, policy: SplitPolicy = POLICY) -> list[Held]:
    """One period per rate."""
    states = [held or Held()]
    for rate in trace:
        states.append(hold(states[-1], propose(COSTS, link(rate), 0.0, policy), policy))
    return states[1:]


def switches(states: list[Held], first: Arm = DEVICE_ARM) -> int:
    arms = [first, *(state.arm for state in states)]
    return sum(a != b for a, b in pairwise(arms))


@given(st.integers(1, 8))
def test_no_switch_before_the_policys_periods(periods: int) -> None:
    states = run([1e8] * (periods + 2), policy=evolve(POLICY, periods=periods))
    assert [state.arm for state in states] == [DEVICE_ARM] * (periods - 1) + [CLOUD] * 3


def test_two_good_periods_and_a_bad_one_start_again() -> None:
    states = run([1e8, 1e8, 1e4, 1e8, 1e8])
    assert switches(states) == 0
    assert states[-1].periods == 2


@given(st.lists(st.floats(0.0, 0.99 * POLICY.ratio), min_size=1, max_size=60))
def test_never_flaps_on_noise_within_the_ratio(gains: list[float]) -> None:
    """The other arm is better by less than the ratio, again and again."""
    held = Held()
    for gain in gains:
        two = [COSTS[0], ArmCost(CUT, device_s=COSTS[0].device_s * (1 - gain), up_bytes=0)]
        held = hold(held, propose(two, link(1e15, 0.0), 0.0, POLICY), POLICY)
    assert held.arm == DEVICE_ARM


@settings(max_examples=50)
@given(st.floats(1.0, 1.2), st.integers(3, 20), st.integers(6, 20), st.data())
def test_one_switch_on_a_step(_: float, before: int, after: int, data: st.DataObject) -> None:
    noise = data.draw(st.lists(st.floats(0.9, 1.1), min_size=before + after, max_size=before + after))
    trace = [rate * n for rate, n in zip([1e4] * before + [1e7] * after, noise, strict=True)]
    states = run(trace)
    assert switches(states) == 1
    assert states[before + 1].arm == DEVICE_ARM
    assert states[before + 2].arm == CLOUD


def test_an_unknown_link_is_left_at_once() -> None:
    held = hold(Held(arm=CLOUD), propose(COSTS, {}, 0.0, POLICY), POLICY)
    assert held.arm == DEVICE_ARM
    assert held.reason == "cloud: link unknown: no transfer seen"


def test_a_link_in_trouble_is_left_at_once_and_says_why() -> None:
    troubled = propose(COSTS, link(1e9), 0.0, POLICY, {"cloud": "link dead: connection refused"})
    held = hold(Held(arm=CLOUD), troubled, POLICY)
    assert (held.arm, held.reason) == (DEVICE_ARM, "cloud: link dead: connection refused")
    assert all(entry.excluded for entry in troubled.ranking if entry.arm.link)
    assert hold(Held(arm=CLOUD), propose(COSTS, link(1e9), 0.0, POLICY, {"peer": "x"}), POLICY).arm == CLOUD


@pytest.mark.parametrize(("cloud_s", "left"), [(0.9, True), (0.65, False), (0.5, False), (0.25, False)])
def test_a_link_that_became_very_slow_is_left_at_once(cloud_s: float, left: bool) -> None:
    """Both twice and half a second behind the device: less may be noise and takes the usual periods."""
    two = [ArmCost(DEVICE_ARM, device_s=0.2), ArmCost(CLOUD, device_s=0.0, up_bytes=1_000)]
    slow = propose(two, link(1_000 / cloud_s, 0.0), 0.0, POLICY)
    held = hold(Held(arm=CLOUD), slow, POLICY)
    assert (held.arm == DEVICE_ARM) is left
    assert (held.reason == f"cloud: slow: {cloud_s:.2f} s, device 0.20 s") is left


def test_a_forbidden_or_vanished_arm_is_left_at_once() -> None:
    private = evolve(POLICY, raw_input_leaves=False)
    assert hold(Held(arm=CLOUD), propose(COSTS, link(1e9), 0.0, private), private).arm == CUT
    gone = Held(arm=Arm("cut", "099", "int8", "cloud"))
    assert hold(gone, propose(COSTS, link(1e9), 0.0, POLICY), POLICY).arm == CLOUD


def test_near_equal_candidates_do_not_starve_each_other() -> None:
    """Two cuts take turns at being best; the first candidate stays and wins after three periods."""
    held = Held()
    other = Arm("cut", "009", "int8", "cloud")
    for index in range(3):
        better, worse = (CUT, other) if index % 2 == 0 else (other, CUT)
        three = [COSTS[0], ArmCost(better, device_s=0.10), ArmCost(worse, device_s=0.11)]
        held = hold(held, propose(three, link(1e15, 0.0), 0.0, POLICY), POLICY)
    assert held.arm == CUT
