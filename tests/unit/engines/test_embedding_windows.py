"""Windows of long texts: nothing lost, none too long, and a mean of length one."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.embedding_windows import Window, joined, windows


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=4), st.integers(1, 9))
def test_every_token_is_in_one_window_in_order(texts: list[list[int]], most_tokens: int) -> None:
    parts = windows(texts, most_tokens)
    assert all(len(part.ids) <= most_tokens for part in parts)
    for number, ids in enumerate(texts):
        mine = [part for part in parts if part.text == number]
        assert [one for part in mine for one in part.ids] == ids
        assert len(mine) >= 1, "also for a text without tokens: it gets a vector or the engine's own refusal"
        sizes = [len(part.ids) for part in mine]
        assert max(sizes) - min(sizes) <= max(1, len(sizes)), "no window is a remnant of a few tokens"


def test_a_mean_weighs_windows_by_their_tokens_and_one_window_is_left_alone() -> None:
    parts = [Window(0, (1, 2, 3)), Window(0, (4,)), Window(1, (5,))]
    first, second = joined(parts, [(1.0, 0.0), (0.0, 1.0), (0.3, 0.4)], 2)
    assert first == pytest.approx((3 / sqrt(10), 1 / sqrt(10)))
    assert second == (0.3, 0.4)
