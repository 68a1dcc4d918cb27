"""TLS identity: the fleet's CA alone, fingerprints, the join step, clocks."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.port import ClockNotSet, Request, Response, Route
from links.tls import client_context, fetch_peer_certificate, fingerprint, server_context
from protocol.errors import ConfigError, LinkError
from tests.unit.links.pki import Authority, make_authority


@pytest.fixture
def fleet(tmp_path: Path) -> Authority:
    return make_authority(tmp_path)


async def _serve(fleet: Authority, *, begins_in_days: float = -1, days: float = 30) -> RunningServer:
    async def hello(request: Request) -> Response:
        return Response(200, {}, b"hello")

    cert = fleet.issue("coordinator", begins_in_days, days)
    return await serve([Route("GET", "/", hello)], ssl=server_context(*cert, fleet.ca_path, require_client=False))


@pytest.fixture
async def server(fleet: Authority) -> AsyncIterator[RunningServer]:
    running = await _serve(fleet)
    yield running
    await running.close()


def test_the_fingerprint_is_sha256_of_the_der_form(fleet: Authority) -> None:
    der = ssl.PEM_cert_to_DER_cert(fleet.ca_pem)
    assert fingerprint(fleet.ca_pem) == hashlib.sha256(der).hexdigest()
    assert fingerprint("text before\n" + fleet.ca_pem + "text after") == fingerprint(fleet.ca_pem.encode())
    with pytest.raises(ConfigError):
        fingerprint("no certificate")


async def test_the_join_step_gets_the_ca_by_its_fingerprint(fleet: Authority, server: RunningServer) -> None:
    ca_pem = await fetch_peer_certificate("127.0.0.1", server.port, fingerprint(fleet.ca_pem))
    assert fingerprint(ca_pem) == fingerprint(fleet.ca_pem)
    link = HttpLink("c", f"https://127.0.0.1:{server.port}", ssl=client_context(ca_pem))
    assert (await link.exchange("/", {}, b"", 5, method="GET")).body == b"hello"
    await link.close()


async def test_the_join_step_refuses_another_ca(server: RunningServer, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other", "other")
    with pytest.raises(LinkError, match="not the coordinator of this join token"):
        await fetch_peer_certificate("127.0.0.1", server.port, fingerprint(other.ca_pem))


async def test_the_join_step_without_a_server_or_without_tls(server: RunningServer) -> None:
    plain = await serve([])
    with pytest.raises(LinkError, match="cannot open TLS"):
        await fetch_peer_certificate("127.0.0.1", plain.port, "00")
    await plain.close()
    with pytest.raises(LinkError):
        await fetch_peer_certificate("127.0.0.1", plain.port, "00", timeout_s=1)


async def test_a_server_of_another_fleet_fails_the_identity_check(server: RunningServer, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other", "other")
    link = HttpLink("c", f"https://127.0.0.1:{server.port}", ssl=client_context(other.ca_pem))
    with pytest.raises(LinkError, match="identity check") as failure:
        await link.exchange("/", {}, b"", 5, method="GET")
    assert not isinstance(failure.value, ClockNotSet)
    await link.close()


@pytest.mark.parametrize(("begins_in_days", "days"), [(10, 30), (-40, 30)])
async def test_dates_that_do_not_fit_are_a_state_to_wait_in(
    fleet: Authority, begins_in_days: float, days: float
) -> None:
    """CL3: a device without a clock sees certificates that are not valid yet."""
    server = await _serve(fleet, begins_in_days=begins_in_days, days=days)
    link = HttpLink("c", f"https://127.0.0.1:{server.port}", ssl=client_context(fleet.ca_pem))
    with pytest.raises(ClockNotSet) as failure:
        await link.exchange("/", {}, b"", 5, method="GET")
    assert failure.value.code == "clock"
    assert "clock" in failure.value.next_step
    await link.close()
    await server.close()


def test_versions_before_1_2_are_off(fleet: Authority) -> None:
    server = server_context(*fleet.issue("coordinator"), fleet.ca_path, require_client=True)
    assert server.minimum_version is client_context(fleet.ca_pem).minimum_version is ssl.TLSVersion.TLSv1_2
    assert server.verify_mode is ssl.CERT_REQUIRED


def test_files_that_do_not_fit_are_config_errors(fleet: Authority, tmp_path: Path) -> None:
    cert, _ = fleet.issue("one")
    _, other_key = fleet.issue("two")
    with pytest.raises(ConfigError):
        server_context(cert, other_key, fleet.ca_path, require_client=True)
    with pytest.raises(ConfigError):
        server_context(tmp_path / "none.pem", other_key, fleet.ca_path, require_client=True)
    with pytest.raises(ConfigError):
        client_context("not a certificate")
