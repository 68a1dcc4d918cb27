"""Topic names and the ids in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.topics import Topics, check_id, coord_state, fleet_pattern, parse

ids = st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True)


@given(ids, ids, ids)
def test_every_topic_comes_apart_again(fleet: str, device: str, name: str) -> None:
    topics = Topics(fleet, device)
    for topic, kind in (
        (topics.state, "state"),
        (topics.profile, "profile"),
        (topics.policy_desired, "policy/desired"),
        (topics.policy_reported, "policy/reported"),
        (topics.signal_offer, "signal/offer"),
        (topics.signal_answer, "signal/answer"),
    ):
        found = parse(topic)
        assert (found.fleet, found.device_id, found.kind, found.name) == (fleet, device, kind, "")
    assert (parse(topics.tele(name)).kind, parse(topics.tele(name)).name) == ("tele", name)
    assert parse(coord_state(fleet)).device_id == "_coord"


@pytest.mark.parametrize(
    "text", ["", "a" * 33, "A", "a_b", "a/b", "+", "#", "$sys", "a b", "ä", "a\n", "\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_ids_that_could_reach_other_topics_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        check_id(text)
    with pytest.raises(ProtocolError):
        Topics("fleet", text)
    with pytest.raises(ProtocolError):
        Topics(text, "device")


def test_an_id_of_32_characters_is_fine() -> None:
    assert check_id("a" * 32) == "a" * 32


@pytest.mark.parametrize(
    "topic",
    ["", "midstream/v1/f/d", "midstream/v2/f/d/state", "midstream/v1/f/d/other", "midstream/v1/f/_coord/profile",
     "midstream/v1/f/d/tele", "midstream/v1/f/d/tele/a/b", "midstream/v1/f/d/cmd/a", "midstream/v1/F/d/state",
     "/midstream/v1/f/d/state"],
)  # fmt: skip
def test_foreign_topics_are_refused(topic: str) -> None:
    with pytest.raises(ProtocolError):
        parse(topic)


def test_fleet_patterns_have_one_wildcard_per_level() -> None:
    assert fleet_pattern("f", "state") == "midstream/v1/f/+/state"
    assert fleet_pattern("f", "tele") == "midstream/v1/f/+/tele/+"
