"""A small fleet CA for tests, made with cryptography."""

from __future__ import annotations

import datetime
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NOW = datetime.datetime.now(datetime.UTC)


@frozen
class Authority:
    """A CA whose certificate is at `ca_path`."""

    folder: Path
    ca_path: Path
    ca_pem: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def issue(self, name: str, begins_in_days: float = -1, days: float = 30) -> tuple[Path, Path]:
        """Paths of (certificate followed by the CA's, key) for common name `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        begin = _NOW + datetime.timedelta(days=begins_in_days)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(days=days))
            .sign(self.key, hashes.SHA256())
        )
        cert_path, key_path = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert_path.write_text(_pem(certificate) + self.ca_pem)
        _write_key(key_path, key)
        return cert_path, key_path


def make_authority(folder: Path, name: str = "fleet") -> Authority:
    """A new CA below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOW - datetime.timedelta(days=60))
        .not_valid_after(_NOW + datetime.timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    ca_path = folder / f"{name}-ca.pem"
    ca_path.write_text(_pem(certificate))
    return Authority(folder, ca_path, _pem(certificate), certificate, key)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
