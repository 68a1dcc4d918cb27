"""What a device does while it enrols, for tests of this room: a key and a certificate request."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NOW_S = 1_800_000_000.0


@frozen
class DeviceKey:
    """A P-256 key with the request made from it."""

    device_id: str
    key: ec.EllipticCurvePrivateKey

    @property
    def csr_pem(self) -> str:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.device_id)])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self.key, hashes.SHA256())
        return request.public_bytes(Encoding.PEM).decode()

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def write(self, folder: Path, cert_pem: str) -> tuple[Path, Path]:
        """Certificate and key as files for a TLS context."""
        cert, key = folder / f"{self.device_id}.pem", folder / f"{self.device_id}.key"
        cert.write_text(cert_pem)
        key.write_bytes(self.key_pem)
        return cert, key


def new_device(device_id: str = "pi-1") -> DeviceKey:
    return DeviceKey(device_id, ec.generate_private_key(ec.SECP256R1()))
