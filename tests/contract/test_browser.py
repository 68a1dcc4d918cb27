"""One suite over every Browser: memory, and zeroconf on the loopback interface (two responders)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest
from attrs import frozen

from links.mdns import ZeroconfBrowser
from links.memory import MemoryBrowser, MemoryNetwork
from links.port import Browser
from protocol.errors import ConfigError


@frozen
class House:
    """Two browsers that can see each other, and a service type nobody else uses."""

    announcer: Browser
    seeker: Browser
    service_type: str


@pytest.fixture(params=("memory", "zeroconf"))
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    kind = f"_ms-{secrets.token_hex(4)}._tcp"
    if request.param == "memory":
        network = MemoryNetwork()
        found = House(MemoryBrowser(network), MemoryBrowser(network), kind)
    else:
        found = House(ZeroconfBrowser(["127.0.0.1"]), ZeroconfBrowser(["127.0.0.1"]), kind)
    yield found
    await found.announcer.close()
    await found.seeker.close()


async def test_nothing_is_found_where_nothing_is(house: House) -> None:
    assert await house.seeker.browse(house.service_type, 0.3) == []


async def test_an_announced_service_is_found_with_addresses_port_and_txt(house: House) -> None:
    txt = {"txtvers": "1", "id": "desk", "fl": "home", "fp": "00ff" * 4}
    name = await house.announcer.advertise(house.service_type, "midstream desk", 8791, txt)
    found = await house.seeker.browse(house.service_type, 5.0)
    assert [(f.instance, f.addresses, f.port, dict(f.txt)) for f in found] == [(name, ("127.0.0.1",), 8791, txt)]


async def test_a_closed_announcer_is_not_found(house: House) -> None:
    await house.announcer.advertise(house.service_type, "short-lived", 8791, {"txtvers": "1"})
    await house.announcer.close()
    assert await house.seeker.browse(house.service_type, 0.5) == []


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("txt.id", ("_ms._tcp", "x", 1, {"id": "v" * 253})),
        ("txt", ("_ms._tcp", "x", 1, {"toolongkey": "v"})),
        ("txt", ("_ms._tcp", "x", 1, {"a": "v" * 200, "b": "v" * 200})),
        ("txt", ("_ms._tcp", "x", 1, {"a=b": "v"})),
        ("instance", ("_ms._tcp", "x" * 64, 1, {})),
        ("port", ("_ms._tcp", "x", 0, {})),
        ("service_type", ("_sixteen-letters-._tcp", "x", 1, {})),
        ("service_type", ("midstream", "x", 1, {})),
    ],
)
async def test_records_that_do_not_fit_are_refused_by_field(
    house: House, field: str, arguments: tuple[str, str, int, dict[str, str]]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        await house.announcer.advertise(*arguments)
    assert refusal.value.field == field
