"""Where keys and tenants are kept: the port, its form in memory, and SQLite. Calls wait for the disk: use threads."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gateway.keys import KeyKind, KeyRecord
from gateway.quotas import Tenant
from protocol.decode import decode, encode
from protocol.durable import open_sqlite, written
from protocol.errors import BadRequest, ConfigError

MAX_KEYS = 10_000
MAX_TENANTS = 1_000


class TenantStore(Protocol):
    """Durable when a method returns. Raises ConfigError when the store cannot be used."""

    def key_records(self) -> Sequence[KeyRecord]:
        """All of them, also expired and revoked ones, oldest first."""
        ...

    def tenants(self) -> Sequence[Tenant]:
        """By name."""
        ...

    def put_keys(self, records: Sequence[KeyRecord]) -> None:
        """Add or replace by id, all or none. Raises BadRequest when there are too many."""
        ...

    def put_tenant(self, tenant: Tenant) -> None:
        """Add or replace by name. Raises BadRequest when there are too many."""
        ...

    def drop_tenant(self, name: str) -> None: ...

    def changed(self) -> bool:
        """Whether another process wrote since this was last asked."""
        ...

    def close(self) -> None: ...


class MemoryTenants:
    """Keeps nothing."""

    def __init__(self) -> None:
        self._keys: dict[str, KeyRecord] = {}
        self._tenants: dict[str, Tenant] = {}

    def key_records(self) -> Sequence[KeyRecord]:
        return sorted(self._keys.values(), key=lambda record: record.created_s)

    def tenants(self) -> Sequence[Tenant]:
        return [self._tenants[name] for name in sorted(self._tenants)]

    def put_keys(self, records: Sequence[KeyRecord]) -> None:
        after = self._keys | {record.id: record for record in records}
        _check_count(len(after), MAX_KEYS, "keys")
        self._keys = after

    def put_tenant(self, tenant: Tenant) -> None:
        _check_count(len(self._tenants | {tenant.name: tenant}), MAX_TENANTS, "tenants")
        self._tenants[tenant.name] = tenant

    def drop_tenant(self, name: str) -> None:
        self._tenants.pop(name, None)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to close."""


MIGRATIONS = (
    """
    CREATE TABLE key (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, tenant TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE,
        created_s REAL NOT NULL, expires_s REAL, revoked_s REAL, networks TEXT NOT NULL, note TEXT NOT NULL,
        replaces TEXT NOT NULL
    );
    CREATE TABLE tenant (name TEXT PRIMARY KEY, document BLOB NOT NULL);
    """,
)


class SqliteTenants:
    """One file that several gateways of one machine may share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = open_sqlite(path, MIGRATIONS)
        self._db.execute("PRAGMA synchronous=FULL")
        self._one_at_a_time = threading.Lock()
        self._version = self._data_version()

    def key_records(self) -> Sequence[KeyRecord]:
        rows = self._ask(
            "SELECT id, kind, tenant, sha256, created_s, expires_s, revoked_s, networks, note, replaces FROM key"
            " ORDER BY created_s, id"
        )
        return [_record(*row) for row in rows]

    def tenants(self) -> Sequence[Tenant]:
        rows = self._ask("SELECT document FROM tenant ORDER BY name")
        return [decode(Tenant, bytes(row[0]), what="tenant") for row in rows]

    def put_keys(self, records: Sequence[KeyRecord]) -> None:
        rows = [
            (
                r.id, r.kind, r.tenant, r.sha256, r.created_s, r.expires_s, r.revoked_s, json.dumps(r.networks), r.note,
                r.replaces,
            )
            for r in records
        ]  # fmt: skip
        with self._written():
            self._db.executemany(f"INSERT OR REPLACE INTO key VALUES ({', '.join('?' * 10)})", rows)
            _check_count(self._db.execute("SELECT count(*) FROM key").fetchone()[0], MAX_KEYS, "keys")

    def put_tenant(self, tenant: Tenant) -> None:
        with self._written():
            self._db.execute("INSERT OR REPLACE INTO tenant VALUES (?, ?)", (tenant.name, encode(tenant)))
            _check_count(self._db.execute("SELECT count(*) FROM tenant").fetchone()[0], MAX_TENANTS, "tenants")

    def drop_tenant(self, name: str) -> None:
        with self._written():
            self._db.execute("DELETE FROM tenant WHERE name = ?", (name,))

    def changed(self) -> bool:
        with self._one_at_a_time:
            before, self._version = self._version, self._data_version()
        return before != self._version

    def close(self) -> None:
        with self._one_at_a_time:
            self._db.close()

    def _data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _ask(self, sql: str) -> list[Any]:
        with self._one_at_a_time:
            try:
                return self._db.execute(sql).fetchall()
            except sqlite3.Error as err:
                raise self._broken(err) from err

    @contextmanager
    def _written(self) -> Iterator[None]:
        """One transaction, durable at its end."""
        with self._one_at_a_time:
            try:
                with written(self._db):
                    yield
            except sqlite3.Error as err:
                raise self._broken(err) from err

    def _broken(self, err: sqlite3.Error) -> ConfigError:
        return ConfigError(f"cannot use {self._path}: {err}", next_step="check the disk and the file")


def _record(
    id: str, kind: KeyKind, tenant: str, sha256: str, created_s: float, expires_s: float | None,
    revoked_s: float | None, networks: str, note: str, replaces: str,
) -> KeyRecord:  # fmt: skip
    return KeyRecord(
        id, kind, tenant, sha256, created_s, expires_s, revoked_s, tuple(json.loads(networks)), note, replaces
    )


def _check_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise BadRequest(f"there are {most} {what} already", next_step="remove some that nobody uses")
