"""What an engine has read before, by the turns of its conversations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.fakes_text import FakeTextEngine
from gateway.dispatch_prefix import KEPT_MARKS, PrefixMemory
from gateway.targets import Target, TargetBoard
from protocol.text import Message
from tests.unit.gateway.streams import MODEL, target

TURNS = (Message("system", "s" * 300), Message("user", "u" * 100), Message("assistant", "a" * 500))


def test_the_next_turn_of_a_conversation_is_read_up_to_it() -> None:
    memory = PrefixMemory()
    assert memory.cached_ratio(TURNS) == 0.0
    memory.read(TURNS)
    assert memory.cached_ratio(TURNS) == 1.0
    assert memory.cached_ratio((*TURNS, Message("user", "x" * 100))) == pytest.approx(0.9)
    assert memory.cached_ratio((TURNS[0], Message("user", "v" * 100))) == pytest.approx(0.75)
    assert memory.cached_ratio((Message("user", TURNS[0].content), *TURNS[1:])) == 0.0


@given(st.text(min_size=1, max_size=3_000), st.text(min_size=1, max_size=600))
def test_texts_count_in_blocks_and_never_more_than_they_share(prefix: str, rest: str) -> None:
    memory = PrefixMemory()
    memory.read(prefix)
    assert memory.cached_ratio(prefix) == 1.0
    longer = prefix + rest
    shared = len(prefix.encode()) / len(longer.encode())
    assert memory.cached_ratio(longer) <= shared + 1e-9


def test_ids_count_too() -> None:
    memory = PrefixMemory()
    memory.read(tuple(range(128)))
    assert memory.cached_ratio(tuple(range(160))) == pytest.approx(0.8)
    assert memory.cached_ratio((5, *range(100))) == 0.0


def test_memory_is_bounded() -> None:
    memory = PrefixMemory()
    for number in range(2 * KEPT_MARKS):
        memory.read((Message("user", f"{number}"),))
    assert memory.cached_ratio((Message("user", "0"),)) == 0.0
    assert memory.cached_ratio((Message("user", f"{2 * KEPT_MARKS - 1}"),)) == 1.0


def test_a_known_prompt_makes_a_devices_first_token_sooner_and_no_servers() -> None:
    board = TargetBoard()
    device = Target("device", True, FakeTextEngine(), frozenset({MODEL}), prefill_tokens_per_s=100.0)
    cloud = target("cloud", FakeTextEngine(), local=False)
    for one in (device, cloud):
        board.read(one, MODEL, TURNS)
    longer = (*TURNS, Message("user", "x" * 100))
    assert board.view(device, MODEL, 0.0, longer).prefill_seconds(250) == pytest.approx(0.25)
    assert board.view(device, MODEL, 0.0).prefill_seconds(250) == pytest.approx(2.5)
    assert board.view(cloud, MODEL, 0.0, longer).known_ratio == 0.0
