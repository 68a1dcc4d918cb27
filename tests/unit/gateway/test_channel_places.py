"""Places on the control channel: how many one tenant gets, and who goes first."""

from __future__ import annotations

import pytest

from gateway.channel_places import SessionPlaces
from protocol.errors import Full


def joined(places: SessionPlaces[str], tenant: str, names: range) -> None:
    for number in names:
        places.make_room(tenant)
        places.connected((tenant, str(number)), f"{tenant}{number}")


def test_a_tenant_gets_eight_times_what_is_free_and_others_always_find_places() -> None:
    places: SessionPlaces[str] = SessionPlaces(900)
    joined(places, "a", range(800))
    with pytest.raises(Full, match=r"800 apps of this tenant.*share of the 900 places") as refused:
        places.make_room("a")
    assert "later" in refused.value.next_step and refused.value.retry_after_s
    joined(places, "b", range(88))
    with pytest.raises(Full, match="tenant"):
        joined(places, "b", range(88, 90))
    joined(places, "c", range(1))
    assert len(places) == 889


def test_a_tenant_at_its_share_loses_its_own_that_was_gone_longest_and_nobody_elses() -> None:
    places: SessionPlaces[str] = SessionPlaces(9)
    places.connected(("b", "0"), "b0")
    places.left(("b", "0"), 0.0)
    joined(places, "a", range(7))
    places.left(("a", "5"), 1.0)
    places.left(("a", "2"), 2.0)
    places.left(("a", "3"), 3.0)
    places.connected(("a", "5"), "a5")  # it is back
    joined(places, "a", range(7, 9))
    assert set(places.all()) == {"b0", "a0", "a1", "a4", "a5", "a6", "a7", "a8"}


def test_where_no_place_is_free_the_tenant_with_most_sessions_gives_one() -> None:
    places: SessionPlaces[str] = SessionPlaces(3)
    for key in (("a", "1"), ("a", "2"), ("b", "1")):
        places.connected(key, "".join(key))
    with pytest.raises(Full, match="3 apps hold"):
        places.make_room("c")
    places.left(("b", "1"), 1.0)
    places.left(("a", "2"), 2.0)
    places.make_room("c")
    assert places.all() == ("a1", "b1")


def test_sessions_that_are_away_for_too_long_are_forgotten() -> None:
    places: SessionPlaces[str] = SessionPlaces(9)
    joined(places, "a", range(3))
    places.left(("a", "0"), 10.0)
    places.left(("a", "1"), 20.0)
    assert places.forget_away(15.0) == 1 and places.all() == ("a1", "a2")
    places.drop(("a", "1"))
    places.drop(("a", "1"))
    assert places.forget_away(99.0) == 0 and places.get(("a", "2")) == "a2"
