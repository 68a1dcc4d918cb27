"""What is remembered of targets: health, TTFT, rates, lengths."""

from __future__ import annotations

from math import inf

import pytest
from attrs import evolve

from engines.fakes_text import FakeTextEngine
from engines.port import EngineLoad
from gateway.targets import MAX_WATCHED, AnswerLengths, Target, TargetBoard, offered
from gateway.ttft import WINDOW as TTFTS_KEPT
from gateway.ttft import ecdf
from profiles.rates import Slowdowns
from protocol.policy import DispatchPolicy, TokenPrice
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
    failed = board.view(DEVICE, MODEL, 0.0)
    assert (failed.ttft.failed_ratio, failed.ttft.quantile_s(0.1), failed.seen) == (1.0, inf, 1)
    for _ in range(TTFTS_KEPT):
        board.started(DEVICE, MODEL, 0.5, 100)
    view = board.view(DEVICE, MODEL, 0.0)
    assert (view.ttft, view.seen) == (ecdf([0.5] * TTFTS_KEPT), TTFTS_KEPT)
    assert view.prefill_s == pytest.approx(0.005)


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


PROFILED = Target("device", True, FakeTextEngine(), frozenset({MODEL}), prefill_tokens_per_s=100.0)


def test_a_hot_devices_first_token_is_queue_and_prefill_times_the_slow_down() -> None:
    board = TargetBoard()
    for _ in range(5):
        board.started(PROFILED, MODEL, 2.0, 200)
    assert board.view(PROFILED, MODEL, 0.0).prefill_seconds(50) == pytest.approx(0.5)
    for _ in range(5):
        board.started(PROFILED, MODEL, 6.0, 200)
    assert board.view(PROFILED, MODEL, 0.0).prefill_seconds(50) == pytest.approx(1.5)


def test_without_a_profile_the_best_run_is_a_slow_down_of_one() -> None:
    board = TargetBoard()
    for ttft_s in (0.9, 0.2, 0.2, 0.6, 0.6, 0.6):
        board.started(DEVICE, MODEL, ttft_s, 100)
    assert board.view(DEVICE, MODEL, 0.0).prefill_s == pytest.approx(0.006)


class Queued(FakeTextEngine):
    """Says how long its queue is."""

    queued_s = 0.0

    def load(self) -> EngineLoad:
        return EngineLoad(running=1, waiting=0, wait_s=self.queued_s)


def test_a_prefill_behind_a_queue_says_nothing_of_the_engine() -> None:
    engine = Queued()
    busy = Target("device", True, engine, frozenset({MODEL}), prefill_tokens_per_s=100.0)
    board = TargetBoard()
    engine.queued_s = 9.0
    for _ in range(5):
        board.view(busy, MODEL, 0.0)
        board.started(busy, MODEL, 11.0, 200)
    engine.queued_s = 0.0
    assert board.view(busy, MODEL, 0.0).prefill_seconds(200) == pytest.approx(2.0)


def test_short_prompts_are_not_taken_for_a_slow_engine() -> None:
    """Their fixed part, far above what their tokens take, would make a long prompt look ten times dearer."""
    board = TargetBoard()
    board.started(DEVICE, MODEL, 1.0, 400)
    for _ in range(5):
        board.started(DEVICE, MODEL, 0.5, 20)
        board.started(PROFILED, "profiled", 0.5, 20)
    assert board.view(DEVICE, MODEL, 0.0).prefill_seconds(400) == pytest.approx(1.0)
    assert board.view(PROFILED, "profiled", 0.0).prefill_seconds(100) == pytest.approx(1.0)


def test_models_of_one_engine_share_its_slow_down_and_engines_do_not() -> None:
    shared = Slowdowns()
    board = TargetBoard()
    llama, other = evolve(PROFILED, engine_name="llama", slowdowns=shared), evolve(PROFILED, engine_name="other")
    for _ in range(3):
        board.started(llama, MODEL, 6.0, 200)
    assert shared.factor("llama") == pytest.approx(3.0)
    assert board.view(llama, "second", 0.0).prefill_s == pytest.approx(0.03)
    assert board.view(other, MODEL, 0.0).prefill_s == pytest.approx(0.01)


def test_a_servers_prefill_has_no_slow_down() -> None:
    board = TargetBoard()
    server = target("cloud", FakeTextEngine())
    for ttft_s in (0.2, 0.6, 0.6, 0.6):
        board.started(server, MODEL, ttft_s, 100)
    assert board.view(server, MODEL, 0.0).prefill_s == pytest.approx(0.002)


def test_a_target_that_nobody_asked_yet_has_a_prior_and_a_device_has_none() -> None:
    board = TargetBoard()
    server = board.view(target("cloud", FakeTextEngine(), local=False), MODEL, 0.0)
    assert (server.seen, server.ttft.quantile_s(0.5)) == (0, 0.7)
    assert board.view(DEVICE, MODEL, 0.0).ttft.samples == 0


def test_a_source_lost_in_the_middle_says_nothing_about_first_tokens() -> None:
    board = TargetBoard()
    board.started(DEVICE, MODEL, 0.5, 100)
    board.failed(DEVICE, MODEL, 1.0, spoke=True)
    view = board.view(DEVICE, MODEL, 1.0)
    assert (view.up, view.ttft) == (False, ecdf([0.5]))


def test_losers_of_races_are_remembered_as_slower_than_that() -> None:
    board = TargetBoard()
    for _ in range(10):
        board.started(DEVICE, MODEL, 2.0, 100)
        board.outlasted(DEVICE, MODEL, 0.3)
    assert board.view(DEVICE, MODEL, 0.0).ttft.at(1.9) == 0.0


def test_the_share_of_cached_prompt_tokens_is_remembered() -> None:
    board = TargetBoard()
    board.started(DEVICE, MODEL, 0.5, 100)
    board.started(DEVICE, MODEL, 0.5, 25, 75)
    assert board.view(DEVICE, MODEL, 0.0).cached_ratio == pytest.approx(0.375)


def test_work_of_local_targets_is_counted_in_flops() -> None:
    board = TargetBoard()
    small = Target("device", True, FakeTextEngine(), frozenset({MODEL}), parameters=1e8)
    board.started(small, MODEL, 0.5, 100)
    board.work.decoded(small, 10)
    board.started(target("cloud", FakeTextEngine(), local=False), MODEL, 0.5, 100)
    assert (board.work.prefill_flops, board.work.decode_flops) == (2e10, 2e9)


def test_the_policy_sets_prices_and_says_who_may_stand_in() -> None:
    cloud = Target("cloud", False, FakeTextEngine(), frozenset({"large"}), price_in=1.0)
    device = Target("device", True, FakeTextEngine(), frozenset({"small", "large"}), weaker=frozenset({"large"}))
    strict, plain = offered([device, cloud], DispatchPolicy())
    assert (strict.models, plain) == (frozenset({"small"}), cloud)
    prices = {"cloud": TokenPrice(3.0, 0.3, 15.0)}
    consented, dear = offered([device, cloud], DispatchPolicy(weaker_model=True, prices=prices))
    assert consented.models == {"small", "large"}
    assert (dear.price_in, dear.price_cached_in, dear.price_out) == pytest.approx((3e-6, 3e-7, 15e-6))
