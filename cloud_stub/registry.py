"""What the coordinator knows of its devices and its policy history: a port, its SQLite form, and the presence rule.

Facts about a device come from its own retained documents, so a lost database heals by itself: `open_registry` moves a
damaged file aside and the devices' births and profiles fill a new one (their certificates stay valid).
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from attrs import field, frozen

from protocol.decode import decode, encode
from protocol.documents import Presence, Registration, Reported
from protocol.durable import open_sqlite
from protocol.errors import ConfigError, MidstreamError

log = logging.getLogger("midstream.coordinator")

MAX_DEVICES = 100_000
"""Rows of one embedded registry; a fleet beyond this uses another implementation of the port."""

LATEST_CHECKPOINT_PAGES = 8_192
"""32 MB: so large the log grows when nobody calls `checkpoint`; then a write does it."""

MAX_HISTORY = 1_000
"""Policy documents kept; older ones are dropped."""

_MIGRATIONS = (
    """
    CREATE TABLE devices (
        device_id TEXT PRIMARY KEY, key_sha256 TEXT, enrolled_s REAL, revoked INTEGER NOT NULL DEFAULT 0,
        presence BLOB, registration BLOB, reported BLOB, seen_s REAL NOT NULL DEFAULT 0,
        online INTEGER NOT NULL DEFAULT 0, labels TEXT NOT NULL DEFAULT '{}');
    CREATE TABLE policies (
        epoch INTEGER NOT NULL, version INTEGER NOT NULL, published_s REAL NOT NULL, note TEXT NOT NULL,
        envelope BLOB NOT NULL, PRIMARY KEY (epoch, version));
    """,
    """
    CREATE TABLE forgotten (
        device_id TEXT NOT NULL, key_sha256 TEXT NOT NULL, revoked INTEGER NOT NULL,
        PRIMARY KEY (device_id, key_sha256));
    CREATE INDEX forgotten_keys ON forgotten (key_sha256);
    """,
)


_COLUMNS = "device_id, key_sha256, enrolled_s, revoked, presence, registration, reported, seen_s"


@frozen(kw_only=True)
class Device:
    """One row. `enrolled_s` is None for a device that was only ever seen on the broker."""

    device_id: str
    key_sha256: str | None = None
    enrolled_s: float | None = None
    revoked: bool = False
    presence: Presence | None = None
    registration: Registration | None = None
    reported: Reported | None = None
    seen_s: float = 0.0

    @property
    def labels(self) -> Mapping[str, str]:
        return self.registration.profile.labels if self.registration else {}

    @property
    def online(self) -> bool:
        return self.presence is not None and self.presence.s != "offline"


@frozen
class Counts:
    """Devices known, and those whose presence is not offline."""

    devices: int
    online: int


@frozen
class PublishedPolicy:
    """One document of the history: the encoded envelope as it was published."""

    epoch: int
    version: int
    published_s: float
    note: str
    envelope: bytes = field(repr=False)


class DeviceRegistry(Protocol):
    """The registry's port. Calls are short and may block for one disk write."""

    def device(self, device_id: str) -> Device | None: ...
    def devices(self) -> Sequence[Device]: ...
    def ids(self) -> Sequence[str]: ...
    def labels(self) -> Mapping[str, Mapping[str, str]]: ...
    def counts(self) -> Counts: ...
    def may_enter(self, device_id: str, key_sha256: str | None) -> bool: ...
    def was_revoked(self, key_sha256: str) -> bool: ...
    def enrol(self, device_id: str, key_sha256: str, now_s: float) -> None: ...
    def forget(self, device_id: str) -> bool: ...
    def revoke(self, device_id: str) -> bool: ...
    def note_presence(self, device_id: str, presence: Presence, now_s: float) -> bool: ...
    def note_registration(self, device_id: str, registration: Registration, now_s: float) -> bool: ...
    def note_reported(self, device_id: str, reported: Reported, now_s: float) -> None: ...
    def add_policy(self, policy: PublishedPolicy) -> None: ...
    def policies(self) -> Sequence[PublishedPolicy]: ...
    def newest_version(self, epoch: int) -> int: ...
    def checkpoint(self) -> None: ...
    def close(self) -> None: ...


