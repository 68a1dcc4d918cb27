"""What battery and network of a host allow; pure."""

from __future__ import annotations

from typing import get_args

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agent.host_bridge import HostState, Thermal, Transport
from agent.pacing import AWAKE_KEEPALIVE_S, CALM_KEEPALIVE_S, pace, too_hot

STATES = st.builds(
    HostState, charging=st.sampled_from([None, True, False]), power_save=st.booleans(), validated=st.booleans(),
    network=st.sampled_from([None, *get_args(Transport)]), metered=st.booleans(), background=st.booleans(),
    idle=st.booleans(),
)  # fmt: skip


@given(STATES)
def test_laws(state: HostState) -> None:
    now = pace(state)
    assert now.keepalive_s < 300, "mobile networks forget a connection after some five minutes"
    assert now.may_dial or not now.may_fetch
    assert not (now.asleep and now.may_dial)
    assert pace(evolve(state, idle=True)).asleep
    assert not pace(evolve(state, network="none")).may_dial
    assert not pace(evolve(state, metered=True)).may_fetch
    assert pace(evolve(state, background=True)).keepalive_s >= pace(evolve(state, background=False)).keepalive_s


@pytest.mark.parametrize(
    ("changes", "keepalive_s"),
    [
        ({}, AWAKE_KEEPALIVE_S),
        ({"background": True}, CALM_KEEPALIVE_S),
        ({"background": True, "charging": True}, AWAKE_KEEPALIVE_S),
        ({"power_save": True}, CALM_KEEPALIVE_S),
        ({"network": "cellular", "charging": True}, CALM_KEEPALIVE_S),
    ],
)
def test_the_radio_is_used_seldom_where_it_costs(changes: dict[str, object], keepalive_s: int) -> None:
    assert pace(evolve(HostState(network="wifi"), **changes)).keepalive_s == keepalive_s  # type: ignore[arg-type]


def test_a_host_that_knows_nothing_is_not_held_back() -> None:
    now = pace(HostState())
    assert (now.may_dial, now.may_fetch, now.asleep) == (True, True, False)


def test_heat_counts_from_severe() -> None:
    hot = [level for level in get_args(Thermal) if too_hot(HostState(thermal=level))]
    assert hot == ["severe", "critical", "emergency", "shutdown"]
