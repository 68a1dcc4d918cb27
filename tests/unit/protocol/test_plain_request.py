"""Keys and requests made without `cryptography` are what `cryptography` and OpenSSL take them for."""

from __future__ import annotations

import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_stub.certificates import check_request, issue_client, make_ca
from protocol import der, ed25519_sign, plain_request
from protocol.ed25519 import verify

# RFC 8032, 7.1, tests 1 to 3: seed, public key, message, signature.
VECTORS = (
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe"
        "24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302a"
        "eeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed2"
        "8dc027beceea1ec40a",
    ),
)


@pytest.mark.parametrize(("seed", "public", "message", "signature"), VECTORS)
def test_signatures_of_the_rfc(seed: str, public: str, message: str, signature: str) -> None:
    assert ed25519_sign.public_key(bytes.fromhex(seed)).hex() == public
    assert ed25519_sign.sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature


@settings(max_examples=20)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_signatures_are_those_of_cryptography(seed: bytes, message: bytes) -> None:
    library = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    signature = ed25519_sign.sign(seed, message)
    assert signature == library.sign(message)
    assert ed25519_sign.public_key(seed) == library.public_key().public_bytes_raw()
    assert verify(library.public_key().public_bytes_raw(), signature, message)


def test_a_request_is_taken_and_its_certificate_works_with_openssl(tmp_path: Path) -> None:
    key_pem = plain_request.new_key_pem()
    ca = make_ca("test", time.time())
    checked = check_request(plain_request.request_pem(key_pem, "phone-1"), "phone-1")
    cert_pem = issue_client(ca, checked, time.time()).decode()
    found = x509.load_pem_x509_certificate(cert_pem.encode())
    assert plain_request.certificate_end_s(cert_pem) == found.not_valid_after_utc.timestamp()
    spki = found.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert plain_request.certificate_public_info(cert_pem) == spki == plain_request.public_info(key_pem)
    (tmp_path / "key").write_bytes(key_pem)
    (tmp_path / "cert").write_text(cert_pem)
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(tmp_path / "cert", tmp_path / "key")


def test_the_key_is_the_pkcs8_form_that_cryptography_writes() -> None:
    key_pem = plain_request.new_key_pem()
    key = load_pem_private_key(key_pem, None)
    assert isinstance(key, ed25519.Ed25519PrivateKey)
    assert key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) == key_pem
    assert key.private_bytes_raw() == plain_request.seed_of(key_pem)


@pytest.mark.parametrize("text", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", b"\xff\xfe"])
def test_what_is_no_ed25519_key_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        plain_request.seed_of(text)


def test_an_elliptic_curve_key_is_refused() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(ValueError, match="not an Ed25519 key"):
        plain_request.seed_of(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.mark.parametrize("year", [2049, 2050, 2131])
def test_ends_in_both_forms_of_time(year: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x" * 40)])
    end = datetime(year, 6, 30, 12, 30, 15, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1 << 140, end - timedelta(days=900), end)
    pem = builder.sign(key, SHA256()).public_bytes(Encoding.PEM).decode()
    assert plain_request.certificate_end_s(pem) == end.timestamp()


@given(st.binary(max_size=300))
def test_der_elements_are_read_as_written_and_garbage_is_refused(data: bytes) -> None:
    assert der.items(der.encode(der.OCTET_STRING, data))[0].content == data
    try:
        found = der.items(data)
    except ValueError:
        return
    assert b"".join(item.whole for item in found) == data
    assert b"".join(der.encode(item.tag, item.content) for item in found) == data


@given(st.binary(min_size=1, max_size=300))
def test_pem_goes_both_ways(data: bytes) -> None:
    assert der.from_pem("CERTIFICATE", "noise\n" + der.to_pem("CERTIFICATE", data)) == data


def test_large_input_is_refused_unread() -> None:
    with pytest.raises(ValueError, match="over"):
        der.items(b"\x04\x00" * (der.MAX_DER_BYTES // 2 + 1))
    with pytest.raises(ValueError, match="elements"):
        der.items(b"\x04\x00" * (der.MAX_ITEMS + 1))
