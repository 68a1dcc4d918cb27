"""A payload signed by the holder of a fleet certificate: what TLS proves of a peer, for a message that others carry.

`cryptography` does the work: whoever holds a certificate of the fleet and speaks WebRTC has it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from protocol.errors import ConfigError, NotAllowed

if TYPE_CHECKING:
    from cryptography import x509

MAX_CERTIFICATE_CHARS = 16 << 10


@frozen
class Certified:
    """`signature` is over a context and the payload bytes exactly as they are, by the key of `cert_pem`."""

    payload: bytes = field(repr=False)
    cert_pem: str = field(repr=False)
    signature: bytes = field(repr=False)


def certify(payload: bytes, context: bytes, key_pem: bytes, cert_pem: str) -> Certified:
    """Sign `payload`; `context` keeps signatures of one use from being taken for another's.

    Raises ConfigError for a key that cannot be used.
    """
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(key_pem, None)
    except (ValueError, TypeError) as err:
        raise ConfigError("this private key cannot be read", next_step="join again") from err
    message = context + payload
    if isinstance(key, ec.EllipticCurvePrivateKey):
        signature = key.sign(message, ec.ECDSA(SHA256()))
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        signature = key.sign(message)
    elif isinstance(key, rsa.RSAPrivateKey):
        signature = key.sign(message, padding.PKCS1v15(), SHA256())
    else:
        raise ConfigError("this kind of private key cannot sign", next_step="join again")
    return Certified(payload, cert_pem, signature)


def verified(certified: Certified, context: bytes, ca_pem: str, name: str, now_s: float) -> bytes:
    """The certificate (DER) of `name` that signed it: issued by the CA itself, valid at `now_s`, for clients.

    Raises NotAllowed.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import Encoding

    if len(certified.cert_pem) > MAX_CERTIFICATE_CHARS:
        raise NotAllowed("the certificate is too long")
    try:
        certificate = x509.load_pem_x509_certificate(certified.cert_pem.encode("ascii"))
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem.encode()))
        _check(certificate, name, now_s)
        _verify(certificate.public_key(), certified.signature, context + certified.payload)
    except InvalidSignature as err:
        raise NotAllowed("the signature or the certificate's is not right") from err
    except (ValueError, TypeError, x509.ExtensionNotFound) as err:
        raise NotAllowed("the certificate cannot be used") from err
    return certificate.public_bytes(Encoding.DER)


def _check(certificate: x509.Certificate, name: str, now_s: float) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    names = [str(a.value) for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [name]:
        raise NotAllowed(f"the certificate is of {str(names)[:80]}, not of {name!r}")
    now = datetime.fromtimestamp(now_s, UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise NotAllowed("the certificate is not valid now", next_step="set the clock, or join again")
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if ExtendedKeyUsageOID.CLIENT_AUTH not in uses:
        raise NotAllowed("the certificate is not a client's")


def _verify(key: Any, signature: bytes, message: bytes) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(SHA256()))
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, message)
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, message, padding.PKCS1v15(), SHA256())
    else:
        raise NotAllowed("the certificate's key is of a kind that is not taken")
