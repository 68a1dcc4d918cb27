"""The network that leads to a far end, asked of the kernel without sending anything."""

from __future__ import annotations

import pytest

from links.local_address import local_network


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10"])
def test_loopback_leads_over_loopback(host: str) -> None:
    assert local_network(host, 8791) == "127.0.0.1"


def test_names_are_not_looked_up() -> None:
    """The default route answers for them; without one there is no network."""
    assert local_network("no-such-name.invalid", 8791) == local_network("192.0.2.1", 8791)


@pytest.mark.parametrize("host", ["", "300.1.1.1", "fe80::1%nowhere"])
def test_nonsense_has_a_default_route_or_none(host: str) -> None:
    assert local_network(host, 8791) in (None, local_network("192.0.2.1", 8791))
