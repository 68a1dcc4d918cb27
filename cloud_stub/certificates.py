"""X.509 of the fleet: CA, server and device certificates, certificate requests. The room's only use of `cryptography`.

Keys are P-256, serial numbers random (RFC 5280, 4.1.2.2). Every certificate carries key identifiers, so that readers in
strict mode (RFC 5280, 4.2.1.1) accept the chain. Dates are wall seconds given by the caller; certificates begin
`BACKDATE_S` in the past for devices whose clock is a little behind.
"""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from protocol.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

DAY_S = 86_400.0
BACKDATE_S = DAY_S
CA_LIFE_S = 20 * 365 * DAY_S
SERVER_LIFE_S = 397 * DAY_S
CLIENT_LIFE_S = 2 * 365 * DAY_S
MAX_REQUEST_BYTES = 8 << 10
"""A P-256 request has about 500 bytes; an RSA-4096 one under 3 KiB."""


@frozen
class Pair:
    """A private key and its certificate (with the chain behind it), both PEM."""

    key_pem: bytes
    cert_pem: bytes

    @property
    def bundle(self) -> bytes:
        """Key and chain in one text, so that one file holds both and they cannot drift apart."""
        return self.key_pem + self.cert_pem


@frozen
class CheckedRequest:
    """A certificate request whose signature, subject and key were found right."""

    device_id: str
    key_sha256: str
    der: bytes


@frozen
class CertificateFacts:
    """What a renewal has to know."""

    names: frozenset[str]
    not_after_s: float
    subject: str
    sha256: str


def make_ca(fleet: str, now_s: float) -> Pair:
    """A new self-signed CA that may sign leaves only."""
    from cryptography import x509

    key = _new_key()
    name = _name(f"midstream fleet {fleet}")
    builder = _builder(name, name, key.public_key(), now_s, CA_LIFE_S)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Pair(_key_pem(key), _sign(builder, key))


def issue_server(ca: Pair, names: Sequence[str], now_s: float, life_s: float = SERVER_LIFE_S) -> Pair:
    """A server key and certificate for the IP addresses and host names in `names`, followed by the CA."""
    from cryptography import x509

    key = _new_key()
    builder = _leaf(ca, key.public_key(), "midstream coordinator", now_s, life_s)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([_general_name(text) for text in names]), critical=False
    )
    builder = builder.add_extension(x509.ExtendedKeyUsage([_purpose("server")]), critical=False)
    return Pair(_key_pem(key), _sign(builder, _load_key(ca)) + _certificate_only(ca))


def issue_own_client(ca: Pair, name: str, now_s: float, life_s: float = CLIENT_LIFE_S) -> Pair:
    """A key and client certificate for this process itself."""
    from cryptography import x509

    key = _new_key()
    builder = _leaf(ca, key.public_key(), name, now_s, life_s)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_purpose("client")]), critical=False)
    return Pair(_key_pem(key), _sign(builder, _load_key(ca)) + _certificate_only(ca))


def issue_client(ca: Pair, request: CheckedRequest, now_s: float, life_s: float = CLIENT_LIFE_S) -> bytes:
    """A client certificate (PEM) for a checked request; nothing but the key and the id is taken from it."""
    from cryptography import x509

    csr = x509.load_der_x509_csr(request.der)
    builder = _leaf(ca, csr.public_key(), request.device_id, now_s, life_s)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_purpose("client")]), critical=False)
    return _sign(builder, _load_key(ca))


