"""What is left of a transfer under way: by its pace, or by how long it has stood still."""

from __future__ import annotations

import pytest

from netprobe.view import LinkView
from protocol.events import TransferSample
from split_models.arm_cost import Arm, ArmCost
from split_models.progress import MOST_UNDER_WAY, OVERDUE, STILL_S, Progress

SIZE = 100_000
CLOUD = ArmCost(Arm("cloud", link="cloud"), device_s=0.0, up_bytes=SIZE, down_bytes=500, server_s=0.05)


def at(seconds: float, moved: int | None) -> dict[str, LinkView]:
    """The link while a transfer that began at 0 has moved so much."""
    running = TransferSample(
        at_s=seconds, link="cloud", direction="up", size_bytes=SIZE, seconds=seconds, complete=False, moved_bytes=moved
    )
    return {"cloud": LinkView(0.0, 1e6, 0.02, 10, 0.1, under_way=running)}


def test_a_transfer_that_moves_is_taken_by_its_pace() -> None:
    progress = Progress()
    found = [progress.left_s(CLOUD, at(t / 100, t * 1_000), 0.0, t / 100) for t in (2, 4, 6, 8)]
    assert found == pytest.approx([0.13, 0.11, 0.09, 0.07], abs=0.01)


def test_one_that_stands_still_is_expected_to_do_so_for_longer_the_longer_it_has() -> None:
    progress = Progress()
    found = [progress.left_s(CLOUD, at(t, 80_000), 0.0, t) or 0.0 for t in (0.08, 0.1, 0.5, 1.0, 2.0)]
    assert found[1] < 0.1, "no longer than acknowledgements may take"
    assert found[4] - found[3] == pytest.approx(OVERDUE * 1.0)
    assert progress.stands_still(0.0)
    progress.left_s(CLOUD, at(2.05, 90_000), 0.0, 2.05)
    assert not progress.stands_still(0.0)
    again = progress.left_s(CLOUD, at(2.1, 90_000), 0.0, 2.1)
    assert again is not None
    assert again < 0.2, "it moves again"


def test_an_answer_is_overdue_once_all_was_sent_and_the_far_end_had_its_time() -> None:
    progress = Progress()
    assert progress.left_s(CLOUD, at(0.1, SIZE), 0.0, 0.1) is None
    assert progress.left_s(CLOUD, at(0.15, SIZE), 0.0, 0.15) is None
    late = progress.left_s(CLOUD, at(1.1, SIZE), 0.0, 1.1)
    assert late is not None
    assert OVERDUE * (1.0 - CLOUD.server_s - STILL_S - 0.1) < late < OVERDUE


def test_where_nobody_counts_nothing_is_known() -> None:
    progress = Progress()
    assert [progress.left_s(CLOUD, at(t, None), 0.0, t) for t in (0.1, 1.0, 5.0)] == [None] * 3


def test_requests_that_never_end_are_forgotten() -> None:
    progress = Progress()
    for number in range(3 * MOST_UNDER_WAY):
        progress.left_s(CLOUD, at(0.1, 0), -float(number), 0.1)
    assert len(progress._moved) == MOST_UNDER_WAY
    progress.over(-float(3 * MOST_UNDER_WAY - 1))
    assert len(progress._moved) == MOST_UNDER_WAY - 1
