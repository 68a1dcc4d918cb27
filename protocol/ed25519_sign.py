"""Ed25519 keys and signatures in pure Python, for the one certificate request of a host without `cryptography`.

RFC 8032, sections 5.1.5 and 5.1.6. Not constant-time: it is for a device that signs its own request when it joins, with
nobody near to time it. The secret scalar is blinded all the same. Everything else (TLS) is signed by OpenSSL.
"""

from __future__ import annotations

import hashlib
import secrets

from protocol import ed25519

SEED_BYTES = 32
BLINDING_BITS = 128


def public_key(seed: bytes) -> bytes:
    """The 32-byte public key of a 32-byte seed. Raises ValueError for another length."""
    scalar, _ = _expand(seed)
    return _point(scalar)


def sign(seed: bytes, message: bytes) -> bytes:
    """The 64-byte signature over `message`; deterministic. Raises ValueError for a seed of another length."""
    scalar, prefix = _expand(seed)
    public = _point(scalar)
    nonce = _number(prefix + message)
    commitment = _point(nonce)
    challenge = _number(commitment + public + message)
    return commitment + ((nonce + challenge * scalar) % ed25519.ORDER).to_bytes(32, "little")


def _expand(seed: bytes) -> tuple[int, bytes]:
    """The clamped scalar and the prefix of nonces."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, this one {len(seed)}")
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return scalar & ~7 & ((1 << 255) - 1) & ~(1 << 255) | 1 << 254, digest[32:]


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.sha512(data).digest(), "little") % ed25519.ORDER


def _point(scalar: int) -> bytes:
    """scalar x base point; a random multiple of the group's order changes the way and not the result."""
    return ed25519.times_base(scalar + secrets.randbits(BLINDING_BITS) * ed25519.ORDER)
