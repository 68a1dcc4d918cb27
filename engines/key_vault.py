"""Keys of providers, sealed on disk: one file under AES-256-GCM, its key in a file of its own, both for this user only.

The seal keeps keys out of backups, support bundles and other readers of the state folder; who can read both files has
them. Changed files are read anew at the next request, so keys are rotated while the house runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import field, frozen

from protocol.clock import Clock
from protocol.decode import decode, encode
from protocol.durable import read_durable, write_durable
from protocol.errors import BadRequest, ConfigError, NotFound, ProtocolError

SCHEMA = "midstream.provider-keys/1.0"
SEALED_FILE, KEY_FILE, LOCK_FILE = "provider_keys.sealed", "provider_keys.key", "provider_keys.lock"
KEY_BYTES, NONCE_BYTES = 32, 12
LOOK_EVERY_S = 0.5
MAX_KEYS = 4096
MAX_KEY_CHARS = 4096


@frozen
class SealedKey:
    """One key. tenant: whose it is; empty: of the house, used for tenants without keys of their own."""

    provider: str
    key: str = field(repr=False)
    tenant: str = ""
    added_unix_s: int = 0

    @property
    def id(self) -> str:
        """Names the key without telling it."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:12]


@frozen
class _Held:
    schema: str
    keys: tuple[SealedKey, ...]


class KeyVault:
    """The keys of a house, in its state folder.

    Reading looks at the file at most twice a second. Raises ConfigError when the files do not fit each other, when the
    key file can be read by others, or when `cryptography` is absent.
    """

    def __init__(self, folder: Path, clock: Clock = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._looked_s: float | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._by_use: Mapping[tuple[str, str], tuple[str, ...]] = {}

    def keys(self, provider: str, tenant: str = "") -> Sequence[str]:
        """The tenant's own keys, or else the house's, in the order they were added."""
        self._refresh()
        return self._by_use.get((provider, tenant)) or self._by_use.get((provider, ""), ())

    def of(self, provider: str) -> Callable[[str], Sequence[str]]:
        """`keys` of one provider."""
        return lambda tenant: self.keys(provider, tenant)

    def listed(self) -> Sequence[SealedKey]:
        """All keys; show their ids only."""
        return self._read()

    def add(self, provider: str, key: str, tenant: str = "", now_unix_s: int = 0) -> str:
        """Seal one more key; returns its id. A key that is there already stays as it is."""
        if not key or len(key) > MAX_KEY_CHARS or not all("!" <= letter <= "~" for letter in key):
            raise BadRequest("a key is printable ASCII without spaces", field="key")
        added = SealedKey(provider, key, tenant, now_unix_s)
        with self._locked():
            held = self._read()
            if len(held) >= MAX_KEYS:
                raise BadRequest(f"{MAX_KEYS} keys are kept at the most", next_step="remove those that are not used")
            if not any((one.provider, one.tenant, one.key) == (provider, tenant, key) for one in held):
                self._write((*held, added))
        return added.id

    def remove(self, provider: str, key_id: str, tenant: str | None = None) -> None:
        """Forget a key. tenant: None for everybody's. Raises NotFound."""
        with self._locked():
            held = self._read()
            left = tuple(
                one
                for one in held
                if one.provider != provider or one.id != key_id or (tenant is not None and one.tenant != tenant)
            )
            if len(left) == len(held):
                raise NotFound(f"{provider} has no key {key_id}", next_step="see `midstream providers keys`")
            # Twice, so that the previous copy does not keep it either.
            self._write(left)
            self._write(left)

    def _refresh(self) -> None:
        now_s = self._clock()
        if self._looked_s is not None and now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        by_use: dict[tuple[str, str], tuple[str, ...]] = {}
        for one in self._read():
            by_use[one.provider, one.tenant] = (*by_use.get((one.provider, one.tenant), ()), one.key)
        self._by_use, self._stamp = by_use, stamp

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = (self._folder / SEALED_FILE).stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> tuple[SealedKey, ...]:
        path = self._folder / SEALED_FILE
        if not path.exists():
            return ()
        secret = self._secret(make=False)
        held = read_durable(path, lambda data: _unsealed(data, secret))
        if held is None:
            raise ConfigError(
                f"{path} cannot be opened with {KEY_FILE}",
                next_step="restore both files from one backup, or remove both and add the keys again",
            )
        return held.keys

    def _write(self, keys: tuple[SealedKey, ...]) -> None:
        sealed = _sealed(_Held(SCHEMA, keys), self._secret(make=True))
        write_durable(self._folder / SEALED_FILE, sealed, 0o600)

    def _secret(self, *, make: bool) -> bytes:
        path = self._folder / KEY_FILE
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"{path} can be read by others", next_step=f"chmod 600 {path}")
            secret = path.read_bytes()
        except FileNotFoundError:
            if not make:
                raise ConfigError(
                    f"{path} is missing, and without it {SEALED_FILE} stays shut",
                    next_step="restore it, or remove both files and add the keys again",
                ) from None
            secret = os.urandom(KEY_BYTES)
            write_durable(path, secret, 0o600)
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"{path} has not {KEY_BYTES} bytes", next_step="restore it from a backup")
        return secret

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _sealed(held: _Held, secret: bytes) -> bytes:
    nonce = os.urandom(NONCE_BYTES)
    sealed: bytes = _cipher(secret).encrypt(nonce, encode(held), SCHEMA.encode())
    return nonce + sealed


def _unsealed(data: bytes, secret: bytes) -> _Held:
    """Raises ValueError for bytes that this key did not seal."""
    from cryptography.exceptions import InvalidTag

    try:
        plain = _cipher(secret).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], SCHEMA.encode())
    except InvalidTag as err:
        raise ValueError("sealed by another key, or damaged") from err
    try:
        return decode(_Held, json.loads(plain), what="provider keys")
    except ProtocolError as err:
        raise ValueError(str(err)) from err


def _cipher(secret: bytes):  # type: ignore[no-untyped-def]
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as err:
        raise ConfigError(
            "keys of providers are sealed with the package cryptography, which is not installed",
            next_step="install cryptography, or let the coordinator hold the keys",
        ) from err
    return AESGCM(secret)
