"""Wire seconds of pipelined requests, played against a link whose figures are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.frame_meter import UpMeter

OFFSET_S = 1_000.0
"""The far clock runs this much ahead."""


class Wire:
    """A link that carries one byte after another at `rate`, `delay_s` each way."""

    def __init__(self, rate: float, delay_s: float) -> None:
        self.rate, self.delay_s = rate, delay_s
        self.free_s = 0.0

    def send(self, now_s: float, size: int) -> tuple[float, float]:
        """When the far end has read it, and when the news of that is here."""
        self.free_s = max(now_s, self.free_s) + size / self.rate
        return self.free_s + self.delay_s, self.free_s + 2 * self.delay_s


@given(
    st.floats(1e4, 1e8), st.floats(1e-4, 0.2), st.lists(st.integers(1_000, 2_000_000), min_size=1, max_size=12),
    st.floats(0, 0.5),
)  # fmt: skip
def test_requests_behind_others_cost_what_they_would_alone(
    rate: float, delay_s: float, sizes: list[int], late_s: float
) -> None:
    wire, meter = Wire(rate, delay_s), UpMeter()
    meter.greeted(0.0, 2 * delay_s, delay_s + OFFSET_S)
    at, sent, news = 0, 2 * delay_s, []
    for request, size in enumerate(sizes):
        meter.began(request, size, sent, at)
        at += size
        meter.ended(request, at)
        news.append((request, size, *wire.send(sent, size)))
    for request, size, read_s, here_s in news:
        # The asker reads late; the far end's clock says when it really arrived.
        found = meter.arrived(request, here_s + late_s, read_s + OFFSET_S)
        assert found is not None
        assert found.size_bytes == size
        assert found.seconds == pytest.approx(size / rate + 2 * delay_s, rel=0.01, abs=2e-6)


def test_idle_time_and_what_is_under_way() -> None:
    meter = UpMeter()
    meter.greeted(0.0, 0.1, 0.05)
    assert meter.under_way(0.2) is None
    meter.began(1, 500, 1.0, 0)
    found = meter.under_way(1.5)
    assert found is not None
    assert (found.size_bytes, found.seconds) == (500, pytest.approx(0.5))
    meter.ended(1, 500)
    meter.arrived(1, 2.0, 1.95)
    meter.began(2, 10, 5.0, 500)
    meter.ended(2, 510)
    found = meter.arrived(2, 5.1, 5.05)
    assert found is not None
    assert found.idle_before_s == pytest.approx(3.0)
    assert meter.arrived(2, 5.2, 5.1) is None


def test_the_floor_is_that_of_small_frames() -> None:
    meter = UpMeter()
    assert meter.floor_s == 0.0
    meter.heard(0.0, 7.0)
    meter.greeted(0.0, 0.25, 7.1)
    assert meter.floor_s == 0.25
    meter.began(1, 1_000_000, 1.0, 0)
    meter.ended(1, 1_000_000)
    meter.arrived(1, 1.01, 8.0)
    assert meter.floor_s == 0.25
    meter.began(2, 100, 2.0, 1_000_000)
    meter.ended(2, 1_000_100)
    meter.arrived(2, 2.2, 9.15)
    assert meter.floor_s < 0.25


def test_given_up_requests_took_at_least_their_age() -> None:
    meter = UpMeter()
    meter.began(1, 500, 1.0, 0)
    found = meter.given_up(1, 3.0)
    assert found is not None
    assert (found.size_bytes, found.seconds) == (500, pytest.approx(2.0))
    assert meter.given_up(1, 3.0) is None
    assert meter.under_way(3.0) is None


def test_bytes_of_others_in_between_are_counted() -> None:
    meter = UpMeter()
    meter.greeted(0.0, 0.0, 0.0)
    meter.began(1, 1_000, 0.0, 0)
    meter.began(2, 100, 0.1, 500)
    meter.ended(2, 600)
    meter.ended(1, 1_100)
    meter.arrived(2, 0.6, 0.6)
    found = meter.arrived(1, 1.1, 1.1)
    assert found is not None
    assert found.size_bytes == 1_100
    assert found.seconds == pytest.approx(1.1)
