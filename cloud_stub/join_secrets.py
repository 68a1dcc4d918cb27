"""One-time join secrets: hashed on disk, expiring, bound to the first device key that used them.

A used secret still answers the same device with the same key until it expires, so a device that lost the reply may ask
again. Wrong secrets are counted; over the allowance every wrong answer costs the caller a wait, a right one never does.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import deque
from pathlib import Path

from attrs import evolve, frozen

from protocol.clock import Clock
from protocol.decode import decode, encode
from protocol.durable import read_durable, write_durable
from protocol.errors import Full, NotAllowed

MAX_OPEN_SECRETS = 64
"""Secrets kept at once; making one more drops the oldest."""

FAILURES_PER_MINUTE = 10
WINDOW_S = 60.0
MAX_SECRET_CHARS = 128


@frozen
class SecretRecord:
    """One secret. device_id and key_sha256 are empty until it was used."""

    sha256: str
    expires_s: float
    device_id: str = ""
    key_sha256: str = ""


@frozen
class SecretFile:
    """join.json."""

    secrets: tuple[SecretRecord, ...] = ()


class JoinSecrets:
    """The open secrets of one coordinator; wall seconds are given, `clock` only paces failures.

    Calls wait for the disk, so they are for threads; one runs at a time.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._one_at_a_time = threading.Lock()
        found = read_durable(path, lambda data: decode(SecretFile, data, what="join.json"))
        self._records = list(found.secrets) if found else []
        self._failures: deque[float] = deque(maxlen=FAILURES_PER_MINUTE)

    def mint(self, life_s: float, now_s: float) -> str:
        """A new secret; only its hash is kept."""
        secret = secrets.token_urlsafe(16)
        with self._one_at_a_time:
            kept = [r for r in self._records if r.expires_s > now_s][-(MAX_OPEN_SECRETS - 1) :]
            self._save([*kept, SecretRecord(_sha256(secret), now_s + life_s)])
        return secret

    def check(self, secret: str, device_id: str, now_s: float) -> SecretRecord:
        """The record of a secret that `device_id` may use. Raises NotAllowed, or Full after too many failures."""
        with self._one_at_a_time:
            record = self._find(_sha256(secret[:MAX_SECRET_CHARS]))
            if record is None:
                raise self._refusal("the join secret is not known here")
            if record.expires_s <= now_s:
                raise self._refusal("the join secret has expired")
            if record.device_id and record.device_id != device_id:
                raise self._refusal("the join secret was already used by another device")
            return record

    def redeem(self, record: SecretRecord, device_id: str, key_sha256: str) -> None:
        """Bind the secret to this device and key, durably. Raises NotAllowed when it is bound to another key."""
        with self._one_at_a_time:
            held = self._find(record.sha256)
            if held is None:
                raise self._refusal("the join secret is not known here")
            if held.device_id:
                if (held.device_id, held.key_sha256) != (device_id, key_sha256):
                    raise self._refusal("the join secret was already used with another key")
                return
            used = evolve(held, device_id=device_id, key_sha256=key_sha256)
            self._save([used if r.sha256 == held.sha256 else r for r in self._records])

    def _find(self, wanted: str) -> SecretRecord | None:
        found = None
        for record in self._records:  # all of them, so that time says nothing about which
            if hmac.compare_digest(record.sha256, wanted):
                found = record
        return found

    def _refusal(self, why: str) -> NotAllowed | Full:
        now = self._clock()
        recent = [at for at in self._failures if now - at < WINDOW_S]
        self._failures.append(now)
        if len(recent) >= FAILURES_PER_MINUTE:
            return Full("too many joins failed in the last minute", retry_after_s=WINDOW_S - (now - recent[0]))
        return NotAllowed(why, next_step="make a new join string: midstream coordinator token", field="secret")

    def _save(self, records: list[SecretRecord]) -> None:
        write_durable(self._path, encode(SecretFile(tuple(records))))
        self._records = records


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
