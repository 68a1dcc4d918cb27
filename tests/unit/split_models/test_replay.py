"""The replay: its link moves the trace's bytes, its oracle is never beaten without hedges, its figures are exact."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from netprobe.probe import LinkProbe
from protocol.clock import FakeClock
from protocol.errors import ConfigError
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.replay import LINK, Load, Outcome, replay, replay_fixed, replay_informed, replay_oracle
from split_models.replay_lane import Job, Lane
from split_models.replay_link import Agenda, Line, LinkTrace, Pipe
from split_models.replay_trace import read_trace

CLOUD = Arm("cloud", link=LINK)
CUT = Arm("cut", "007", "int8", LINK)
COSTS = (
    ArmCost(DEVICE_ARM, device_s=0.4),
    ArmCost(CUT, device_s=0.1, up_bytes=40_000, down_bytes=1_000, server_s=0.02),
    ArmCost(CLOUD, device_s=0.0, up_bytes=100_000, down_bytes=500, server_s=0.05),
)

rates = st.lists(st.sampled_from([0.0, 1e4, 1e5, 1e6, 1e7]), min_size=1, max_size=40).filter(any)


def trace(*up: float, step_s: float = 1.0, delay_s: float = 0.01) -> LinkTrace:
    return LinkTrace("made", step_s, up, up, (delay_s,) * len(up))


def mean(outcome: Outcome) -> float:
    return sum(outcome.latencies_s) / len(outcome.latencies_s)


@given(rates, st.floats(0.0, 100.0), st.floats(1.0, 1e8))
def test_a_transfer_ends_when_its_bytes_have_passed(up: list[float], began_s: float, size_bytes: float) -> None:
    line = Line(up, 1.0)
    ends_s = line.ends_s(began_s, size_bytes)
    assert ends_s >= began_s
    assert line.passed(ends_s) - line.passed(began_s) == pytest.approx(size_bytes, rel=1e-6, abs=1e-2)


def test_a_line_that_never_moves_never_ends() -> None:
    assert Line((0.0, 0.0), 1.0).ends_s(3.0, 1.0) == inf
    assert Line((0.0, 0.0), 1.0).when(0.0) == 0.0


@given(rates, st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(1.0, 1e6)), min_size=1, max_size=6))
def test_transfers_share_the_line_and_lose_no_byte(up: list[float], starts: list[tuple[float, float]]) -> None:
    """All that was sent is through no sooner than one transfer of the sum, begun with the first, could be."""
    agenda, line = Agenda(), Line(up, 1.0)
    pipe, ends = Pipe(line, agenda), []

    def start(size_bytes: float) -> None:
        pipe.start(size_bytes, lambda: ends.append(agenda.now_s))

    for at_s, size_bytes in starts:
        agenda.at(at_s, lambda size_bytes=size_bytes: start(size_bytes))  # type: ignore[misc]
    agenda.run()
    assert len(ends) == len(starts)
    alone_s = line.ends_s(min(at_s for at_s, _ in starts), sum(size_bytes for _, size_bytes in starts))
    assert max(ends) >= alone_s - 1e-6


def test_two_equal_transfers_take_twice_as_long_and_a_cancelled_one_makes_room() -> None:
    agenda = Agenda()
    pipe, ends = Pipe(Line((1e3,), 1.0), agenda), []
    pipe.start(1e3, lambda: ends.append(agenda.now_s))
    other = pipe.start(1e3, lambda: ends.append(-1.0))
    agenda.at(1.0, lambda: pipe.cancel(other))
    agenda.run()
    assert ends == [pytest.approx(1.5)]


def test_fixed_arms_take_what_arithmetic_says() -> None:
    link = trace(1e6)
    load = Load(1.0, 5)
    assert mean(replay_fixed(link, COSTS[0], load)) == pytest.approx(0.4)
    assert mean(replay_fixed(link, COSTS[1], load)) == pytest.approx(0.1 + 0.04 + 0.01 + 0.02 + 0.001 + 0.01)
    assert mean(replay_fixed(link, COSTS[2], load)) == pytest.approx(0.1 + 0.01 + 0.05 + 0.0005 + 0.01)


def test_a_late_answer_delays_the_requests_behind_it() -> None:
    late = replay_fixed(trace(1e6, 0.0, 0.0, 0.0, 1e6, 1e6), COSTS[2], Load(1.0, 6))
    assert late.latencies_s[1] > 3.0
    assert late.latencies_s[2] > late.latencies_s[3] > late.latencies_s[4] > 0.1


@given(rates)
def test_without_hedges_nothing_beats_the_oracle(up: list[float]) -> None:
    load = Load(0.7, 30)
    link = trace(*up)
    ours = replay(link, COSTS, SplitPolicy(hedge_ratio=0.0), load)
    oracle = replay_oracle(link, COSTS, load)
    assert len(ours.latencies_s) == len(oracle.latencies_s) == 30
    assert sum(ours.arms.values()) == 30
    assert all(o <= f + 1e-6 for f, o in zip(ours.latencies_s, oracle.latencies_s, strict=True))
    for cost in COSTS:
        fixed = replay_fixed(link, cost, load)
        assert mean(oracle) <= mean(fixed) + 1e-9


@given(rates)
def test_who_only_knows_the_past_never_beats_the_oracle(up: list[float]) -> None:
    load, link = Load(0.7, 30), trace(*up)
    informed, oracle = replay_informed(link, COSTS, load, 0.7), replay_oracle(link, COSTS, load)
    assert all(o <= f + 1e-6 for f, o in zip(informed.latencies_s, oracle.latencies_s, strict=True))


def test_who_knows_a_steady_link_takes_the_best_arm() -> None:
    for rate in (1e4, 1e5, 1e7):
        informed = replay_informed(trace(rate), COSTS, Load(1.0, 20), 1.0)
        assert informed == replay_oracle(trace(rate), COSTS, Load(1.0, 20))


@given(rates, st.floats(0.0, 1.0))
def test_hedges_keep_to_their_share_of_device_seconds(up: list[float], share: float) -> None:
    load = Load(0.7, 40)
    ours = replay(trace(*up), COSTS, SplitPolicy(hedge_ratio=share), load)
    assert ours.hedged_s <= share * load.count * COSTS[0].device_s + 1e-9
    assert ours.hedged_s == pytest.approx(ours.hedges * COSTS[0].device_s)


@given(rates, st.floats(0.0, 1.0))
def test_hedges_that_are_stopped_use_no_more_than_their_share(up: list[float], share: float) -> None:
    load = Load(0.7, 40)
    ours = replay(trace(*up), COSTS, SplitPolicy(hedge_ratio=share), load, stop_s=0.02)
    assert ours.hedged_s <= share * load.count * COSTS[0].device_s + 1e-9
    assert ours.hedged_s <= ours.hedges * COSTS[0].device_s + 1e-9


def test_a_run_that_is_stopped_makes_room_and_one_that_waits_never_runs() -> None:
    agenda, seen = Agenda(), []
    lane = Lane(agenda, 0.1)

    def submit(name: str) -> Job:
        return lane.submit(
            1.0, lambda: seen.append((name, agenda.now_s)), lambda ran_s: seen.append((name + " left", ran_s))
        )

    first, second = submit("first"), submit("second")
    submit("third")
    agenda.at(0.5, lambda: lane.cancel(second))
    agenda.at(0.5, lambda: lane.cancel(first))
    agenda.run()
    assert seen == [
        ("second left", 0.0),
        ("first left", pytest.approx(0.6)),
        ("third", pytest.approx(1.6)),
        ("third left", pytest.approx(1.0)),
    ]


def test_a_transfer_that_was_given_up_shows_how_far_it_came() -> None:
    """The link all but stops in the middle: the device answers, and what had moved holds the rate down."""
    probe = LinkProbe(FakeClock())
    link = trace(*(1e6,) * 10, *(1e3,) * 200)
    outcome = replay(link, COSTS, SplitPolicy(explore_one_in=4, hedge_ratio=1.0), Load(0.7, 20), probe, stop_s=0.02)
    given_up = probe.under_way(LINK, "up")
    assert given_up is not None and given_up.moved_bytes is not None
    assert given_up.moved_bytes < 0.2 * given_up.size_bytes
    assert probe.view(LINK, "up", 14.0).bytes_per_s < 1e5
    assert max(outcome.latencies_s) < 1.0


def test_a_hole_under_a_small_frame_is_hedged_too() -> None:
    """Nobody counts the bytes of so small a frame: that it has not been answered must be enough."""
    small = (COSTS[0], ArmCost(CUT, device_s=0.0, up_bytes=500, down_bytes=100_000, server_s=0.02))
    link = trace(*(1e6,) * 20, *(0.0,) * 20, *(1e6,) * 20)
    outcome = replay(link, small, SplitPolicy(), Load(0.7, 50), stop_s=0.02)
    assert outcome.arms[str(CUT)] > 20
    assert max(outcome.latencies_s) < 1.5


def test_a_late_cut_goes_on_from_its_head() -> None:
    """The link stops for good while a cut is held: whole again after the head, or the tail alone."""
    link = trace(*(1e6,) * 30, *(0.0,) * 30)
    policy, load = SplitPolicy(hedge_ratio=1.0, raw_input_leaves=False), Load(1.0, 40)

    def worst_s(rest_s: float | None) -> tuple[float, float]:
        cut = ArmCost(CUT, device_s=0.15, up_bytes=40_000, down_bytes=1_000, server_s=0.02, rest_s=rest_s)
        outcome = replay(link, (COSTS[0], cut), policy, load, stop_s=0.02)
        assert outcome.arms[str(CUT)] > 10
        to_the_end = replay(link, (COSTS[0], cut), policy, load)
        return max(outcome.latencies_s), to_the_end.hedged_s / max(1, to_the_end.hedges)

    (whole_s, whole_run_s), (rest_s, rest_run_s) = worst_s(None), worst_s(0.25)
    assert rest_s == pytest.approx(0.4, abs=0.02), "head and tail, one after the other, from the request's start"
    assert whole_s > rest_s + 0.1
    assert rest_run_s < whole_run_s, "a tail counts for less than a whole run"


def test_a_look_begins_when_its_request_was_answered() -> None:
    probe = LinkProbe(FakeClock())
    outcome = replay(trace(1e7), COSTS, SplitPolicy(), Load(1.0, 1), probe)
    assert (outcome.looks, outcome.arms) == (1, {"device": 1})
    taken_at_s = 10.0 - probe.view(LINK, "up", 10.0).age_s
    assert taken_at_s > outcome.latencies_s[0]


def test_a_replay_is_the_same_every_time() -> None:
    link, load = trace(1e6, 2e4, 5e5, 0.0, 3e6), Load(0.5, 200)
    assert replay(link, COSTS, SplitPolicy(), load) == replay(link, COSTS, SplitPolicy(), load)


def test_requests_take_what_they_really_cost_while_the_plan_is_made_with_what_was_learnt() -> None:
    """Every fourth device run is slow: that request is late, and no other; the plan is the same as without."""
    load = Load(1.0, 8)

    def took(number: int, arm: Arm) -> ArmCost:
        cost = next(cost for cost in COSTS if cost.arm == arm)
        return evolve(cost, device_s=0.9) if arm == DEVICE_ARM and number % 4 == 3 else cost

    late = [pytest.approx(0.9 if number % 4 == 3 else 0.4) for number in range(load.count)]
    assert list(replay_fixed(trace(1e6), COSTS[0], load, took).latencies_s) == late
    ours = replay(trace(0.0), COSTS, SplitPolicy(explore_one_in=0), load, took=took)
    assert (list(ours.latencies_s), ours.arms) == (late, {"device": 8})


def test_a_hedge_runs_as_long_as_the_device_really_takes() -> None:
    link, load = trace(*(1e6,) * 30, *(0.0,) * 10), Load(1.0, 40)
    policy = SplitPolicy(hedge_ratio=1.0)

    def seconds(device_s: float) -> float:
        real = {DEVICE_ARM: evolve(COSTS[0], device_s=device_s), CUT: COSTS[1], CLOUD: COSTS[2]}
        outcome = replay(link, COSTS, policy, load, stop_s=0.02, took=lambda _, arm: real[arm])
        assert outcome.hedges
        return max(outcome.latencies_s)

    assert seconds(0.6) == pytest.approx(seconds(0.4) + 0.2, abs=0.02)


def test_a_dead_link_leaves_everything_to_the_device() -> None:
    ours = replay(trace(0.0), COSTS, SplitPolicy(), Load(1.0, 60))
    assert ours.arms == {"device": 60}
    assert max(ours.latencies_s) == pytest.approx(0.4)


def test_traces_of_four_kinds_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text("seconds,up_bytes_per_s,down_bytes_per_s,delay_s\n0,1000,2000,0.01\n0.5,3000,4000,0.02\n")
    assert read_trace(own) == LinkTrace("own", 0.5, (1000.0, 3000.0), (2000.0, 4000.0), (0.01, 0.02))
    plain = tmp_path / "plain.csv"
    plain.write_text("8,Mbits/sec\n80,Kbits/sec\n0,bits/sec\n")
    assert read_trace(plain).up_bytes_per_s == (1e6, 1e4, 0.0)
    transfers = tmp_path / "transfers.csv"
    transfers.write_text("bitrate,chunk_size,delivery_time\n1,15,0.05\n1,8000,1.05\n1,4000,0.55\n")
    found = read_trace(transfers)
    assert found.delays_s[0] == pytest.approx(0.025)
    assert found.up_bytes_per_s[3] == pytest.approx(1e6)
    assert sum(found.up_bytes_per_s) * found.step_s == pytest.approx(1.5e6, rel=0.1)
    both = tmp_path / "both.csv"
    both.write_text("timestamp_start_dl,download,upload\nx,80,8\nx,40,0\n")
    assert read_trace(both).up_bytes_per_s == (1e6, 0.0)
    assert read_trace(both).down_bytes_per_s == (1e7, 5e6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "not a trace that is known"),
        ("8,Mbits/sec\nx,Mbits/sec\n", "row 2: 'x' is not a number"),
        ("8,Mbits/sec\n1,miles\n", "row 2: the unit"),
        ("8,Mbits/sec\n-1,Mbits/sec\n", "is not a rate"),
        ("seconds,up_bytes_per_s,down_bytes_per_s\n1,1,1\n0,1,1\n", "do not grow"),
        ("seconds,up_bytes_per_s,down_bytes_per_s\n0,1,1\n1,1,1\n5,1,1\n", "row 4: 4 s after the row before it, not 1"),
        ("chunk_size,delivery_time\n15,0.05\n", "no transfer took longer"),
    ],
)
def test_a_file_that_is_no_trace_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_trace(file)


def test_a_missing_trace_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")


def test_the_sender_knows_of_bytes_one_round_trip_after_they_left() -> None:
    agenda, seen = Agenda(), []
    pipe = Pipe(Line((1e3,), 1.0), agenda)
    moving = pipe.start(2e3, lambda: None)
    for at_s in (0.1, 0.5, 1.5, 1.9, 2.5):
        agenda.at(at_s, lambda: seen.append(pipe.acknowledged(moving, 0.2)))
    agenda.run()
    assert seen == pytest.approx([0.0, 300.0, 1300.0, 1700.0, 2000.0])
