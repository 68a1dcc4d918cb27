"""Signed envelopes: Ed25519 over the payload bytes exactly as received, never re-serialised."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from protocol import ed25519
from protocol.decode import decode, encode
from protocol.errors import ConfigError

MAX_ENVELOPE_BYTES = 128 << 10
"""A payload of 64 KiB in base64, with its signature."""

PRIVATE_KEY_BYTES = 32
PUBLIC_KEY_BYTES = 32


@frozen
class Envelope:
    """A payload and its signature by the key that `key_id` names."""

    payload: bytes
    key_id: str
    signature: bytes


def encode_envelope(envelope: Envelope) -> bytes:
    """JSON: {"key_id": text, "payload": base64, "signature": base64}."""
    return encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    """Read an envelope. Says nothing about its signature. Raises ProtocolError or TooLarge."""
    return decode(Envelope, data, what="signed envelope", max_bytes=MAX_ENVELOPE_BYTES)


def verify(envelope: Envelope, keys: Mapping[str, bytes]) -> bool:
    """True when the named key is among `keys` (key id -> 32 bytes) and signed the payload."""
    public = keys.get(envelope.key_id)
    return public is not None and verify_bytes(public, envelope.signature, envelope.payload)


def verify_bytes(public: bytes, signature: bytes, message: bytes) -> bool:
    """Verify with `cryptography` where it is installed, with our own verifier otherwise; both judge alike."""
    if not ed25519.well_formed(public, signature):
        return False
    library = _library()
    if library is None:
        return ed25519.verify(public, signature, message)
    try:
        library.Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except _invalid():
        return False
    return True


def sign(payload: bytes, private_key: bytes, key_id: str) -> Envelope:
    """Sign with a 32-byte seed. Needs `cryptography`; raises ConfigError without it."""
    return Envelope(payload=payload, key_id=key_id, signature=_signer(private_key).sign(payload))


def new_private_key() -> bytes:
    """A fresh 32-byte seed."""
    return secrets.token_bytes(PRIVATE_KEY_BYTES)


def public_key(private_key: bytes) -> bytes:
    """The 32-byte public key of a seed. Needs `cryptography`."""
    raw: bytes = _signer(private_key).public_key().public_bytes_raw()
    return raw


def key_id_of(public: bytes) -> str:
    """The usual id of a key: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(public).hexdigest()[:16]


def _signer(private_key: bytes) -> Any:
    library = _library()
    if library is None:
        raise ConfigError("signing needs the package cryptography", next_step="pip install cryptography")
    if len(private_key) != PRIVATE_KEY_BYTES:
        raise ConfigError(f"a signing key has {PRIVATE_KEY_BYTES} bytes, this one {len(private_key)}")
    return library.Ed25519PrivateKey.from_private_bytes(private_key)


def _library() -> Any:
    """The Ed25519 module of cryptography, or None."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519 as library
    except ImportError:
        return None
    return library


def _invalid() -> tuple[type[Exception], ...]:
    from cryptography.exceptions import InvalidSignature

    return (InvalidSignature, ValueError)
