"""Managing keys and tenants: the store and the table of what is in force, changed together, every change recorded.

Methods wait for the disk, so they are for threads; one runs at a time.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, frozen

from gateway.keys import FLEET, KeyKind, KeyRecord, KeyTable, check_networks, new_key, rotated, sha256_of
from gateway.quotas import Tenant, check_name, check_tenant
from gateway.tenant_store import TenantStore
from protocol.clock import WallClock
from protocol.errors import BadRequest, NotFound

DEFAULT_TENANT = "default"
MOST_LIFE_S = 10 * 366 * 86_400.0
MOST_OVERLAP_S = 90 * 86_400.0
MAX_NOTE_CHARS = 200

Record = Callable[[str, str, str, Mapping[str, Any]], None]
"""Takes (who, what was done, to what, details without secrets) of a change."""


def _unrecorded(who: str, action: str, subject: str, detail: Mapping[str, Any]) -> None:
    """For a house without an audit."""


@frozen
class NewKey:
    """A key that was just made: its text is shown once and kept nowhere."""

    text: str
    record: KeyRecord


class Tenancy:
    """Keys and tenants of one house. `table` is what requests are judged by.

    fixed: keys that are not managed here, with what to do instead.
    """

    def __init__(
        self,
        store: TenantStore,
        wall: WallClock,
        record: Record = _unrecorded,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._fixed = fixed or {}
        self.table = KeyTable(wall)
        self._store = store
        self._wall = wall
        self._record = record
        self._one_at_a_time = threading.Lock()
        self._load()

    def key_records(self) -> list[KeyRecord]:
        """All of them, oldest first."""
        return list(self._store.key_records())

    def tenants(self) -> list[Tenant]:
        """Those that were described; `default` and `fleet` exist without."""
        return list(self._store.tenants())

    def add_key(
        self,
        who: str,
        kind: KeyKind,
        tenant: str = DEFAULT_TENANT,
        *,
        life_s: float | None = None,
        networks: tuple[str, ...] = (),
        note: str = "",
    ) -> NewKey:
        """A new key. Raises BadRequest for a field that makes no sense, NotFound for an unknown tenant."""
        with self._one_at_a_time:
            self._check_tenant(tenant)
            now_s = self._wall().unix_s
            if life_s is not None and not 1.0 <= life_s <= MOST_LIFE_S:
                raise BadRequest(f"a life of {life_s:g} s", next_step="from 1 s to 10 years", field="life_s")
            if len(note) > MAX_NOTE_CHARS:
                raise BadRequest(f"a note has at most {MAX_NOTE_CHARS} characters", field="note")
            text = new_key(kind)
            record = KeyRecord(
                _new_id(), kind, tenant, sha256_of(text), now_s, now_s + life_s if life_s is not None else None,
                networks=check_networks(networks), note=note,
            )  # fmt: skip
            self._put([record])
            self._record(who, "key.add", record.id, {"kind": kind, "tenant": tenant, "expires_s": record.expires_s})
            return NewKey(text, record)

    def adopt(self, id: str, kind: KeyKind, sha256: str, note: str) -> None:
        """Take a key that the house made before there was a table, unless it is known. A changed one replaces it."""
        with self._one_at_a_time:
            known = self._store.key_records()
            if any(record.sha256 == sha256 for record in known):
                return
            self._put([KeyRecord(id, kind, DEFAULT_TENANT, sha256, self._wall().unix_s, note=note)])
            self._record("first start", "key.add", id, {"kind": kind, "tenant": DEFAULT_TENANT})

    def rotate_key(self, who: str, id: str, overlap_s: float = 0.0) -> NewKey:
        """A key with the same rights; the old one works for `overlap_s` seconds more."""
        if not 0.0 <= overlap_s <= MOST_OVERLAP_S:
            raise BadRequest(f"an overlap of {overlap_s:g} s", next_step="from 0 s to 90 days", field="overlap_s")
        with self._one_at_a_time:
            self._check_fixed(id)
            old, now_s = self._key(id), self._wall().unix_s
            if not old.alive(now_s):
                raise BadRequest(f"key {id} has ended already", next_step="add a new one", field="id")
            text = new_key(old.kind)
            ending, new = rotated(old, _new_id(), sha256_of(text), now_s, overlap_s)
            self._put([ending, new])
            self._record(who, "key.rotate", id, {"new": new.id, "overlap_s": overlap_s})
            return NewKey(text, new)

    def revoke_key(self, who: str, id: str) -> KeyRecord:
        """The key ends now; its record stays."""
        with self._one_at_a_time:
            self._check_fixed(id)
            record = self._key(id)
            if record.revoked_s is None:
                record = evolve(record, revoked_s=self._wall().unix_s)
                self._put([record])
                self._record(who, "key.revoke", id, {})
            return record

    def set_tenant(self, who: str, tenant: Tenant) -> Tenant:
        """Add or replace. Its limits count for the next request."""
        with self._one_at_a_time:
            self._store.put_tenant(check_tenant(tenant))
            self._load()
            detail = {"quota": _plain(tenant), "models": tenant.models, "on_budget": tenant.on_budget}
            self._record(who, "tenant.set", tenant.name, detail)
            return tenant

    def drop_tenant(self, who: str, name: str) -> None:
        """Forget a tenant without live keys. Raises BadRequest for one that has some."""
        with self._one_at_a_time:
            if all(tenant.name != name for tenant in self._store.tenants()):
                raise NotFound(
                    f"there is no tenant {name[:64]!r}", next_step="see midstream tenants list", field="name"
                )
            now_s = self._wall().unix_s
            if any(key.tenant == name and key.alive(now_s) for key in self._store.key_records()):
                raise BadRequest(f"tenant {name} has keys", next_step="revoke them first", field="name")
            self._store.drop_tenant(name)
            self._load()
            self._record(who, "tenant.drop", name, {})

    def refresh(self) -> None:
        """Take what another process wrote."""
        with self._one_at_a_time:
            if self._store.changed():
                self._load()

    def close(self) -> None:
        """Close the store."""
        with self._one_at_a_time:
            self._store.close()

    def _put(self, records: list[KeyRecord]) -> None:
        self._store.put_keys(records)
        self._load()

    def _load(self) -> None:
        self.table.replace(self._store.key_records(), self._store.tenants())

    def _key(self, id: str) -> KeyRecord:
        for record in self._store.key_records():
            if record.id == id:
                return record
        raise NotFound(f"there is no key {id[:64]!r}", next_step="see midstream keys list", field="id")

    def _check_fixed(self, id: str) -> None:
        if id in self._fixed:
            raise BadRequest(f"key {id} is not changed this way", next_step=self._fixed[id], field="id")

    def _check_tenant(self, name: str) -> None:
        check_name(name, "tenant")
        if name not in (DEFAULT_TENANT, FLEET) and all(tenant.name != name for tenant in self._store.tenants()):
            next_step = f"make it first: midstream tenants set {name}"
            raise NotFound(f"there is no tenant {name!r}", next_step=next_step, field="tenant")


def _new_id() -> str:
    return "key-" + secrets.token_hex(5)


def _plain(tenant: Tenant) -> dict[str, Any]:
    quota = tenant.quota
    found = {
        "requests_per_s": quota.requests_per_s, "tokens_per_min": quota.tokens_per_min,
        "max_concurrent": quota.max_concurrent, "usd_per_day": quota.usd_per_day, "usd_per_month": quota.usd_per_month,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}
