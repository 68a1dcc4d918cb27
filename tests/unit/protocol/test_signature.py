"""Signatures: the pure verifier agrees with the library and with RFC 8032, and refuses the same odd cases."""

from __future__ import annotations

import hashlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import ed25519
from protocol.errors import ConfigError, MidstreamError
from protocol.signature import (
    Envelope,
    decode_envelope,
    encode_envelope,
    key_id_of,
    new_private_key,
    public_key,
    sign,
    verify,
    verify_bytes,
)

# RFC 8032, section 7.1: TEST 1, TEST 2, TEST 3, TEST SHA(abc): (secret, public, message, signature).
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        hashlib.sha512(b"abc").hexdigest(),
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
]

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493


@pytest.mark.parametrize(("secret", "public", "message", "signature"), VECTORS)
def test_vectors_of_the_rfc(secret: str, public: str, message: str, signature: str) -> None:
    key, text, made = bytes.fromhex(public), bytes.fromhex(message), bytes.fromhex(signature)
    assert ed25519.verify(key, made, text)
    assert verify_bytes(key, made, text)
    assert not ed25519.verify(key, made, text + b"x")
    assert public_key(bytes.fromhex(secret)) == key
    assert sign(text, bytes.fromhex(secret), "k").signature == made


@settings(max_examples=40)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=80), st.integers(0, 511), st.integers(0, 255))
def test_both_verifiers_agree_on_random_and_damaged_input(seed: bytes, message: bytes, bit: int, key_bit: int) -> None:
    public, signature = public_key(seed), sign(message, seed, "k").signature
    assert ed25519.verify(public, signature, message)
    assert verify_bytes(public, signature, message)
    damaged = (int.from_bytes(signature, "big") ^ (1 << bit)).to_bytes(64, "big")
    other_key = (int.from_bytes(public, "big") ^ (1 << key_bit)).to_bytes(32, "big")
    for key, made in ((public, damaged), (other_key, signature)):
        assert ed25519.verify(key, made, message) is False
        assert verify_bytes(key, made, message) is False


@settings(max_examples=60)
@given(st.binary(max_size=40), st.binary(max_size=70), st.binary(max_size=20))
def test_any_bytes_are_judged_without_an_exception(public: bytes, signature: bytes, message: bytes) -> None:
    assert ed25519.verify(public, signature, message) is verify_bytes(public, signature, message) is False


# y coordinates of the eight points of small order, and their non-canonical twins.
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD83D3D706A17C7
SMALL_ORDER_Y = [0, 1, P - 1, _ORDER_8, P - _ORDER_8]
ENCODINGS = [(y | sign_bit << 255).to_bytes(32, "little") for y in (*SMALL_ORDER_Y, P, P + 1) for sign_bit in (0, 1)]


@pytest.mark.parametrize("encoded", ENCODINGS, ids=lambda e: e.hex()[:8])
def test_keys_of_small_order_or_not_canonical_are_refused_by_both(encoded: bytes) -> None:
    """With A of order 1, (R = B, s = 1) would verify for every message."""
    base = bytes.fromhex("58" + "66" * 31)
    forged = base + (1).to_bytes(32, "little")
    genuine = sign(b"m", bytes(32), "k").signature
    for signature in (forged, genuine, encoded + bytes(32), encoded + genuine[32:]):
        assert ed25519.verify(encoded, signature, b"m") is False
        assert verify_bytes(encoded, signature, b"m") is False


@pytest.mark.parametrize("encoded", ENCODINGS, ids=lambda e: e.hex()[:8])
def test_an_r_of_small_order_is_refused_by_both(encoded: bytes) -> None:
    public = public_key(bytes(32))
    for s in (bytes(32), sign(b"m", bytes(32), "k").signature[32:]):
        assert ed25519.verify(public, encoded + s, b"m") is False
        assert verify_bytes(public, encoded + s, b"m") is False


def test_an_s_beyond_the_group_order_is_refused_by_both() -> None:
    """s + L verifies in a careless implementation: the same document would have two valid signatures."""
    public, signature = public_key(bytes(32)), sign(b"m", bytes(32), "k").signature
    s = int.from_bytes(signature[32:], "little")
    shifted = signature[:32] + (s + L).to_bytes(32, "little")
    assert ed25519.verify(public, shifted, b"m") is False
    assert verify_bytes(public, shifted, b"m") is False


def test_an_envelope_comes_back_and_is_verified_by_the_key_it_names() -> None:
    seed = new_private_key()
    public = public_key(seed)
    envelope = decode_envelope(encode_envelope(sign(b"payload", seed, key_id_of(public))))
    assert verify(envelope, {key_id_of(public): public})
    assert not verify(envelope, {"other": public})
    assert not verify(envelope, {key_id_of(public): public_key(new_private_key())})


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"payload":"a","key_id":"k","signature":""}', b'{"payload":1}', b"\xff"]
)
def test_what_is_no_envelope(data: bytes) -> None:
    with pytest.raises(MidstreamError):
        decode_envelope(data)


def test_a_short_key_is_told() -> None:
    with pytest.raises(ConfigError):
        sign(b"", b"short", "k")
    assert not verify(Envelope(b"", "k", bytes(64)), {"k": b"short"})


def test_without_the_library_the_pure_verifier_judges_and_signing_says_why_not() -> None:
    seed = bytes(range(32))
    envelope, public = sign(b"m", seed, "k"), public_key(seed)
    name = "cryptography.hazmat.primitives.asymmetric.ed25519"
    package = "cryptography.hazmat.primitives.asymmetric"
    held = {key: sys.modules.pop(key, None) for key in (name, package)}
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        assert verify(envelope, {"k": public})
        assert not verify(Envelope(b"x", "k", envelope.signature), {"k": public})
        with pytest.raises(ConfigError, match="cryptography"):
            sign(b"m", seed, "k")
    finally:
        sys.modules.update({key: module for key, module in held.items() if module is not None})
