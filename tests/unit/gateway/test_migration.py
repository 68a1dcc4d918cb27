"""When an answer moves: tables around one stream that is worth moving."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch_cost import with_energy
from gateway.migration import BATCH_TOKENS, UNSENT_TOKENS, StreamView, batch_tokens, buffer_tokens, migrate
from gateway.targets import TargetView
from profiles.energy import EnergyModel, flops_per_token
from protocol.policy import MigrationPolicy

POLICY = MigrationPolicy()
DEVICE = TargetView("device", local=True, tokens_per_s=8.0, prefill_s=0.02)
CLOUD = TargetView("cloud", local=False, tokens_per_s=60.0, prefill_s=0.001)
STREAM = StreamView(
    generated=20,
    consumed=10,
    safe_at=20,
    source="device",
    remaining_tokens=150.0,
    prompt_tokens=40,
    source_tokens_per_s=8.0,
)
READY = evolve(STREAM, preparing="cloud", prepared="cloud")


def act(
    stream: StreamView,
    *,
    device: TargetView = DEVICE,
    cloud: TargetView = CLOUD,
    rtt_s: float = 0.05,
    policy: MigrationPolicy = POLICY,
) -> str:
    return migrate(stream, [device, cloud], {"cloud": rtt_s}, policy).act


def test_a_faster_target_prepares_ahead() -> None:
    move = migrate(STREAM, [DEVICE, CLOUD], {"cloud": 0.05}, POLICY)
    assert (move.act, move.target) == ("prepare", "cloud")
    assert "60.0 against 8.0" in move.reason


@pytest.mark.parametrize(
    ("stream", "cloud", "policy"),
    [
        (STREAM, CLOUD, evolve(POLICY, enabled=False)),
        (evolve(STREAM, moves=1), CLOUD, POLICY),
        (evolve(STREAM, generated=7), CLOUD, POLICY),
        (evolve(STREAM, remaining_tokens=15.0), CLOUD, POLICY),
        (STREAM, evolve(CLOUD, up=False), POLICY),
        (STREAM, evolve(CLOUD, continues="no"), POLICY),
        (STREAM, evolve(CLOUD, tokens_per_s=9.0), POLICY),
        (STREAM, evolve(CLOUD, queue_s=40.0), POLICY),
        (STREAM, evolve(CLOUD, prefill_s=1.0), POLICY),
        (evolve(STREAM, source="gone"), CLOUD, POLICY),
    ],
)
def test_reasons_to_stay(stream: StreamView, cloud: TargetView, policy: MigrationPolicy) -> None:
    move = migrate(stream, [DEVICE, cloud], {}, policy)
    assert move.act == "stay"
    assert move.reason


def test_an_unmeasured_cloud_is_tried_and_an_unmeasured_device_is_not() -> None:
    assert act(STREAM, cloud=evolve(CLOUD, tokens_per_s=None)) == "prepare"
    at_cloud = evolve(STREAM, source="cloud")
    assert act(at_cloud, device=evolve(DEVICE, tokens_per_s=None)) == "stay"


def test_money_decides_before_speed() -> None:
    dear = evolve(CLOUD, price_out=1e-5)
    at_cloud = evolve(STREAM, source="cloud", source_tokens_per_s=60.0)
    back = migrate(at_cloud, [DEVICE, dear], {}, POLICY)
    assert (back.act, back.target) == ("prepare", "device")
    assert "cheaper" in back.reason
    # A device that keeps up with the reader is not left for a dearer target, a slower one is.
    assert act(STREAM, cloud=dear) == "stay"
    assert act(evolve(STREAM, source_tokens_per_s=3.0), cloud=dear) == "prepare"
    # Prefilling a long answer again costs more than it saves.
    assert act(at_cloud, device=evolve(DEVICE, price_in=1e-4), cloud=dear) == "stay"


@pytest.mark.parametrize(
    ("stream", "rtt_s", "expected"),
    [
        (READY, 0.05, "cut"),
        (evolve(READY, prepared=None), 0.05, "stay"),
        (evolve(READY, safe_at=None), 0.05, "stay"),
        (evolve(READY, consumed=19), 0.18, "cut"),
        (evolve(READY, consumed=19), 0.21, "stay"),
        (evolve(READY, consumed=20, source_tokens_per_s=4.0), 0.05, "cut"),
        (evolve(READY, consumed=20, source_tokens_per_s=8.0), 0.05, "stay"),
        (evolve(READY, consumed=19, lag_tokens=400), 0.0, "stay"),
        (evolve(READY, remaining_tokens=3.0), 0.05, "drop"),
        (evolve(READY, preparing="peer"), 0.05, "drop"),
    ],
)
def test_the_cut_waits_for_a_buffer_that_covers_it(stream: StreamView, rtt_s: float, expected: str) -> None:
    assert act(stream, rtt_s=rtt_s) == expected


def test_what_the_target_just_took_to_read_counts_more_than_its_best() -> None:
    """A loaded target needs a larger buffer than its record says."""
    stream = evolve(READY, consumed=18, lag_tokens=10)
    assert act(stream, cloud=evolve(CLOUD, continues="ids"), rtt_s=0.0) == "cut"
    assert act(evolve(stream, read_s=0.05), cloud=evolve(CLOUD, continues="ids"), rtt_s=0.0) == "stay"


def test_the_cut_is_where_it_is_safe() -> None:
    assert migrate(READY, [DEVICE, CLOUD], {}, POLICY).at == 20


def test_buffer_is_reading_rate_times_move_time_rounded_up() -> None:
    assert [buffer_tokens(seconds, POLICY) for seconds in (0.0, 0.2, 0.21, 1.0)] == [0, 1, 2, 5]


def test_of_several_targets_the_cheapest_takes_over_and_then_the_one_that_is_through_first() -> None:
    at_cloud = evolve(STREAM, source="cloud", source_tokens_per_s=60.0)
    dear = evolve(CLOUD, price_out=1e-5)
    peer = TargetView("peer", local=False, tokens_per_s=20.0, prefill_s=0.001, price_out=2e-6)
    stock = TargetView("stock", local=False, tokens_per_s=50.0, prefill_s=0.001, price_out=1e-6, price_in=1e-7)
    for order in ([dear, peer, stock], [stock, peer, dear], [peer, dear, stock]):
        assert migrate(at_cloud, order, {}, POLICY).target == "stock"
    # Reading the prefix there is a part of what it costs.
    assert migrate(at_cloud, [dear, peer, evolve(stock, price_in=3e-6)], {}, POLICY).target == "peer"
    # At the same price: the shorter queue, the shorter way, the higher rate.
    near, far = evolve(stock, name="near"), evolve(stock, name="far")
    assert migrate(at_cloud, [dear, far, near], {"far": 0.5, "near": 0.01}, POLICY).target == "near"
    assert migrate(at_cloud, [dear, evolve(far, queue_s=2.0), near], {"near": 1.0}, POLICY).target == "near"
    assert migrate(at_cloud, [dear, evolve(far, tokens_per_s=20.0), near], {}, POLICY).target == "near"


MANY = evolve(POLICY, max_moves=10)


def test_each_further_move_must_be_worth_more() -> None:
    """Hysteresis: what was enough for the first move is not for the second, and the third needs more still."""
    at_cloud = evolve(STREAM, source="cloud", source_tokens_per_s=60.0)
    dear = evolve(CLOUD, price_out=1e-5)
    for moves, bearable in ((0, 0.999e-5), (1, 0.89e-5), (2, 0.79e-5), (3, 0.59e-5)):
        stream = evolve(at_cloud, moves=moves, generated=200, moved_at=100)
        for price, expected in ((bearable, "prepare"), (bearable * 1.05, "stay")):
            device = evolve(DEVICE, price_out=price)
            assert migrate(stream, [device, dear], {}, MANY).act == expected
    for moves, needed in ((0, 9.7), (1, 11.6), (2, 13.9)):
        stream = evolve(STREAM, moves=moves, generated=200)
        for rate, expected in ((needed, "prepare"), (needed - 0.2, "stay")):
            assert act(stream, cloud=evolve(CLOUD, tokens_per_s=rate), policy=MANY) == expected


def test_a_stream_that_just_moved_stays_for_a_while() -> None:
    moved = evolve(STREAM, generated=50, moved_at=45, moves=1)
    assert act(moved, policy=MANY) == "stay"
    assert act(evolve(moved, generated=53), policy=MANY) == "prepare"


@given(
    st.lists(st.floats(0.5, 80.0), min_size=30, max_size=30), st.lists(st.floats(0.5, 80.0), min_size=30, max_size=30)
)
def test_a_stream_does_not_bounce_however_rates_swing(here: list[float], there: list[float]) -> None:
    """Law: with rates up to R times apart, an answer moves at most 1 + sqrt(2 log R / log 1.2) times or so."""
    source, moves, moved_at, generated = "device", 0, 0, 0
    for have, offered in zip(here, there, strict=True):
        generated += 10
        rates = {source: have, "cloud" if source == "device" else "device": offered}
        views = [TargetView(name, local=name == "device", tokens_per_s=rate) for name, rate in rates.items()]
        stream = evolve(
            STREAM, generated=generated, source=source, moves=moves, moved_at=moved_at, source_tokens_per_s=have
        )
        move = migrate(stream, views, {}, evolve(POLICY, max_moves=1000))
        if move.act == "prepare" and move.target is not None:
            assert offered >= 1.2 ** (1 + moves) * have
            source, moves, moved_at = move.target, moves + 1, generated
    assert 1.2**moves <= 80.0 / 0.5


def test_a_source_that_costs_money_stops_at_the_cut_and_a_free_one_is_a_hedge() -> None:
    assert migrate(READY, [DEVICE, CLOUD], {}, POLICY).keep_source
    paid = migrate(READY, [evolve(DEVICE, price_out=1e-6), CLOUD], {}, POLICY)
    assert (paid.act, paid.keep_source) == ("cut", False)


def test_tokens_are_sent_ahead_in_batches_that_the_target_reads_while_its_reader_takes_one() -> None:
    by_ids = evolve(CLOUD, continues="ids")
    sizes = [batch_tokens(evolve(by_ids, prefill_s=prefill_s), POLICY) for prefill_s in (0.0, 0.001, 0.01, 0.02, 1.0)]
    assert sizes == [32, 32, 20, 10, 4]
    assert (min(sizes), max(sizes)) == BATCH_TOKENS
    # A stock server would begin anew each time.
    assert batch_tokens(CLOUD, POLICY) == UNSENT_TOKENS


def test_a_server_that_reads_everything_again_needs_a_buffer_for_it() -> None:
    slow = evolve(CLOUD, prefill_s=0.01)
    stream = evolve(READY, generated=20, consumed=16, lag_tokens=4)
    # 60 tokens of 10 ms and a first one are four of the reader's, 4 tokens are one.
    assert act(stream, cloud=evolve(slow, continues="ids"), rtt_s=0.0) == "cut"
    assert act(stream, cloud=slow, rtt_s=0.0) == "cut"
    assert act(evolve(stream, consumed=17), cloud=slow, rtt_s=0.0) == "stay"
    assert act(evolve(stream, consumed=18), cloud=evolve(slow, continues="ids"), rtt_s=0.0) == "cut"


def test_the_joules_of_the_device_are_a_price_of_its_tokens() -> None:
    """An exchange rate moves the decode to the cheaper side, either way; without one, energy counts for nothing."""
    big = evolve(DEVICE, parameters=1e9, tokens_per_s=50.0)
    cloud = evolve(CLOUD, price_out=1e-6, tokens_per_s=50.0)
    joules = EnergyModel().joules(flops_per_token(1e9), 0.0, 1.0)
    stream = evolve(STREAM, source_tokens_per_s=50.0)
    for rate, expected in ((0.0, "stay"), (0.5e-6 / joules, "stay"), (4e-6 / joules, "prepare")):
        device = with_energy(big, EnergyModel(), rate)
        assert migrate(stream, [device, cloud], {}, POLICY).act == expected
        assert with_energy(cloud, EnergyModel(), rate) == cloud
    at_cloud = evolve(stream, source="cloud")
    for rate, expected in ((0.0, "prepare"), (0.2e-6 / joules, "prepare"), (4e-6 / joules, "stay")):
        device = with_energy(big, EnergyModel(), rate)
        assert migrate(at_cloud, [device, cloud], {}, POLICY).act == expected
    paid = migrate(READY, [with_energy(big, EnergyModel(), 4e-6 / joules), cloud], {}, POLICY)
    assert (paid.act, paid.keep_source) == ("cut", False)
