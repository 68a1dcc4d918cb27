"""Joining: the CA is compared before the secret leaves, the key stays, repeats and torn disks do no harm."""

from __future__ import annotations

import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.device_key import certificate_end_s
from agent.enrolment import enrolled_by, join, join_or_renew
from agent.identity import IdentityStore, made_id
from links.http import HttpLink
from links.tls import client_context
from protocol.errors import ConfigError, LinkError, NotAllowed
from tests.unit.agent.coordinators import JoinableCoordinator


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[JoinableCoordinator]:
    running = JoinableCoordinator(tmp_path / "coordinator")
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def store(tmp_path: Path) -> IdentityStore:
    return IdentityStore(tmp_path / "identity")


async def test_a_joined_device_speaks_mutual_tls(coordinator: JoinableCoordinator, store: IdentityStore) -> None:
    enrolment = await join(store, "pi-1", coordinator.token())
    assert (enrolment.fleet, enrolment.device_id) == ("default", "pi-1")
    assert enrolment.policy_keys == coordinator.authority.policy_keys
    context = client_context(enrolment.ca_pem, store.cert_path, store.key_path)
    link = HttpLink("coordinator", f"https://127.0.0.1:{coordinator.port}", ssl=context)
    assert (await link.exchange("/healthz", {}, b"", 5, method="GET")).status == 200
    await link.close()
    for path in (store.key_path, store.cert_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_wrong_ca_gets_no_secret(coordinator: JoinableCoordinator, store: IdentityStore) -> None:
    with pytest.raises(LinkError, match="not the coordinator of this join token"):
        await join(store, "pi-1", coordinator.token(fingerprint="00" * 32))
    assert coordinator.joins == 0
    assert store.enrolment() is None


async def test_a_wrong_secret_is_refused_in_words(coordinator: JoinableCoordinator, store: IdentityStore) -> None:
    with pytest.raises(NotAllowed, match="refused to enrol"):
        await join(store, "pi-1", coordinator.token(secret="guess"))
    assert store.enrolment() is None


async def test_joining_again_with_the_same_token_is_harmless(
    coordinator: JoinableCoordinator, store: IdentityStore
) -> None:
    token = coordinator.token()
    first = await join(store, "pi-1", token)
    key = store.key_path.read_bytes()
    second = await join(store, "pi-1", token)
    assert second.fleet == first.fleet
    assert store.key_path.read_bytes() == key
    assert enrolled_by(second, token)


async def test_nobody_there_is_a_link_error_with_a_next_step(store: IdentityStore, tmp_path: Path) -> None:
    gone = JoinableCoordinator(tmp_path / "gone")
    await gone.start()
    token = gone.token()
    await gone.stop()
    with pytest.raises(LinkError) as caught:
        await join(store, "pi-1", token)
    assert caught.value.next_step


async def test_a_torn_enrolment_falls_back_and_a_lost_certificate_is_written_again(
    coordinator: JoinableCoordinator, store: IdentityStore
) -> None:
    token = coordinator.token()
    await join(store, "pi-1", token)
    await join(store, "pi-1", token)
    (store.cert_path.parent / "enrolment.json").write_bytes(b'{"device_id": "pi-')
    store.cert_path.write_bytes(b"")
    found = store.enrolment()
    assert found is not None
    assert store.cert_path.read_text() == found.cert_pem


def test_an_id_is_made_once_and_kept(tmp_path: Path) -> None:
    first = IdentityStore(tmp_path / "i").device_id(None, "Raspberry Pi")
    assert first.startswith("raspberry-pi-")
    assert IdentityStore(tmp_path / "i").device_id(None, "renamed") == first
    assert IdentityStore(tmp_path / "i").device_id("mine", "x") == "mine"
    with pytest.raises(ConfigError, match="device_id"):
        IdentityStore(tmp_path / "i").device_id("Not Valid", "x")


@pytest.mark.parametrize("hostname", ["", "...", "Ä" * 70, "a" * 70, "-x-"])
def test_every_hostname_gives_a_valid_id(hostname: str) -> None:
    from protocol.topics import check_id

    made = made_id(hostname, "a1b2c3")
    check_id(made)
    assert made.endswith("a1b2c3")


async def test_an_enrolled_device_cannot_be_renamed_in_passing(
    coordinator: JoinableCoordinator, store: IdentityStore
) -> None:
    await join(store, "pi-1", coordinator.token())
    assert store.device_id(None, "x") == "pi-1"
    with pytest.raises(ConfigError, match="enrolled as 'pi-1'"):
        store.device_id("pi-2", "x")


async def test_another_token_renews_the_certificate_and_keeps_key_and_previous_copy(
    coordinator: JoinableCoordinator, store: IdentityStore
) -> None:
    token = coordinator.token()
    first = await join_or_renew(store, "pi-1", token)
    key = store.key_path.read_bytes()
    again = await join_or_renew(store, "pi-1", token)
    assert (first.outcome, again.outcome, coordinator.joins) == ("joined", "unchanged", 1)
    renewed = await join_or_renew(store, "pi-1", coordinator.token())
    assert renewed.outcome == "renewed"
    assert renewed.enrolment.cert_pem != first.enrolment.cert_pem
    assert store.key_path.read_bytes() == key
    assert store.enrolment() == renewed.enrolment
    store.cert_path.with_name("enrolment.json").write_bytes(b"torn")
    assert store.enrolment() == first.enrolment
    assert certificate_end_s(first.enrolment.cert_pem) > time.time() + 700 * 86_400


async def test_a_refused_renewal_leaves_the_present_enrolment(
    coordinator: JoinableCoordinator, store: IdentityStore
) -> None:
    present = (await join_or_renew(store, "pi-1", coordinator.token())).enrolment
    with pytest.raises(NotAllowed):
        await join_or_renew(store, "pi-1", coordinator.token(secret="guess"))
    assert store.enrolment() == present


async def test_a_token_of_another_fleet_moves_the_device_only_when_asked(
    coordinator: JoinableCoordinator, store: IdentityStore, tmp_path: Path
) -> None:
    present = (await join_or_renew(store, "pi-1", coordinator.token())).enrolment
    other = JoinableCoordinator(tmp_path / "other", fleet="lab")
    await other.start()
    with pytest.raises(ConfigError, match="another coordinator") as caught:
        await join_or_renew(store, "pi-1", other.token())
    assert "--replace" in caught.value.next_step
    assert (other.joins, store.enrolment()) == (0, present)
    moved = await join_or_renew(store, "pi-1", other.token(), replace=True)
    assert (moved.outcome, moved.enrolment.fleet) == ("moved", "lab")
    await other.stop()
