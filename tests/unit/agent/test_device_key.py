"""Keys in files and in a host's store of secrets, and certificates that are for them or not."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.device_key import FileKey, SecretKey, check_pair, new_key, request
from cloud_stub.certificates import check_request, issue_client, make_ca
from protocol import plain_request
from protocol.errors import ConfigError, ProtocolError


def _certificate(key_pem: bytes) -> str:
    checked = check_request(request(key_pem, "phone"), "phone")
    return issue_client(make_ca("test", time.time()), checked, time.time()).decode()


@pytest.mark.parametrize("make", [new_key, plain_request.new_key_pem], ids=["by the library", "by our own"])
def test_a_certificate_belongs_to_its_key_alone(make: Callable[[], bytes]) -> None:
    key_pem = make()
    cert_pem = _certificate(key_pem)
    check_pair(cert_pem, key_pem)
    for other in (new_key(), plain_request.new_key_pem()):
        with pytest.raises(ProtocolError, match="not for our key"):
            check_pair(cert_pem, other)
    with pytest.raises(ProtocolError, match="no valid certificate"):
        check_pair("nothing", key_pem)


def test_a_key_in_a_secret_store_reaches_tls_and_no_folder(tmp_path: Path) -> None:
    held: list[bytes] = []
    keeper = SecretKey(lambda: held[-1] if held else None, held.append, tmp_path)
    assert keeper.read() is None
    with pytest.raises(ConfigError, match="secret store"), keeper.file():
        pass
    keeper.write(plain_request.new_key_pem())
    (tmp_path / "cert").write_text(_certificate(held[0]))
    with keeper.file() as path:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(tmp_path / "cert", path)
    assert not path.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["cert"]


def test_garbage_in_the_secret_store_is_named(tmp_path: Path) -> None:
    keeper = SecretKey(lambda: b"something else", lambda data: None, tmp_path)
    with pytest.raises(ConfigError, match="not a private key"):
        keeper.read()


def test_a_torn_key_file_counts_as_none(tmp_path: Path) -> None:
    keeper = FileKey(tmp_path / "device.key")
    assert keeper.read() is None
    keeper.path.write_bytes(b"-----BEGIN PRIVATE KEY-----\nMC4")
    assert keeper.read() is None
