"""API keys of two kinds, as hashes: invoke keys ask models and see nothing else, admin keys manage and ask nothing.

A key is 256 random bits, so one SHA-256 is enough to keep it, and looking a hash up tells nothing about its neighbours.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from typing import Literal

from attrs import evolve, frozen

from gateway.context import Caller
from gateway.quotas import Tenant
from protocol.clock import WallClock
from protocol.errors import BadRequest, NotAllowed, Unauthenticated

KeyKind = Literal["admin", "invoke"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PREFIXES: Mapping[str, str] = {"invoke": "msk-", "admin": "mak-"}
MAX_KEY_CHARS = 256
MAX_NETWORKS = 32
MAX_ADDRESSES = 4096
"""Answers about client addresses that are remembered."""

FLEET = "fleet"
"""The tenant of devices that come with a certificate instead of a key."""


@frozen
class KeyRecord:
    """What is kept of a key. Times are wall seconds; expires_s None: never.

    networks: where it may come from, CIDR; none means anywhere. replaces: the key that it was rotated from.
    """

    id: str
    kind: KeyKind
    tenant: str
    sha256: str
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    networks: tuple[str, ...] = ()
    note: str = ""
    replaces: str = ""

    def alive(self, now_s: float) -> bool:
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)


def new_key(kind: KeyKind) -> str:
    """The text of a new key; whoever gets it is the only one who has it."""
    return PREFIXES[kind] + secrets.token_urlsafe(32)


def sha256_of(text: str) -> str:
    """As it is kept and looked up."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_networks(networks: Iterable[str]) -> tuple[str, ...]:
    """The networks in their canonical form. Raises BadRequest."""
    found = []
    for text in networks:
        try:
            found.append(str(ipaddress.ip_network(text)))
        except ValueError as err:
            next_step = "write an address or a network as 10.0.0.0/8"
            raise BadRequest(f"networks has {text[:64]!r}", next_step=next_step, field="networks") from err
    if len(found) > MAX_NETWORKS:
        raise BadRequest(f"networks has {len(found)} entries, at most {MAX_NETWORKS}", field="networks")
    return tuple(found)


def presented(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries, as OpenAI's clients send it or as Anthropic's and Azure's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "") or headers.get("api-key", "")
    return key if 0 < len(key) <= MAX_KEY_CHARS else None


class KeyTable:
    """The keys and tenants in force; `gateway.ports.KeyRing`. `replace` swaps all of it at once."""

    def __init__(self, wall: WallClock, records: Iterable[KeyRecord] = (), tenants: Iterable[Tenant] = ()) -> None:
        self._wall = wall
        self.replace(records, tenants)

    def replace(self, records: Iterable[KeyRecord], tenants: Iterable[Tenant]) -> None:
        """Other keys and tenants from the next request on. A tenant that did not change stays the same object."""
        before: Mapping[str, Tenant] = getattr(self, "_tenants", {})
        self._keys = {record.sha256: record for record in records}
        self._tenants = {
            tenant.name: before[tenant.name] if before.get(tenant.name) == tenant else tenant for tenant in tenants
        }
        self._models = {
            name: frozenset(tenant.models) if tenant.models is not None else None
            for name, tenant in self._tenants.items()
        }
        self._networks = {
            record.id: tuple(ipaddress.ip_network(text) for text in record.networks)
            for record in self._keys.values()
            if record.networks
        }
        self._places: dict[tuple[str, str | None], bool] = {}
        self._callers: dict[str, Caller] = {}

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name; one that nobody described has no limits."""
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = Tenant(name)
        return found

    def caller(self, headers: Mapping[str, str], remote_ip: str | None, peer: str | None = None) -> Caller:
        """Who asks a model. `peer`: a device whose certificate was already judged; it needs no key.

        Raises Unauthenticated for no key, an unknown, expired or revoked one; NotAllowed for an admin key, or a key
        that comes from somewhere it may not.
        """
        text = presented(headers)
        # Stock clients cannot leave their key out: beside a certificate, one that means nothing here says nothing.
        if peer is not None and (text is None or sha256_of(text) not in self._keys):
            return Caller(tenant=FLEET, key_id=f"device:{peer}", models=self._models.get(FLEET))
        record = self._record(text, remote_ip)
        if record.kind == "admin":
            raise NotAllowed("admin keys cannot invoke models", next_step="make an invoke key: midstream keys add")
        found = self._callers.get(record.id)
        if found is None:
            models = self._models.get(record.tenant)
            found = self._callers[record.id] = Caller(tenant=record.tenant, key_id=record.id, models=models)
        return found

    def admin(self, headers: Mapping[str, str], remote_ip: str | None) -> KeyRecord:
        """Who manages. Raises Unauthenticated or NotAllowed, as `caller` does."""
        record = self._record(presented(headers), remote_ip)
        if record.kind != "admin":
            raise NotAllowed("invoke keys see neither bills nor configuration", next_step="use an admin key")
        return record

    def _record(self, text: str | None, remote_ip: str | None) -> KeyRecord:
        if text is None:
            next_step = "send `Authorization: Bearer <key>`; the first start printed one, midstream keys add makes more"
            raise Unauthenticated("this endpoint needs a key", next_step=next_step)
        record = self._keys.get(sha256_of(text))
        if record is None:
            raise Unauthenticated("the key is not known here", next_step="see midstream keys list")
        if not record.alive(self._wall().unix_s):
            what = "was revoked" if record.revoked_s is not None else "has expired"
            raise Unauthenticated(f"key {record.id} {what}", next_step="ask for a new one")
        if record.id in self._networks and not self._from_there(record.id, remote_ip):
            raise NotAllowed(
                f"key {record.id} may not be used from {remote_ip or 'here'}", next_step="see its networks"
            )
        return record

    def _from_there(self, key_id: str, remote_ip: str | None) -> bool:
        known = self._places.get((key_id, remote_ip))
        if known is None:
            if len(self._places) >= MAX_ADDRESSES:
                self._places.clear()
            known = self._places[key_id, remote_ip] = inside(remote_ip, self._networks[key_id])
        return known


def inside(remote_ip: str | None, networks: Iterable[Network]) -> bool:
    """Whether an address lies in one of the networks; IPv4 within IPv6 counts as IPv4."""
    try:
        address = ipaddress.ip_address((remote_ip or "").partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks if network.version == address.version)


def rotated(old: KeyRecord, new_id: str, sha256: str, now_s: float, overlap_s: float) -> tuple[KeyRecord, KeyRecord]:
    """The old key, which ends after the overlap, and the new one with the same rights."""
    until_s = now_s + overlap_s
    ending = until_s if old.expires_s is None else min(old.expires_s, until_s)
    lifetime = None if old.expires_s is None else now_s + (old.expires_s - old.created_s)
    new = evolve(old, id=new_id, sha256=sha256, created_s=now_s, expires_s=lifetime, replaces=old.id)
    return evolve(old, expires_s=ending), new
