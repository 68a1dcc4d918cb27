"""What a transfer that was given up says of its link, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netprobe.under_way import doubted, held_down, recovered
from netprobe.window import Fit
from protocol.events import TransferSample
from tests.unit.netprobe.link import Link, give_up, steady


def test_a_transfer_that_was_given_up_holds_the_rate_down_until_the_next_one_ends() -> None:
    link = Link()
    for size in (50_000, 100_000, 200_000):
        link.send(size)
    link.probe.add(
        TransferSample(at_s=link.clock(), link="cloud", direction="up", size_bytes=100_000, seconds=8.0, complete=False)
    )
    assert link.predicted(100_000) == pytest.approx(8.0)
    link.send(100_000)
    assert link.predicted(100_000) == pytest.approx(link.truth(100_000), rel=0.01)


def test_a_link_that_was_given_up_is_believed_again_in_proportion_to_how_long_it_was_bad() -> None:
    link, seen = Link(), []
    for size in (50_000, 100_000, 200_000):
        link.send(size)
    give_up(link, 2.0)
    for _ in range(6):
        seen.append(link.predicted(100_000))
        link.clock.advance(2.0)
    assert seen[0] == pytest.approx(2.0)
    assert seen == sorted(seen, reverse=True)
    assert seen[1] < 1.0, "as long without a transfer as it was seen to be bad"
    assert link.truth(100_000) < seen[-1] < 0.5
    long = Link()
    for size in (50_000, 100_000, 200_000):
        long.send(size)
    for _ in range(10):
        give_up(long, 2.0)
    long.clock.advance(2.0)
    assert long.predicted(100_000) > seen[1], "a hole that lasts is believed for longer"


@given(st.floats(0.01, 60.0), st.floats(0.0, 1e4), st.floats(0.001, 30.0))
def test_a_doubt_lies_between_the_window_and_the_transfer_that_was_given_up(
    bad_s: float, ago_s: float, seconds: float
) -> None:
    line = Fit(0.01, 1e6, 5)
    sample = TransferSample(at_s=5.0, link="cloud", direction="up", size_bytes=100_000, seconds=seconds, complete=False)
    found, held = doubted(line, sample, bad_s, ago_s), held_down(line, sample)
    assert held.bytes_per_s * (1 - 1e-9) <= found.bytes_per_s <= line.bytes_per_s * (1 + 1e-9)
    assert doubted(line, sample, bad_s, 0.0).bytes_per_s == pytest.approx(held.bytes_per_s)
    later = doubted(line, sample, bad_s, ago_s + 1.0)
    assert later.bytes_per_s >= found.bytes_per_s * (1 - 1e-9)


def test_what_was_late_by_a_ratio_is_expected_no_later_than_it_was() -> None:
    link = Link()
    steady(link)
    link.send(100_000, extra_s=0.86)
    fast = link.probe.view("cloud", "up", link.clock())
    assert fast.residuals[-1] == pytest.approx(1.0 / 0.14, rel=0.01)
    assert fast.expected is not None
    assert fast.expected[-1] == pytest.approx(fast.residuals[-1], rel=0.05), (
        "the link is expected to be as fast as it was"
    )
    link.send(100_000, extra_s=0.86)
    slow = link.probe.view("cloud", "up", link.clock())
    assert link.predicted(100_000) == pytest.approx(1.0, rel=0.05)
    assert slow.expected is not None
    assert slow.expected[-2] == pytest.approx(1.0, rel=0.05), "as slow again, and not seven times slower than slow"
    assert all(now <= then for now, then in zip(slow.expected, slow.residuals, strict=True))


def test_what_was_given_up_is_expected_to_take_what_it_would_have_taken() -> None:
    link = Link()
    steady(link)
    link.clock.advance(0.5)
    link.probe.add(
        TransferSample(
            at_s=link.clock(), link="cloud", direction="up", size_bytes=100_000, seconds=0.5, complete=False,
            moved_bytes=10_000,
        )
    )  # fmt: skip
    link.send(100_000, extra_s=0.36)
    link.send(100_000, extra_s=0.36)
    view = link.probe.view("cloud", "up", link.clock())
    assert view.expected is not None
    assert view.expected[-3] > 2.0, "it was given up after half a second, and had hardly begun"


@pytest.mark.parametrize("idle_s", [0.0, 20.0])
def test_a_slow_transfer_after_one_that_was_given_up_drops_the_window(idle_s: float) -> None:
    """The fast transfers before must not speak for the link again, even if the look at it came after a pause."""
    link = Link()
    steady(link)
    give_up(link, 4.0)
    link.rate /= 100
    link.send(100_000, idle_s=idle_s)
    assert link.probe.resets == 1
    assert link.predicted(100_000) == pytest.approx(link.truth(100_000), rel=0.01)


def test_a_fast_transfer_after_one_that_was_given_up_clears_the_link() -> None:
    link = Link()
    steady(link)
    give_up(link, 4.0)
    link.send(100_000)
    link.send(100_000, extra_s=3.0)
    assert link.probe.resets == 0
    assert link.predicted(100_000) < 0.6


def test_a_transfer_given_up_early_is_no_sign_of_a_change() -> None:
    link = Link()
    steady(link)
    give_up(link, 0.1)
    link.send(100_000, extra_s=3.0)
    assert link.probe.resets == 0


def test_a_link_that_was_slow_for_a_moment_is_likely_what_it_was_before_when_it_has_been_silent() -> None:
    link = Link()
    steady(link)
    link.rate /= 20
    for _ in range(3):
        link.send(100_000)
    now = link.probe.view("cloud")
    assert now.likely is not None
    assert min(now.likely[-3:]) > 0.5, "as slow as it was"
    shares = []
    for _ in range(4):
        link.clock.advance(20.0)
        likely = link.probe.view("cloud").likely or ()
        shares.append(sum(ratio < 0.3 for ratio in likely) / len(likely))
    assert shares == sorted(shares)
    assert shares[-1] > 0.5 > sum(ratio < 0.3 for ratio in now.likely) / len(now.likely)


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_what_lasted_long_lasts_on(lasted_s: float, ago_s: float) -> None:
    assert 0.0 <= recovered(lasted_s, ago_s) <= 1.0
    assert recovered(lasted_s, 0.0) == 0.0
    assert recovered(2.0 * lasted_s, ago_s) <= recovered(lasted_s, ago_s) <= recovered(lasted_s, 2.0 * ago_s)