def check_request(csr_pem: str, device_id: str) -> CheckedRequest:
    """Accept a request that is signed by its own key, names `device_id` and has a key we take.

    Raises ProtocolError with field `csr_pem`.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.x509.oid import NameOID

    if len(csr_pem) > MAX_REQUEST_BYTES:
        raise _wrong(f"has {len(csr_pem)} bytes, at most {MAX_REQUEST_BYTES} are taken")
    try:
        csr = x509.load_pem_x509_csr(csr_pem.encode("ascii"))
        valid = csr.is_signature_valid
        key = csr.public_key()
        names = [str(a.value) for a in csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except Exception as err:  # the parser raises ValueError, TypeError and library-specific errors for hostile input
        raise _wrong("is not a PEM certificate request") from err
    if not valid:
        raise _wrong("is not signed by its own key")
    if names != [device_id]:
        raise _wrong(f"has subject {names[:1]}, the request is for {device_id!r}")
    if isinstance(key, ec.EllipticCurvePublicKey):
        good = isinstance(key.curve, (ec.SECP256R1, ec.SECP384R1))
    else:
        good = isinstance(key, ed25519.Ed25519PublicKey) or (isinstance(key, rsa.RSAPublicKey) and key.key_size >= 2048)
    if not good:
        raise _wrong("has a key of a kind that is not taken; use P-256, P-384, Ed25519 or RSA from 2048 bits")
    return CheckedRequest(device_id, _key_sha256(key), csr.public_bytes(_encoding("DER")))


def read_pair(data: bytes) -> Pair:
    """Split key and certificates and make sure that they belong together. Raises ValueError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    start = data.find(b"-----BEGIN CERTIFICATE-----")
    if start <= 0:
        raise ValueError("no key followed by a certificate")
    pair = Pair(data[:start], data[start:])
    key = load_pem_private_key(pair.key_pem, None)
    certificate = x509.load_pem_x509_certificate(pair.cert_pem)
    if _key_sha256(key.public_key()) != _key_sha256(certificate.public_key()):
        raise ValueError("key and certificate differ")
    return pair


def read_roots(file: Path, *, next_step: str, field: str) -> str:
    """The CA certificates in a PEM file, for a client to trust. Raises ConfigError with the given next step."""
    try:
        text = file.read_bytes().decode("ascii", "ignore")  # comments may be anything
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) and not isinstance(err, ssl.SSLError) else "no CA certificate"
        raise ConfigError(f"cannot use {file}: {why}", next_step=next_step, field=field) from err
    return text


def facts(pair: Pair) -> CertificateFacts:
    """Names, end and subject of the first certificate of `pair`."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    certificate = x509.load_pem_x509_certificate(pair.cert_pem)
    try:
        san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = frozenset(str(n.value) for n in san)
    except x509.ExtensionNotFound:
        names = frozenset()
    subject = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    der = certificate.public_bytes(_encoding("DER"))
    end_s = certificate.not_valid_after_utc.timestamp()
    return CertificateFacts(names, end_s, str(subject[0].value) if subject else "", hashlib.sha256(der).hexdigest())


def signed_by(pair: Pair, ca: Pair) -> bool:
    """Whether the first certificate of `pair` was signed by `ca`."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    certificate = x509.load_pem_x509_certificate(pair.cert_pem)
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.cert_pem))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


@lru_cache(maxsize=4096)
def key_of(certificate_der: bytes) -> str:
    """SHA-256 of a certificate's public key, as `CheckedRequest.key_sha256`; the certificate was verified by TLS."""
    from cryptography import x509

    return _key_sha256(x509.load_der_x509_certificate(certificate_der).public_key())


def _wrong(what: str) -> ProtocolError:
    return ProtocolError(f"the certificate request {what}", field="csr_pem")


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _load_key(pair: Pair) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return load_pem_private_key(pair.key_pem, None)


def _certificate_only(ca: Pair) -> bytes:
    from cryptography import x509

    return x509.load_pem_x509_certificate(ca.cert_pem).public_bytes(_encoding("PEM"))


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: Any, now_s: float, life_s: float
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.fromtimestamp(now_s, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=BACKDATE_S))
        .not_valid_after(now + timedelta(seconds=life_s))
    )


def _leaf(ca: Pair, public_key: Any, common_name: str, now_s: float, life_s: float) -> x509.CertificateBuilder:
    from cryptography import x509

    issuer = x509.load_pem_x509_certificate(ca.cert_pem)
    ski = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = _builder(_name(common_name), issuer.subject, public_key, now_s, life_s)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ski), critical=False)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _purpose(side: str) -> x509.ObjectIdentifier:
    from cryptography.x509.oid import ExtendedKeyUsageOID

    return ExtendedKeyUsageOID.SERVER_AUTH if side == "server" else ExtendedKeyUsageOID.CLIENT_AUTH


def _general_name(text: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _sign(builder: x509.CertificateBuilder, key: Any) -> bytes:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256()).public_bytes(_encoding("PEM"))


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    return key.private_bytes(_encoding("PEM"), PrivateFormat.PKCS8, NoEncryption())


def _encoding(name: str) -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return getattr(Encoding, name)


def _key_sha256(public_key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import PublicFormat

    return hashlib.sha256(public_key.public_bytes(_encoding("DER"), PublicFormat.SubjectPublicKeyInfo)).hexdigest()
