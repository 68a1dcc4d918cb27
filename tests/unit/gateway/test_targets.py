"""What is remembered of targets: health, TTFT, rates, lengths."""

from __future__ import annotations

from math import inf

import pytest

from engines.fakes_text import FakeTextEngine
from gateway.targets import MAX_WATCHED, WINDOW, AnswerLengths, Target, TargetBoard
from tests.unit.gateway.streams import MODEL, target

DEVICE = target("device", FakeTextEngine())


def test_a_failed_target_rests_longer_each_time_and_a_success_ends_it() -> None:
    board = TargetBoard()
    assert board.view(DEVICE, MODEL, 0.0).up
    board.failed(DEVICE, MODEL, 10.0)
    assert [board.view(DEVICE, MODEL, at_s).up for at_s in (10.0, 10.4, 10.6)] == [False, False, True]
    board.failed(DEVICE, MODEL, 11.0)
    assert [board.view(DEVICE, MODEL, at_s).up for at_s in (11.9, 12.1)] == [False, True]
    for _ in range(40):
        board.failed(DEVICE, MODEL, 20.0)
    assert [board.view(DEVICE, MODEL, at_s).up for at_s in (49.9, 50.1)] == [False, True]
    board.started(DEVICE, MODEL, 0.3, 10)
    assert board.view(DEVICE, MODEL, 20.0).up


def test_views_hold_recent_history_only() -> None:
    board = TargetBoard()
    board.failed(DEVICE, MODEL, 0.0)
    assert board.view(DEVICE, MODEL, 0.0).ttft_s == (inf,)
    for _ in range(WINDOW):
        board.started(DEVICE, MODEL, 0.5, 100)
    view = board.view(DEVICE, MODEL, 0.0)
    assert view.ttft_s == (0.5,) * WINDOW
    assert view.prefill_s == pytest.approx(0.005)
    assert view.ttft_quantile_s(0.95) == 0.5


def test_priors_stand_until_something_was_seen() -> None:
    board = TargetBoard()
    known = Target("x", True, FakeTextEngine(), frozenset({MODEL}), tokens_per_s=10.0, prefill_tokens_per_s=50.0)
    assert (board.view(known, MODEL, 0.0).tokens_per_s, board.view(known, MODEL, 0.0).prefill_s) == (10.0, 0.02)
    board.decoded(known, MODEL, 3, 1.0)
    assert board.view(known, MODEL, 0.0).tokens_per_s == 10.0
    board.decoded(known, MODEL, 40, 2.0)
    assert board.view(known, MODEL, 0.0).tokens_per_s == 20.0


def test_models_of_one_target_are_told_apart() -> None:
    board = TargetBoard()
    board.failed(DEVICE, "other", 0.0)
    assert board.view(DEVICE, MODEL, 0.0).up
    assert not board.view(DEVICE, "other", 0.0).up


def test_peers_that_come_and_go_do_not_fill_the_memory() -> None:
    board = TargetBoard()
    for number in range(MAX_WATCHED + 50):
        board.failed(target(f"peer-{number}", FakeTextEngine()), MODEL, 0.0)
    assert len(board._watches) == MAX_WATCHED
    assert board.view(target("peer-0", FakeTextEngine()), MODEL, 0.0).up


def test_remaining_length_is_the_mean_rest_and_never_max_tokens_alone() -> None:
    lengths = AnswerLengths(prior_tokens=100.0, prior_weight=1)
    assert lengths.remaining_tokens(0, 2048) == 100.0
    assert lengths.remaining_tokens(0, 40) == 40.0
    for _ in range(99):
        lengths.add(50)
    assert lengths.remaining_tokens(10, 2048) == pytest.approx((99 * 40 + 100) / 100)
    # Longer than every answer before: only the prior is left to say.
    assert lengths.remaining_tokens(60, 2048) == 100.0


def test_a_cached_prompt_says_nothing_about_the_prefill_rate() -> None:
    board = TargetBoard()
    board.started(DEVICE, MODEL, 0.2, 1)
    assert board.view(DEVICE, MODEL, 0.0).prefill_s == 0.0
    for fresh_tokens, ttft_s in ((20, 0.2), (400, 0.8), (100, 0.4)):
        board.started(DEVICE, MODEL, ttft_s, fresh_tokens)
    assert board.view(DEVICE, MODEL, 0.0).prefill_s == pytest.approx(0.002)
