"""The story that started this: layer 7 is best on Wi-Fi, layer 11 on 4G, and the client moves.

A table of three cuts as in the report: an early cut sends much and computes little here, a late one the reverse. The
client walks between Wi-Fi and 4G, whose rate fades. A fixed layer 7 is ruined by 4G, a fixed layer 11 wastes Wi-Fi.
"""

from __future__ import annotations

import random
from itertools import chain

import pytest

from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.replay import LINK, Load, Outcome, replay, replay_fixed, replay_oracle
from split_models.replay_link import LinkTrace

MBIT = 125_000.0
STEP_S = 0.5
SEED = 711


def cut(layer: int, device_s: float, up_bytes: int, server_s: float) -> ArmCost:
    arm = Arm("cut", f"{layer:03d}", "int8", LINK)
    return ArmCost(arm, device_s=device_s, up_bytes=up_bytes, down_bytes=400, server_s=server_s)


LAYER_3 = cut(3, 0.004, 600_000, 0.010)
LAYER_7 = cut(7, 0.010, 140_000, 0.008)
LAYER_11 = cut(11, 0.042, 12_000, 0.004)
TABLE = (ArmCost(DEVICE_ARM, device_s=0.110), LAYER_3, LAYER_7, LAYER_11)


def stretch(rng: random.Random, wifi: bool) -> list[tuple[float, float]]:
    """(rate, one-way delay) per step of 20 to 60 seconds."""
    steps = int(rng.uniform(20.0, 60.0) / STEP_S)
    if wifi:
        return [(rng.uniform(60.0, 90.0) * MBIT, 0.003) for _ in range(steps)]
    found, level = [], 8.0
    for _ in range(steps):
        level = min(12.0, max(1.0, level * rng.uniform(0.8, 1.25)))
        fade = 0.3 if rng.random() < 0.03 else 1.0
        found.append((level * fade * MBIT, 0.015))
    return found


def walk(stretches: int) -> LinkTrace:
    rng = random.Random(SEED)
    steps = list(chain.from_iterable(stretch(rng, wifi=number % 2 == 0) for number in range(stretches)))
    rates, delays = tuple(rate for rate, _ in steps), tuple(delay for _, delay in steps)
    return LinkTrace("walk", STEP_S, rates, rates, delays)


def steady(wifi: bool) -> LinkTrace:
    steps = stretch(random.Random(SEED), wifi)
    rates = tuple(rate for rate, _ in steps)
    return LinkTrace("steady", STEP_S, rates, rates, (0.003 if wifi else 0.015,) * len(rates))


def p99(outcome: Outcome) -> float:
    return sorted(outcome.latencies_s)[round(0.99 * (len(outcome.latencies_s) - 1))]


def mean(outcome: Outcome) -> float:
    return sum(outcome.latencies_s) / len(outcome.latencies_s)


@pytest.mark.parametrize(("wifi", "best"), [(True, LAYER_7), (False, LAYER_11)])
def test_layer_7_is_best_on_wifi_and_layer_11_on_4g(wifi: bool, best: ArmCost) -> None:
    trace = steady(wifi)
    load = Load.over(trace, 0.25, 60.0)
    means = {str(cost.arm): mean(replay_fixed(trace, cost, load)) for cost in TABLE}
    assert min(means, key=means.__getitem__) == str(best.arm)


def test_a_moving_client_is_served_better_than_by_layer_7_or_layer_11_alone() -> None:
    trace = walk(24)
    load = Load.over(trace, 0.25, trace.seconds)
    ours = replay(trace, TABLE, SplitPolicy(), load)
    fixed_7, fixed_11 = replay_fixed(trace, LAYER_7, load), replay_fixed(trace, LAYER_11, load)
    oracle = replay_oracle(trace, TABLE, load)
    assert p99(ours) < 0.4 * p99(fixed_7), "reported: 180 ms to 72 ms"
    assert p99(ours) < 1.25 * p99(fixed_11), "the first requests after a jump are what is left"
    assert mean(ours) < min(mean(fixed_7), mean(fixed_11))
    assert mean(ours) < 1.10 * mean(oracle)
    for arm in (str(LAYER_7.arm), str(LAYER_11.arm)):
        assert ours.arms[arm] > 0.8 * oracle.arms[arm], "each layer where it is best"


def test_the_seam_follows_the_client_without_flapping() -> None:
    """One switch for every change of network, and hardly one more."""
    trace = walk(24)
    ours = replay(trace, TABLE, SplitPolicy(), Load.over(trace, 0.25, trace.seconds))
    assert 20 <= ours.switches <= 32


def test_transfers_of_one_size_do_not_hide_a_better_larger_one() -> None:
    """On Wi-Fi alone, held on layer 11: its small transfers say nothing of larger ones until one is tried."""
    trace = steady(wifi=True)
    load = Load.over(trace, 0.1, 60.0)
    blind = replay(trace, TABLE, SplitPolicy(explore_one_in=0), load)
    small_first = replay(trace, (TABLE[0], LAYER_11), SplitPolicy(), load)
    assert blind.looks == small_first.looks - 1 == 0
    seeing = replay(trace, TABLE, SplitPolicy(), load)
    assert seeing.arms[str(LAYER_7.arm)] > 0.8 * load.count