def supersedes(incoming: Presence, held: Presence | None) -> bool:
    """Whether `incoming` may replace `held`: MQTT orders a topic per sender only, and the broker sends the will.

    A document of an older epoch is a will (or a birth) that was overtaken. Within one epoch the last one counts.
    """
    return held is None or incoming.epoch >= held.epoch


class SqliteRegistry:
    """DeviceRegistry in one SQLite file; one thread at a time.

    A write goes to the log and does not wait for the disk, so that an event loop can do it; `checkpoint` does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = open_sqlite(path, _MIGRATIONS)
        try:
            self._do(f"PRAGMA wal_autocheckpoint={LATEST_CHECKPOINT_PAGES}", ())
            self._check()
        except BaseException:
            self._db.close()
            raise

    def checkpoint(self) -> None:
        """Move the log into the main file: the one step that waits for the disk. May run beside all other calls, in a
        thread, over a connection of its own. Raises ConfigError.
        """
        try:
            with closing(sqlite3.connect(self._path, timeout=1.0)) as own:
                own.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as err:
            raise self._error(err) from err

    def device(self, device_id: str) -> Device | None:
        rows = self._all(f"SELECT {_COLUMNS} FROM devices WHERE device_id=?", (device_id,))
        return _device(rows[0]) if rows else None

    def devices(self) -> Sequence[Device]:
        """All of them with all their documents: for listings, not for the way of a request."""
        return [_device(row) for row in self._all(f"SELECT {_COLUMNS} FROM devices ORDER BY device_id", ())]

    def ids(self) -> Sequence[str]:
        return [row[0] for row in self._all("SELECT device_id FROM devices ORDER BY device_id", ())]

    def labels(self) -> Mapping[str, Mapping[str, str]]:
        """Labels by device, no other part of the documents read."""
        return {row[0]: json.loads(row[1]) for row in self._all("SELECT device_id, labels FROM devices", ())}

    def counts(self) -> Counts:
        return Counts(*self._all("SELECT count(*), coalesce(sum(online), 0) FROM devices", ())[0])

    def may_enter(self, device_id: str, key_sha256: str | None) -> bool:
        """Whether a certificate with this name and key holds: certificates outlive a lost registry, but no `revoke`,
        no `forget`, and no join of the id with another key.
        """
        rows = self._all("SELECT key_sha256, revoked FROM devices WHERE device_id=?", (device_id,))
        bound, revoked = rows[0] if rows else (None, 0)
        if revoked or (key_sha256 is not None and self.was_revoked(key_sha256)):
            return False
        return bool(bound == key_sha256) if bound is not None else not self._is_forgotten(device_id)

    def was_revoked(self, key_sha256: str) -> bool:
        """Whether a device with this key was revoked and then forgotten."""
        return bool(self._all("SELECT 1 FROM forgotten WHERE key_sha256=? AND revoked=1", (key_sha256,)))

    def enrol(self, device_id: str, key_sha256: str, now_s: float) -> None:
        """Bind the id to a key; the caller has checked that it is free or has this key."""
        self._room_for(device_id)
        self._do("DELETE FROM forgotten WHERE device_id=? AND revoked=0", (device_id,))
        self._do(
            "INSERT INTO devices (device_id, key_sha256, enrolled_s) VALUES (?,?,?) ON CONFLICT (device_id) DO UPDATE "
            "SET key_sha256=excluded.key_sha256, enrolled_s=excluded.enrolled_s, revoked=0",
            (device_id, key_sha256, now_s),
        )

    def forget(self, device_id: str) -> bool:
        """Drop everything known; the id is free for another key. False when unknown.

        Its certificate is refused until the id joins again; the key of a revoked device for ever.
        """
        self._do(
            "INSERT OR REPLACE INTO forgotten (device_id, key_sha256, revoked) "
            "SELECT device_id, coalesce(key_sha256, ''), revoked FROM devices WHERE device_id=?",
            (device_id,),
        )
        return self._do("DELETE FROM devices WHERE device_id=?", (device_id,)) > 0

    def revoke(self, device_id: str) -> bool:
        """Refuse the device from now on, whatever certificate it shows. False when unknown."""
        return self._do("UPDATE devices SET revoked=1 WHERE device_id=?", (device_id,)) > 0

    def note_presence(self, device_id: str, presence: Presence, now_s: float) -> bool:
        """Keep a presence document unless it is stale; False when it was dropped."""
        held = self.device(device_id)
        if not supersedes(presence, held.presence if held else None):
            return False
        self._put(device_id, {"presence": encode(presence), "online": int(presence.s != "offline")}, now_s)
        return True

    def note_registration(self, device_id: str, registration: Registration, now_s: float) -> bool:
        """Keep a registration; False when nothing changed."""
        held = self.device(device_id)
        if held and held.registration and encode(held.registration) == encode(registration):
            return False
        labels = json.dumps(dict(registration.profile.labels), sort_keys=True)
        self._put(device_id, {"registration": encode(registration), "labels": labels}, now_s)
        return True

    def note_reported(self, device_id: str, reported: Reported, now_s: float) -> None:
        self._put(device_id, {"reported": encode(reported)}, now_s)

    def add_policy(self, policy: PublishedPolicy) -> None:
        self._do(
            "INSERT INTO policies (epoch, version, published_s, note, envelope) VALUES (?,?,?,?,?)",
            (policy.epoch, policy.version, policy.published_s, policy.note, policy.envelope),
        )
        self._do(
            "DELETE FROM policies WHERE rowid NOT IN (SELECT rowid FROM policies ORDER BY epoch DESC, version DESC "
            f"LIMIT {MAX_HISTORY})",
            (),
        )

    def policies(self) -> Sequence[PublishedPolicy]:
        """The history, newest first."""
        rows = self._all(
            "SELECT epoch, version, published_s, note, envelope FROM policies ORDER BY epoch DESC, version DESC", ()
        )
        return [PublishedPolicy(*row) for row in rows]

    def newest_version(self, epoch: int) -> int:
        """The greatest version of an epoch; 0 before its first."""
        found: int = self._all("SELECT coalesce(max(version), 0) FROM policies WHERE epoch=?", (epoch,))[0][0]
        return found

    def close(self) -> None:
        self._db.close()

    def _is_forgotten(self, device_id: str) -> bool:
        return bool(self._all("SELECT 1 FROM forgotten WHERE device_id=?", (device_id,)))

    def _put(self, device_id: str, values: Mapping[str, Any], now_s: float) -> None:
        known = self._all("SELECT 1 FROM devices WHERE device_id=?", (device_id,))
        if not known and self._is_forgotten(device_id):
            return  # what its last session left behind must not bring it back
        self._room_for(device_id)
        columns = [*values, "seen_s"]
        changes = ", ".join(f"{name}=excluded.{name}" for name in columns)
        self._do(
            f"INSERT INTO devices (device_id, {', '.join(columns)}) VALUES (?{',?' * len(columns)}) "
            f"ON CONFLICT (device_id) DO UPDATE SET {changes}",
            (device_id, *values.values(), now_s),
        )

    def _room_for(self, device_id: str) -> None:
        known = self._all("SELECT 1 FROM devices WHERE device_id=?", (device_id,))
        if not known and self._all("SELECT count(*) FROM devices", ())[0][0] >= MAX_DEVICES:
            raise ConfigError(
                f"the registry holds {MAX_DEVICES} devices, its maximum",
                next_step="forget devices that are gone: midstream fleet forget ID",
            )

    def _check(self) -> None:
        found = self._all("PRAGMA quick_check(1)", ())
        if found[0][0] != "ok":
            raise ConfigError(f"{self._path} is damaged: {found[0][0]}")
        self._all(f"SELECT {_COLUMNS} FROM devices LIMIT 1", ())

    def _all(self, sql: str, values: tuple[Any, ...]) -> list[Any]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as err:
            raise self._error(err) from err

    def _do(self, sql: str, values: tuple[Any, ...]) -> int:
        try:
            return self._db.execute(sql, values).rowcount
        except sqlite3.Error as err:
            raise self._error(err) from err

    def _error(self, err: sqlite3.Error) -> ConfigError:
        step = (
            f"free some space on the disk of {self._path.parent}" if "full" in str(err) else "restart the coordinator"
        )
        return ConfigError(f"cannot use the registry {self._path}: {err}", next_step=step)


@frozen
class OpenedRegistry:
    """`fresh`: there was no history before, or it was damaged and moved to `moved_to`."""

    registry: SqliteRegistry
    fresh: bool
    moved_to: Path | None = None


def open_registry(path: Path) -> OpenedRegistry:
    """Open the database; one that cannot be read is moved aside and a new one begun (devices register again)."""
    existed = path.exists()
    try:
        return OpenedRegistry(SqliteRegistry(path), fresh=not existed)
    except ConfigError as err:
        if not existed or not _is_damaged(path):
            raise
        aside = _move_aside(path)
        log.error("the registry was damaged (%s); it was moved to %s and a new one begun", err.message, aside)
        return OpenedRegistry(SqliteRegistry(path), fresh=True, moved_to=aside)


def _is_damaged(path: Path) -> bool:
    """Whether SQLite itself says so: a full disk or a missing right is not damage."""
    try:
        probe = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    except sqlite3.Error:
        return False
    try:
        found = probe.execute("PRAGMA quick_check(1)").fetchone()
        version = probe.execute("PRAGMA user_version").fetchone()[0]
        probe.execute("SELECT * FROM devices LIMIT 1")
    except sqlite3.OperationalError as err:
        return "no such table" in str(err)
    except sqlite3.DatabaseError:
        return True
    finally:
        probe.close()
    return bool(found[0] != "ok") and version <= len(_MIGRATIONS)


def _move_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        side = path.with_name(path.name + suffix)
        if side.exists():
            side.replace(aside.with_name(aside.name + suffix))
    return aside


def _device(row: Sequence[Any]) -> Device:
    device_id, key, enrolled_s, revoked, presence, registration, reported, seen_s = row
    return Device(
        device_id=device_id,
        key_sha256=key,
        enrolled_s=enrolled_s,
        revoked=bool(revoked),
        presence=_stored(Presence, presence),
        registration=_stored(Registration, registration),
        reported=_stored(Reported, reported),
        seen_s=seen_s,
    )


def _stored(cls: type[Any], data: bytes | None) -> Any:
    """A document written by an earlier release may no longer decode; the device sends it again."""
    if data is None:
        return None
    try:
        return decode(cls, data, what="a stored document")
    except MidstreamError:
        return None


def summary(device: Device, now_s: float) -> dict[str, Any]:
    """One device as plain JSON for `fleet list` and its endpoint."""
    registration, reported = device.registration, device.reported
    profile = registration.profile if registration else None
    return {
        "device_id": device.device_id,
        "state": "revoked" if device.revoked else device.presence.s if device.presence else "never seen",
        "seen_before_s": round(now_s - device.seen_s, 1) if device.seen_s else None,
        "enrolled": device.enrolled_s is not None,
        "labels": dict(device.labels),
        "soc": profile.soc if profile else None,
        "cores": profile.cores if profile else None,
        "engines": dict(profile.engines) if profile else {},
        "models": list(registration.models) if registration else [],
        "policy": reported.held_version if reported else None,
        "policy_code": reported.code if reported else None,
    }
