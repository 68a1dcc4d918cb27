"""The roots of trust: made once, found again, renewed, never replaced in silence."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

import pytest

from cloud_stub.authority import OWN_NAME, ensure_certificates, open_authority, read_admin_key
from cloud_stub.certificates import DAY_S, check_request, facts, read_pair
from gateway.keys import sha256_of
from links.tls import client_context, fingerprint, server_context
from protocol.errors import ConfigError, ProtocolError
from tests.unit.cloud_stub.device_side import NOW_S, new_device


def test_first_start_makes_everything_and_the_next_finds_it(tmp_path: Path) -> None:
    first = open_authority(tmp_path / "s", "lab", NOW_S)
    second = open_authority(tmp_path / "s", "lab", NOW_S + 10)
    assert first.first_start and not second.first_start
    assert first.new_client_key is not None and second.new_client_key is None
    assert second.client_key_sha256 == sha256_of(first.new_client_key)
    assert second.ca_fingerprint == first.ca_fingerprint == fingerprint(first.ca_pem)
    assert second.policy_keys == first.policy_keys
    assert (first.record.run, second.record.run) == (1, 2)
    assert second.admin_key == read_admin_key(tmp_path / "s")


def test_secrets_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    authority = open_authority(tmp_path / "s", "lab", NOW_S)
    ensure_certificates(authority, ["127.0.0.1"], NOW_S)
    modes = {f.name: stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "s").iterdir()}
    assert {name for name, mode in modes.items() if mode & 0o077} == {"ca-certificate.pem"}
    assert authority.new_client_key is not None
    stored = b"".join(f.read_bytes() for f in (tmp_path / "s").iterdir())
    assert authority.new_client_key.encode() not in stored


def test_a_torn_root_comes_back_from_its_previous_copy(tmp_path: Path) -> None:
    authority = open_authority(tmp_path, "lab", NOW_S)
    good = (tmp_path / "fleet.json").read_bytes()
    open_authority(tmp_path, "lab", NOW_S)
    (tmp_path / "fleet.json").write_bytes(good[: len(good) // 2])
    again = open_authority(tmp_path, "lab", NOW_S)
    assert again.ca_fingerprint == authority.ca_fingerprint


@pytest.mark.parametrize("name", ["ca.pem", "policy.key"])
def test_a_lost_root_is_never_replaced_in_silence(tmp_path: Path, name: str) -> None:
    open_authority(tmp_path, "lab", NOW_S)
    (tmp_path / name).write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match="previous copy") as caught:
        open_authority(tmp_path, "lab", NOW_S)
    assert "backup" in caught.value.next_step
    assert (tmp_path / name).read_bytes() == b"\0" * 100


def test_another_fleets_folder_is_refused(tmp_path: Path) -> None:
    open_authority(tmp_path, "lab", NOW_S)
    with pytest.raises(ConfigError) as caught:
        open_authority(tmp_path, "home", NOW_S)
    assert caught.value.field == "fleet"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not allowed"):
        open_authority(tmp_path / "s", "lab", NOW_S)


def test_state_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("x")
    with pytest.raises(ConfigError):
        open_authority(tmp_path / "s", "lab", NOW_S)


def test_server_certificate_is_renewed_when_it_must_be(tmp_path: Path) -> None:
    authority = open_authority(tmp_path, "lab", NOW_S)
    assert ensure_certificates(authority, ["10.0.0.7"], NOW_S)
    assert not ensure_certificates(authority, ["10.0.0.7"], NOW_S + 300 * DAY_S)
    before = facts(read_pair(authority.server_file.read_bytes()))
    assert {"10.0.0.7", "localhost", "127.0.0.1", "::1"} <= before.names
    assert ensure_certificates(authority, ["10.0.0.7"], NOW_S + 380 * DAY_S), "near its end"
    assert ensure_certificates(authority, ["10.0.0.8", "cloud.lan"], NOW_S), "new addresses"
    assert {"10.0.0.8", "cloud.lan"} <= facts(read_pair(authority.server_file.read_bytes())).names
    assert facts(read_pair(authority.own_file.read_bytes())).subject == OWN_NAME


def test_the_files_serve_strict_tls(tmp_path: Path) -> None:
    """Both sides verify in strict mode, and the server shows its CA in the chain."""
    authority = open_authority(tmp_path, "lab", NOW_S - 300 * DAY_S)
    import time

    now_s = time.time()
    ensure_certificates(authority, ["127.0.0.1"], now_s)
    device = new_device()
    cert, key = device.write(tmp_path, authority.issue(check_request(device.csr_pem, "pi-1"), now_s))
    server = server_context(authority.server_file, authority.server_file, authority.roots_file, require_client=True)
    client = client_context(authority.ca_pem, cert, key, check_hostname=True)
    for context in (server, client):
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    subject = _handshake(server, client)
    assert (("commonName", "pi-1"),) in subject


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[tuple[tuple[str, str], ...], ...]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    left = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    right = server.wrap_bio(to_server, to_client, server_side=True)
    done = [False, False]
    for _ in range(10):
        for at, side in enumerate((left, right)):
            try:
                side.do_handshake()
                done[at] = True
            except ssl.SSLWantReadError:
                pass
    assert all(done)
    found = right.getpeercert()
    assert found is not None
    return found["subject"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("csr", "device_id"),
    [("garbage", "pi-1"), ("", "pi-1"), ("x" * 9000, "pi-1"), ("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n", "pi-1")],
)
def test_requests_that_are_not_requests(csr: str, device_id: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_request(csr, device_id)
    assert caught.value.field == "csr_pem"


def test_a_request_for_another_name_is_refused() -> None:
    with pytest.raises(ProtocolError, match="subject"):
        check_request(new_device("pi-2").csr_pem, "pi-1")


def test_a_request_with_a_changed_byte_is_refused() -> None:
    import base64

    lines = new_device().csr_pem.strip().splitlines()
    raw = bytearray(base64.b64decode("".join(lines[1:-1])))
    raw[-1] ^= 1
    body = base64.b64encode(bytes(raw)).decode()
    with pytest.raises(ProtocolError):
        check_request(f"{lines[0]}\n{body}\n{lines[-1]}\n", "pi-1")


def test_a_new_policy_history_raises_the_epoch(tmp_path: Path) -> None:
    authority = open_authority(tmp_path, "lab", NOW_S)
    renewed = authority.with_new_history(NOW_S - 1000)
    assert renewed.record.policy_epoch == authority.record.policy_epoch + 1
    assert open_authority(tmp_path, "lab", NOW_S).record.policy_epoch == renewed.record.policy_epoch
