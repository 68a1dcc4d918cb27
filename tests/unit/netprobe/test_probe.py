"""LinkProbe: which samples count, when a window is dropped, what a view says meanwhile."""

from __future__ import annotations

import math

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from netprobe.probe import LinkProbe
from netprobe.view import MAX_RESIDUALS
from protocol.clock import FakeClock
from protocol.events import TransferSample
from tests.unit.netprobe.link import Link, give_up, steady


def test_nothing_is_known_of_a_link_nobody_used() -> None:
    view = LinkProbe(FakeClock()).view("cloud", "up", 5.0)
    assert (view.samples, view.rtt_s, view.under_way) == (0, None, None)
    assert view.seconds_for(1) == math.inf


def test_small_frames_feed_the_round_trip_and_not_the_window() -> None:
    link = Link()
    for _ in range(5):
        link.send(200)
    view = link.probe.view("cloud", "up", link.clock())
    assert view.samples == 0
    assert view.rtt_s == pytest.approx(0.0402)


def test_a_small_frame_without_an_answer_stretches_the_round_trip_until_one_crosses() -> None:
    link = Link()
    for _ in range(5):
        link.send(200)
    usual_s = link.probe.view("cloud").rtt_s
    waiting = evolve(link.send(200), complete=False, seconds=3.0)
    running: list[TransferSample] = [waiting]
    link.probe.watch("cloud", lambda: running[0] if running else None)
    assert link.probe.view("cloud").rtt_s == 3.0
    running.clear()
    assert link.probe.view("cloud").rtt_s == pytest.approx(usual_s)
    link.probe.add(waiting)
    assert link.probe.view("cloud").rtt_s == 3.0
    link.send(200)
    assert link.probe.view("cloud").rtt_s == pytest.approx(usual_s)


def test_a_small_frame_that_was_given_up_says_nothing_of_the_rate() -> None:
    link = Link()
    steady(link)
    usual_s = link.predicted(100_000)
    for size, direction in ((200, "up"), (0, "up"), (200, "down")):
        given_up = evolve(link.send(200, direction=direction), size_bytes=size, complete=False, seconds=3.0)
        link.probe.add(given_up)
        assert link.predicted(100_000) == pytest.approx(usual_s)
        assert link.probe.under_way("cloud", direction) is None
        assert link.probe.view("cloud", "down").under_way is None


def test_a_new_connection_does_not_inherit_the_stall_of_the_old_one() -> None:
    link = Link()
    given_up = evolve(link.send(200), complete=False, seconds=3.0)
    link.probe.add(given_up)
    assert link.probe.view("cloud").rtt_s == 3.0
    link.probe.renewed("cloud")
    assert link.probe.view("cloud").rtt_s == pytest.approx(0.0402)


def test_directions_and_links_are_kept_apart() -> None:
    link = Link()
    link.send(100_000)
    assert link.probe.view("cloud", "down", link.clock()).samples == 0
    assert link.probe.view("peer", "up", link.clock()).samples == 0


def test_the_cloud_is_forgotten_when_the_interface_changes() -> None:
    link = Link()
    link.send(100_000)
    link.send(100)
    link.probe.reset("cloud")
    view = link.probe.view("cloud", "up", link.clock())
    assert (view.samples, view.rtt_s) == (0, None)


def test_the_age_grows_until_the_next_transfer() -> None:
    link = Link()
    link.send(100_000)
    link.clock.advance(30)
    assert link.probe.view("cloud", "up", link.clock()).age_s == pytest.approx(30)
    link.send(100_000)
    assert link.probe.view("cloud", "up", link.clock()).age_s == 0


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_two_jumps_the_same_way_drop_the_window(factor: float) -> None:
    link = Link()
    for size in (20_000, 200_000, 50_000, 400_000, 100_000, 300_000, 80_000, 150_000):
        link.send(size)
    assert link.probe.resets == 0
    link.rate *= factor
    link.send(300_000)
    assert link.probe.view("cloud", "up", link.clock()).in_doubt
    link.send(200_000)
    assert link.probe.resets == 1
    assert not link.probe.view("cloud", "up", link.clock()).in_doubt
    assert link.predicted(250_000) == pytest.approx(link.truth(250_000), rel=0.25)


def test_residuals_say_how_the_link_stood_to_what_was_predicted() -> None:
    link = Link()
    for size in (20_000, 200_000, 50_000):
        link.send(size)
    view = link.probe.view("cloud")
    assert len(view.residuals) == 2
    link.send(100_000, extra_s=0.14)
    assert link.probe.view("cloud").residuals[-1] == pytest.approx(2.0)


def test_residuals_outlive_a_change_point_and_not_a_change_of_the_interface() -> None:
    link = Link()
    steady(link)
    link.rate /= 20
    link.send(300_000)
    link.send(200_000)
    assert link.probe.resets == 1
    residuals = link.probe.view("cloud").residuals
    assert len(residuals) == 13
    assert min(residuals[-2:]) > 3
    link.probe.reset("cloud")
    link.send(100_000)
    assert link.probe.view("cloud").residuals == ()


