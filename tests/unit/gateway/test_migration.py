"""When an answer moves: tables around one stream that is worth moving."""

from __future__ import annotations

import pytest
from attrs import evolve

from gateway.migration import StreamView, buffer_tokens, migrate
from gateway.targets import TargetView
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
        (evolve(READY, consumed=19), 0.2, "cut"),
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


def test_the_cut_is_where_it_is_safe() -> None:
    assert migrate(READY, [DEVICE, CLOUD], {}, POLICY).at == 20


def test_buffer_is_reading_rate_times_move_time_rounded_up() -> None:
    assert [buffer_tokens(seconds, POLICY) for seconds in (0.0, 0.2, 0.21, 1.0)] == [0, 1, 2, 5]
