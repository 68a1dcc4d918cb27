"""Trust anchors of a fleet, and the join string that carries them to a device for the first time.

    mj1.<base64url of: port u16 | CA fingerprint 32 | policy key 32 | secret length u8 | secret | host | crc32>

Nothing is trusted on first use: the fingerprint tells whether the server that answers is the right one, the secret
(used once) tells the server whether the device may join, the key whether a policy is genuine.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib

from attrs import field, frozen

from protocol.errors import ConfigError
from protocol.signature import PUBLIC_KEY_BYTES

PREFIX = "mj1."
MAX_JOIN_CHARS = 1024

_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}", re.ASCII)


@frozen
class JoinToken:
    """A coordinator's invitation. ca_fingerprint: 64 hex digits; policy_key: 32 bytes; secret: used once."""

    host: str
    port: int
    ca_fingerprint: str
    policy_key: bytes
    secret: str = field(repr=False)


def encode_join(token: JoinToken) -> str:
    """The join string, safe in URLs and shells without quotes. Raises ConfigError for a token that has no such form."""
    secret = token.secret.encode("utf-8")
    if not _HOST.fullmatch(token.host) or not 0 < token.port < 1 << 16 or not 0 < len(secret) < 256:
        raise ConfigError("a join token needs a host, a port and a secret of 1 to 255 bytes")
    fingerprint = _fingerprint(token.ca_fingerprint)
    if len(token.policy_key) != PUBLIC_KEY_BYTES:
        raise ConfigError(f"a policy key has {PUBLIC_KEY_BYTES} bytes")
    body = b"".join(
        (
            token.port.to_bytes(2, "big"), fingerprint, token.policy_key,
            bytes([len(secret)]), secret, token.host.encode("ascii"),
        )
    )  # fmt: skip
    whole = body + zlib.crc32(body).to_bytes(4, "big")
    return PREFIX + base64.urlsafe_b64encode(whole).rstrip(b"=").decode("ascii")


def decode_join(text: str) -> JoinToken:
    """Read a join string; blanks around it are fine. Raises ConfigError for anything that is not a whole one."""
    text = text.strip()
    broken = ConfigError(
        "this is not a whole join string", next_step="copy all of it, from mj1. to the end, as the coordinator shows it"
    )
    if not text.startswith(PREFIX) or len(text) > MAX_JOIN_CHARS:
        raise broken
    body = text.removeprefix(PREFIX)
    try:
        whole = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as err:
        raise broken from err
    if len(whole) < 2 + 32 + PUBLIC_KEY_BYTES + 1 + 4 or zlib.crc32(whole[:-4]).to_bytes(4, "big") != whole[-4:]:
        raise broken
    length = whole[66]
    secret, host = whole[67 : 67 + length], whole[67 + length : -4]
    if len(secret) != length or not length or not _HOST.fullmatch(host.decode("ascii", "replace")):
        raise broken
    try:
        return JoinToken(
            host=host.decode("ascii"),
            port=int.from_bytes(whole[:2], "big"),
            ca_fingerprint=whole[2:34].hex(),
            policy_key=whole[34:66],
            secret=secret.decode("utf-8"),
        )
    except UnicodeDecodeError as err:
        raise broken from err


def _fingerprint(text: str) -> bytes:
    """32 bytes from hex, with or without colons."""
    try:
        raw = bytes.fromhex(text.replace(":", ""))
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise ConfigError("a CA fingerprint has 64 hex digits", field="ca_fingerprint")
    return raw