def test_a_transfer_given_up_late_counts_with_what_it_had_taken_and_one_given_up_early_does_not() -> None:
    link = Link()
    steady(link)
    give_up(link, 0.05)
    assert len(link.probe.view("cloud").residuals) == 11
    give_up(link, 1.4)
    assert link.probe.view("cloud").residuals[-1] == pytest.approx(10.0)


def test_residuals_are_bounded() -> None:
    link = Link()
    for _ in range(5):
        steady(link)
    assert len(link.probe.view("cloud").residuals) == MAX_RESIDUALS


def test_one_odd_transfer_drops_nothing() -> None:
    link = Link()
    for size in (20_000, 200_000, 50_000, 400_000, 100_000, 300_000):
        link.send(size)
    link.send(100_000, extra_s=3.0)
    link.send(120_000)
    link.send(100_000, extra_s=3.0)
    assert link.probe.resets == 0
    assert link.predicted(200_000) == pytest.approx(link.truth(200_000), rel=0.3)


def test_a_change_of_size_is_no_change_of_the_link() -> None:
    link = Link(floor_s=0.2, rate=5e6)
    for _ in range(6):
        link.send(10_000)
    for _ in range(4):
        link.send(2_000_000)
    assert link.probe.resets == 0
    assert link.predicted(1_000_000) == pytest.approx(link.truth(1_000_000), rel=0.05)


def test_the_first_transfer_after_a_pause_does_not_count_while_better_is_known() -> None:
    link = Link()
    for size in (50_000, 100_000, 200_000):
        link.send(size)
    link.send(100_000, idle_s=20.0, extra_s=0.4)
    assert link.probe.view("cloud", "up", link.clock()).samples == 3
    link.send(100_000, idle_s=20.0)
    assert link.probe.view("cloud", "up", link.clock()).samples == 4


def test_after_a_long_silence_even_a_slow_first_transfer_counts() -> None:
    """The one cheap request in N that looks whether a link has recovered always comes after a pause."""
    link = Link()
    link.send(100_000)
    link.send(100_000, idle_s=120.0, extra_s=0.2)
    assert link.probe.view("cloud", "up", link.clock()).samples == 2


def test_a_transfer_under_way_lowers_the_rate_while_it_stalls() -> None:
    link = Link()
    for size in (50_000, 100_000, 200_000):
        link.send(size)
    before = link.predicted(100_000)

    def stalled() -> TransferSample:
        return TransferSample(
            at_s=link.clock(), link="cloud", direction="up", size_bytes=100_000, seconds=5.0, complete=False
        )

    link.probe.watch("cloud", stalled)
    view = link.probe.view("cloud", "up", link.clock())
    assert view.under_way is not None
    assert view.seconds_for(100_000) == pytest.approx(5.0)
    assert before < 0.2
    assert link.probe.view("cloud", "down", link.clock()).under_way is None


def test_a_transfer_under_way_that_is_on_time_changes_nothing() -> None:
    link = Link()
    for size in (50_000, 100_000, 200_000):
        link.send(size)
    before = link.predicted(100_000)
    young = TransferSample(
        at_s=link.clock(), link="cloud", direction="up", size_bytes=100_000, seconds=0.01, complete=False
    )
    link.probe.watch("cloud", lambda: young)
    assert link.predicted(100_000) == before


def moving(link: Link, seconds: float, moved_bytes: int | None) -> float:
    """Predicted seconds of 400,000 bytes while as many have been under way for `seconds`."""
    running = TransferSample(
        at_s=link.clock(), link="cloud", direction="up", size_bytes=400_000, seconds=seconds, complete=False,
        moved_bytes=moved_bytes,
    )  # fmt: skip
    link.probe.watch("cloud", lambda: running)
    return link.predicted(400_000)


def test_a_fade_inside_a_transfer_shows_long_before_the_transfer_is_late() -> None:
    link = Link()
    steady(link)
    on_time = link.predicted(400_000)
    assert moving(link, 0.24, None) == on_time
    assert moving(link, 0.24, 200_000) == pytest.approx(on_time)
    assert moving(link, 0.24, 20_000) > 1.5 * on_time


@settings(max_examples=100)
@given(seconds=st.floats(0.0, 30.0), moved=st.none() | st.integers(0, 399_999))
def test_what_is_under_way_never_promises_less_than_its_age_nor_a_faster_link(
    seconds: float, moved: int | None
) -> None:
    link = Link()
    steady(link)
    on_time = link.predicted(400_000)
    assert moving(link, seconds, moved) >= max(on_time, seconds) * (1 - 1e-9)


