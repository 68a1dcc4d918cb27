"""What a probe knows, turned into ages and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netprobe.probe import LinkProbe
from protocol.clock import FakeClock
from protocol.decode import decode, encode
from protocol.events import Direction, TransferSample
from protocol.link_memory import PastLink, PastRoundTrip, PastTransfer, PastWay

TRANSFERS = st.lists(
    st.tuples(
        st.sampled_from(["up", "down"]), st.integers(100, 5_000_000), st.floats(0.001, 60.0), st.floats(0.0, 100.0)
    ),
    max_size=40,
)


def fed(transfers: list[tuple[Direction, int, float, float]]) -> tuple[LinkProbe, FakeClock]:
    clock = FakeClock(1000.0)
    probe = LinkProbe(clock)
    for direction, size_bytes, seconds, pause_s in transfers:
        clock.advance(seconds + pause_s)
        probe.add(
            TransferSample(
                at_s=clock(), link="cloud", direction=direction, size_bytes=size_bytes, seconds=seconds,
                idle_before_s=pause_s,
            )
        )  # fmt: skip
    return probe, clock


@settings(max_examples=100)
@given(transfers=TRANSFERS, older_s=st.floats(0.0, 1e7), boot_s=st.floats(0.0, 1e6))
def test_a_probe_after_a_restart_predicts_what_the_one_before_did(
    transfers: list[tuple[Direction, int, float, float]], older_s: float, boot_s: float
) -> None:
    before, _ = fed(transfers)
    document = decode(PastLink, encode(before.past("cloud")), what="past")
    after = LinkProbe(FakeClock(boot_s))
    after.recall("cloud", document, older_s)
    for direction in ("up", "down"):
        old, new = before.view("cloud", direction), after.view("cloud", direction)
        assert new.samples == old.samples
        assert new.residuals == pytest.approx(old.residuals, rel=1e-3, abs=1e-6)
        assert new.rtt_s == (old.rtt_s and pytest.approx(old.rtt_s, abs=1e-6))
        if old.samples:
            assert new.age_s == pytest.approx(old.age_s + older_s, abs=1e-3)
            assert new.seconds_for(100_000) == pytest.approx(old.seconds_for(100_000), rel=0.05)


def test_what_was_recalled_is_in_doubt_until_the_next_transfer() -> None:
    """So that the next request looks at the link, whatever it did when the device was last there."""
    probe, clock = fed([("up", 100_000, 0.2, 0.0), ("up", 200_000, 0.4, 0.0)])
    assert not probe.view("cloud").in_doubt
    probe.recall("cloud", probe.past("cloud"), 3600.0)
    assert probe.view("cloud").in_doubt
    probe.add(TransferSample(at_s=clock(), link="cloud", direction="up", size_bytes=150_000, seconds=0.3))
    assert not probe.view("cloud").in_doubt


def test_what_was_recalled_is_all_that_is_known() -> None:
    probe, _ = fed([("down", 100_000, 0.2, 0.0), ("up", 100, 0.05, 0.0)])
    probe.recall("cloud", PastLink((PastWay("up", (PastTransfer(50_000, 0.5, 3.0),)),)))
    assert probe.view("cloud", "down").samples == 0
    assert probe.view("cloud").rtt_s is None
    assert (probe.view("cloud").samples, probe.view("cloud").age_s) == (1, pytest.approx(3.0))


def test_an_old_window_serves_until_a_transfer_contradicts_it() -> None:
    before, _ = fed([("up", size, 0.05 + size / 1e6, 0.0) for size in (20_000, 200_000, 80_000, 400_000)])
    after = LinkProbe(FakeClock(5.0))
    after.recall("cloud", before.past("cloud"), 30 * 86_400.0)
    assert after.view("cloud").seconds_for(100_000) == pytest.approx(0.15, rel=0.01)
    after.add(TransferSample(at_s=5.0, link="cloud", direction="up", size_bytes=100_000, seconds=1.5))
    assert after.view("cloud").samples == 1
    assert after.view("cloud").seconds_for(100_000) == pytest.approx(1.5)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_transfers_that_cannot_be_are_left_out(seconds: float) -> None:
    probe = LinkProbe(FakeClock(5.0))
    trip = PastRoundTrip(seconds if seconds else math.nan, 0.0, 0.0, 3, 1.0)
    probe.recall("cloud", PastLink((PastWay("up", (PastTransfer(50_000, seconds, 3.0),), (seconds, 2.0)),), trip))
    assert probe.view("cloud").samples == 0
    assert probe.view("cloud").rtt_s is None


def test_connections_anew_over_the_same_way_forget_only_what_was_unfinished() -> None:
    probe, clock = fed([("up", 100_000, 0.2, 0.0)])
    probe.add(
        TransferSample(
            at_s=clock(), link="cloud", direction="up", size_bytes=100_000, seconds=9.0, complete=False
        )
    )  # fmt: skip
    assert probe.view("cloud").seconds_for(100_000) == pytest.approx(9.0)
    probe.renewed("cloud")
    assert probe.view("cloud").under_way is None
    assert probe.view("cloud").seconds_for(100_000) == pytest.approx(0.2)
