"""A device key (Ed25519), its certificate request, and a look into the certificate, without `cryptography`.

PKCS#8 as in RFC 8410, requests as in RFC 2986, certificates as in RFC 5280. What comes out is what Python's `ssl`
(OpenSSL 1.1.1 and later) loads. Nothing is verified here: TLS has verified who sent the certificate.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from protocol import der, ed25519_sign

_ED25519 = bytes.fromhex("06032b6570")
_COMMON_NAME = bytes.fromhex("0603550403")
_ALGORITHM = der.encode(der.SEQUENCE, _ED25519)
_ZERO = der.encode(der.INTEGER, b"\0")


def new_key_pem() -> bytes:
    """A fresh Ed25519 key, PKCS#8 in PEM."""
    seed = der.encode(der.OCTET_STRING, secrets.token_bytes(ed25519_sign.SEED_BYTES))
    info = der.encode(der.SEQUENCE, _ZERO, _ALGORITHM, der.encode(der.OCTET_STRING, seed))
    return der.to_pem("PRIVATE KEY", info).encode()


def seed_of(key_pem: bytes) -> bytes:
    """The 32-byte seed of an unencrypted Ed25519 key. Raises ValueError for every other kind of key."""
    fields = der.inside(
        der.only(der.from_pem("PRIVATE KEY", key_pem.decode("ascii", "replace")), der.SEQUENCE), der.SEQUENCE
    )
    if len(fields) < 3 or fields[1].whole != _ALGORITHM or fields[2].tag != der.OCTET_STRING:
        raise ValueError("not an Ed25519 key")
    seed = der.only(fields[2].content, der.OCTET_STRING).content
    if len(seed) != ed25519_sign.SEED_BYTES:
        raise ValueError("not an Ed25519 key")
    return seed


def request_pem(key_pem: bytes, common_name: str) -> str:
    """A certificate request for `common_name`, signed by the key. Raises ValueError for a key of another kind."""
    seed = seed_of(key_pem)
    name = der.encode(der.SEQUENCE, _COMMON_NAME, der.encode(der.UTF8_STRING, common_name.encode()))
    subject = der.encode(der.SEQUENCE, der.encode(der.SET, name))
    body = der.encode(der.SEQUENCE, _ZERO, subject, public_info(key_pem), der.encode(der.CONTEXT_0))
    signature = _bits(ed25519_sign.sign(seed, body))
    return der.to_pem("CERTIFICATE REQUEST", der.encode(der.SEQUENCE, body, _ALGORITHM, signature))


def public_info(key_pem: bytes) -> bytes:
    """SubjectPublicKeyInfo (DER) of an Ed25519 key. Raises ValueError for a key of another kind."""
    return der.encode(der.SEQUENCE, _ALGORITHM, _bits(ed25519_sign.public_key(seed_of(key_pem))))


def certificate_public_info(cert_pem: str) -> bytes:
    """SubjectPublicKeyInfo (DER) of the first certificate. Raises ValueError."""
    return _to_be_signed(cert_pem)[5].whole


def certificate_end_s(cert_pem: str) -> float:
    """When the first certificate ends, wall seconds. Raises ValueError."""
    validity = der.inside(_to_be_signed(cert_pem)[3], der.SEQUENCE)
    if len(validity) != 2:
        raise ValueError("a validity has two times")
    return _time(validity[1])


def _to_be_signed(cert_pem: str) -> list[der.Item]:
    """serial, algorithm, issuer, validity, subject, public key and what follows."""
    whole = der.only(der.from_pem("CERTIFICATE", cert_pem), der.SEQUENCE)
    parts = der.inside(whole, der.SEQUENCE)
    if not parts:
        raise ValueError("an empty certificate")
    fields = der.inside(parts[0], der.SEQUENCE)
    if fields and fields[0].tag == der.CONTEXT_0:
        fields = fields[1:]
    if len(fields) < 6 or fields[5].tag != der.SEQUENCE:
        raise ValueError("a certificate without a key")
    return fields


def _time(item: der.Item) -> float:
    forms = {der.UTC_TIME: "%y%m%d%H%M%SZ", der.GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
    if item.tag not in forms:
        raise ValueError("not a time")
    found = datetime.strptime(item.content.decode("ascii", "replace"), forms[item.tag])
    if item.tag == der.UTC_TIME and found.year >= 2050:  # RFC 5280, 4.1.2.5.1: 50 to 99 are of the last century
        found = found.replace(year=found.year - 100)
    return found.replace(tzinfo=UTC).timestamp()


def _bits(data: bytes) -> bytes:
    return der.encode(der.BIT_STRING, b"\0", data)