@settings(max_examples=100)
@given(seconds=st.floats(0.05, 5.0), moved=st.integers(0, 400_000), more=st.integers(0, 500_000))
def test_more_bytes_moved_never_lengthen_the_projection(seconds: float, moved: int, more: int) -> None:
    link = Link()
    steady(link)
    assert moving(link, seconds, moved + more) <= moving(link, seconds, moved) * (1 + 1e-9)


def test_a_far_end_that_works_long_on_what_has_arrived_does_not_slow_the_link() -> None:
    link = Link()
    steady(link)
    on_time = link.predicted(400_000)
    assert moving(link, 30.0, 400_000) == on_time
    link.probe.watch("cloud", lambda: None)
    link.probe.add(
        TransferSample(
            at_s=link.clock(), link="cloud", direction="up", size_bytes=400_000, seconds=30.0, complete=False,
            moved_bytes=400_000,
        )
    )  # fmt: skip
    assert link.predicted(400_000) == on_time
    assert len(link.probe.view("cloud").residuals) == 11


def test_a_pause_excuses_one_slow_transfer_and_not_every_one() -> None:
    """Requests every ten seconds all come after a pause: a link that became slow must show all the same."""
    link = Link()
    steady(link)
    link.rate /= 50
    link.send(100_000, idle_s=10.0)
    link.send(100_000, idle_s=10.0)
    assert link.predicted(100_000) == pytest.approx(link.truth(100_000), rel=0.01)


def test_requests_that_all_come_after_pauses_are_what_the_link_does() -> None:
    """Half again as slow is no jump: without this rule the slow ones would be excused for ever, the fast ones kept."""
    link = Link()
    steady(link)
    link.rate /= 1.5
    for size in (80_000, 100_000, 120_000, 90_000):
        link.send(size, idle_s=10.0)
    assert link.predicted(100_000) == pytest.approx(link.truth(100_000), rel=0.05)


def test_after_a_long_silence_one_transfer_that_contradicts_is_enough() -> None:
    link = Link()
    steady(link)
    link.rate *= 20
    link.send(300_000, idle_s=3600.0)
    assert link.probe.resets == 1
    assert link.predicted(300_000) == pytest.approx(link.truth(300_000), rel=0.01)


@settings(max_examples=60)
@given(waits=st.lists(st.floats(0.0, 1e5), min_size=1, max_size=8))
def test_without_transfers_the_age_grows_and_nothing_else_is_learnt(waits: list[float]) -> None:
    """Blindness: an estimator that sees past transfers only knows nothing of a link that it stopped using."""
    link = Link()
    steady(link)
    before = link.probe.view("cloud")
    for wait_s in waits:
        link.clock.advance(wait_s)
    view = link.probe.view("cloud")
    assert view.age_s == pytest.approx(before.age_s + sum(waits))
    assert evolve(view, age_s=before.age_s, likely=before.likely) == before
    assert view.likely == pytest.approx(before.likely, rel=0.01), "it was never seen otherwise"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_nonsense_is_dropped(seconds: float) -> None:
    link = Link()
    link.probe.add(TransferSample(at_s=0, link="cloud", direction="up", size_bytes=100_000, seconds=seconds))
    assert link.probe.view("cloud", "up", 1.0).samples == 0


def test_links_are_bounded() -> None:
    link = Link()
    for number in range(500):
        link.send(100_000, link=f"peer-{number}")
        link.send(100, link=f"peer-{number}")
    assert len(link.probe.views("up", link.clock())) <= 128


@settings(max_examples=100)
@given(
    samples=st.lists(
        st.tuples(st.integers(0, 1 << 32), st.floats(0, 1e5), st.floats(0, 1e4), st.booleans()), max_size=40
    ),
    size=st.integers(0, 1 << 32),
)
def test_views_are_never_negative_nor_nan(samples: list[tuple[int, float, float, bool]], size: int) -> None:
    clock = FakeClock()
    probe = LinkProbe(clock)
    for size_bytes, seconds, idle_s, complete in samples:
        clock.advance(seconds + idle_s)
        probe.add(
            TransferSample(
                at_s=clock(),
                link="cloud",
                direction="up",
                size_bytes=size_bytes,
                seconds=seconds,
                idle_before_s=idle_s,
                complete=complete,
            )
        )
        view = probe.view("cloud", "up", clock())
        assert view.floor_s >= 0 and view.bytes_per_s >= 0 and view.age_s >= 0
        predicted = view.seconds_for(size)
        assert predicted >= 0 and not math.isnan(predicted)
        assert view.seconds_for(size + 1000) >= predicted


def test_a_round_trip_of_slower_days_yields_to_a_transfer_that_was_quicker() -> None:
    """A link that only looks use sends no small frames, so nothing else would tell that it has recovered."""
    link = Link(floor_s=0.002, rate=1e8)
    link.probe.add_round_trip("cloud", 0.1, link.clock())
    for _ in range(3):
        link.send(50_000, idle_s=0.1)
    rtt_s = link.probe.view("cloud").rtt_s
    assert rtt_s is not None and rtt_s <= link.truth(50_000) + 1e-9
