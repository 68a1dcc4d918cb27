"""The device's private key: where it is kept, and the certificate request it signs.

With `cryptography` a new key is P-256; without it (Android) Ed25519, made by protocol/plain_request. A key is used by
whichever made it: an Ed25519 key works with both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from protocol import plain_request
from protocol.durable import read_durable, write_durable
from protocol.errors import ConfigError, ProtocolError

AGAIN = "remove the identity folder and join again"


class KeyKeeper(Protocol):
    """Where the key is. Blocking. All raise ConfigError when the place cannot be used."""

    def read(self) -> bytes | None:
        """The key in PEM, or None when none was made yet."""
        ...

    def write(self, key_pem: bytes) -> None: ...

    def file(self) -> AbstractContextManager[Path]:
        """A file with the key for the time of the block, for TLS libraries take nothing else."""
        ...


class FileKey:
    """A key in a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        return read_durable(self.path, _check_key)

    def write(self, key_pem: bytes) -> None:
        write_durable(self.path, key_pem)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        yield self.path


class SecretKey:
    """A key in somebody else's store of secrets (a host's key store); it never rests in a file of ours.

    folder: for systems without memory files: the key is in a file there while TLS loads it.
    """

    def __init__(self, read: Callable[[], bytes | None], write: Callable[[bytes], None], folder: Path) -> None:
        self._read = read
        self._write = write
        self._folder = folder

    def read(self) -> bytes | None:
        found = self._read()
        try:
            return None if found is None else _check_key(found)
        except ValueError as err:
            raise ConfigError(f"the host's secret store holds {err} under our name", next_step=AGAIN) from err

    def write(self, key_pem: bytes) -> None:
        self._write(key_pem)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        key_pem = self.read()
        if key_pem is None:
            raise ConfigError("the device's key is not in the host's secret store", next_step=AGAIN)
        with _memory_file(key_pem) or _short_lived_file(self._folder / "device.key.now", key_pem) as path:
            yield path


def new_key() -> bytes:
    """A fresh private key, PKCS#8 in PEM."""
    made = _library_key()
    return plain_request.new_key_pem() if made is None else made


def request(key_pem: bytes, device_id: str) -> str:
    """A certificate request for `device_id`, PEM. Raises ConfigError for a key that cannot be used here."""
    try:
        return plain_request.request_pem(key_pem, device_id)
    except ValueError:  # not Ed25519
        return _library_request(key_pem, device_id)


def check_pair(cert_pem: str, key_pem: bytes) -> None:
    """Raises ProtocolError unless the certificate is for this key."""
    try:
        granted = plain_request.certificate_public_info(cert_pem)
    except ValueError as err:
        raise ProtocolError("the coordinator's answer holds no valid certificate", field="cert_pem") from err
    if granted != _public_info(key_pem):
        raise ProtocolError("the certificate in the coordinator's answer is not for our key", field="cert_pem")


def certificate_end_s(cert_pem: str) -> float:
    """When the first certificate of `cert_pem` ends, wall seconds. Raises ConfigError."""
    try:
        return plain_request.certificate_end_s(cert_pem)
    except ValueError as err:
        raise ConfigError("the device's certificate cannot be read", next_step="join again") from err


def _public_info(key_pem: bytes) -> bytes:
    try:
        return plain_request.public_info(key_pem)
    except ValueError:
        pass
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(_load(key_pem).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _library_key() -> bytes | None:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        return None
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _library_request(key_pem: bytes, device_id: str) -> str:
    key = _load(key_pem)
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the device key is neither an EC nor an Ed25519 key", next_step=AGAIN)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device_id)])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def _load(key_pem: bytes) -> Any:
    """The key by the library."""
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as err:
        raise ConfigError(
            "the device's key was made with the package cryptography, which is not here", next_step=AGAIN
        ) from err
    try:
        return load_pem_private_key(key_pem, None)
    except (ValueError, TypeError) as err:
        raise ConfigError("the device key cannot be read", next_step=AGAIN) from err


def _check_key(data: bytes) -> bytes:
    if b"PRIVATE KEY" not in data or b"-----END" not in data:
        raise ValueError("something that is not a private key")
    return data


def _memory_file(data: bytes) -> AbstractContextManager[Path] | None:
    """A file that is on no disk; None where the system has none."""
    try:
        handle = os.memfd_create("device.key", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    return _in_memory(handle, data)


@contextlib.contextmanager
def _in_memory(handle: int, data: bytes) -> Iterator[Path]:
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        yield Path(f"/proc/self/fd/{handle}")


@contextlib.contextmanager
def _short_lived_file(path: Path, data: bytes) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        yield path
    finally:
        path.unlink(missing_ok=True)
