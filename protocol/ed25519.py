"""Ed25519 verification in pure Python, for hosts without `cryptography`; RFC 8032, sections 5.1.1 to 5.1.7.

Slow (some ten milliseconds) and not constant-time: it sees public data only. Signing is in `ed25519_sign`.
"""

from __future__ import annotations

import hashlib

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, _P - 2, _P) % _P
_SQRT_M1 = pow(2, (_P - 1) // 4, _P)

# Extended homogeneous coordinates (X, Y, Z, T): x = X/Z, y = Y/Z, x*y = T/Z.
_Point = tuple[int, int, int, int]
_IDENTITY: _Point = (0, 1, 1, 0)


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """True when `signature` (64 bytes) is one of `public_key` (32 bytes) over `message`; never raises."""
    if not well_formed(public_key, signature):
        return False
    key = _decompress(public_key)
    assert key is not None, "well_formed has decompressed it"
    challenge = hashlib.sha512(signature[:32] + public_key + message).digest()
    k = int.from_bytes(challenge, "little") % _L
    s = int.from_bytes(signature[32:], "little")
    # R = [s]B - [k]A, compared as bytes like OpenSSL does (no cofactor).
    return _compress(_add(_multiply(s, _BASE), _multiply(k, _negate(key)))) == signature[:32]


def well_formed(public_key: bytes, signature: bytes) -> bool:
    """True unless the key, R or s is not canonical, not on the curve, or of small order.

    Implementations differ on these; refusing them before any implementation is asked makes all answer alike.
    """
    if len(public_key) != 32 or len(signature) != 64:
        return False
    if int.from_bytes(signature[32:], "little") >= _L:
        return False
    for encoded in (public_key, signature[:32]):
        point = _decompress(encoded)
        if point is None or _is_identity(_multiply(8, point)):
            return False
    return True


def _recover_x(y: int, sign: int) -> int | None:
    """The x of a point with this y and sign; None when there is none. RFC 8032, 5.1.3."""
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, _P - 2, _P) % _P
    if square == 0:
        return None if sign else 0
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P != 0:
        x = x * _SQRT_M1 % _P
    if (x * x - square) % _P != 0:
        return None
    return _P - x if x & 1 != sign else x


def _decompress(encoded: bytes) -> _Point | None:
    number = int.from_bytes(encoded, "little")
    y = number & ((1 << 255) - 1)
    x = _recover_x(y, number >> 255)
    return None if x is None else (x, y, 1, x * y % _P)


def _compress(point: _Point) -> bytes:
    inverse = pow(point[2], _P - 2, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _add(one: _Point, other: _Point) -> _Point:
    """RFC 8032, 5.1.4; complete, so it also doubles."""
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c = 2 * one[3] * other[3] * _D % _P
    d = 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return (e * f % _P, g * h % _P, f * g % _P, e * h % _P)


def _negate(point: _Point) -> _Point:
    return (-point[0] % _P, point[1], point[2], -point[3] % _P)


def _multiply(scalar: int, point: _Point) -> _Point:
    total = _IDENTITY
    while scalar:
        if scalar & 1:
            total = _add(total, point)
        point = _add(point, point)
        scalar >>= 1
    return total


def _is_identity(point: _Point) -> bool:
    return point[0] % _P == 0 and (point[1] - point[2]) % _P == 0


def _base() -> _Point:
    y = 4 * pow(5, _P - 2, _P) % _P
    x = _recover_x(y, 0)
    assert x is not None, "the base point is on the curve"
    return (x, y, 1, x * y % _P)


_BASE = _base()
ORDER = _L
"""The order of the base point."""


def times_base(scalar: int) -> bytes:
    """The point `scalar` x B, encoded; takes longer for more and for other bits."""
    return _compress(_multiply(scalar, _BASE))
