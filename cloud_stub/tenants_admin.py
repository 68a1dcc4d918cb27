"""The operator's endpoints for keys, tenants and their bills, under /midstream/v1/admin."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from attrs import evolve, field, frozen

from gateway.keys import KeyKind, KeyRecord, KeyTable
from gateway.ledger import Bill, Ledger
from gateway.limits import day_of, meters_of, month_of
from gateway.quotas import NANO_PER_USD, Tenant, check_name
from gateway.tenancy import DEFAULT_TENANT, NewKey, Tenancy
from links.port import Request, Response, Route
from protocol.clock import WallClock
from protocol.decode import decode_listing, load_json, plain
from protocol.errors import BadRequest, ProtocolError

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 10
BILL_DAYS = 31


@frozen
class KeyWish:
    """Body of POST /keys. life_s: None lives until it is revoked."""

    kind: KeyKind = "invoke"
    tenant: str = DEFAULT_TENANT
    life_s: float | None = None
    networks: tuple[str, ...] = ()
    note: str = ""


@frozen
class RotateWish:
    """Body of POST /keys/{id}/rotate."""

    overlap_s: float = field(default=0.0)


class TenantsApi:
    """Routes over the tenancy and the ledger."""

    def __init__(self, tenancy: Tenancy, ledger: Ledger, wall: WallClock, prefix: str) -> None:
        self._tenancy = tenancy
        self._ledger = ledger
        self._wall = wall
        self._prefix = prefix

    @property
    def _table(self) -> KeyTable:
        return self._tenancy.table

    def routes(self) -> list[Route]:
        """All of them take and give JSON. A new key's text is in the answer of the call that made it, nowhere else."""
        keys, tenants = f"{self._prefix}/keys", f"{self._prefix}/tenants"
        return [
            Route("GET", keys, self._keys, max_body_bytes=0),
            Route("POST", keys, self._add_key, max_body_bytes=MAX_BODY_BYTES),
            Route("POST", f"{keys}/{{id}}/rotate", self._rotate_key, max_body_bytes=MAX_BODY_BYTES),
            Route("DELETE", f"{keys}/{{id}}", self._revoke_key, max_body_bytes=1024),
            Route("GET", tenants, self._tenants, max_body_bytes=0),
            Route("GET", f"{tenants}/{{name}}", self._tenant, max_body_bytes=0),
            Route("PUT", f"{tenants}/{{name}}", self._set_tenant, max_body_bytes=MAX_BODY_BYTES),
            Route("DELETE", f"{tenants}/{{name}}", self._drop_tenant, max_body_bytes=1024),
        ]

    def _who(self, request: Request) -> str:
        return self._table.admin(request.headers, request.remote).id

    async def _keys(self, request: Request) -> Response:
        now_s = self._wall().unix_s
        records = await asyncio.to_thread(self._tenancy.key_records)
        return _json({"keys": [_shown(record, now_s) for record in records]})

    async def _add_key(self, request: Request) -> Response:
        wish, who = _body(KeyWish, request), self._who(request)

        def add() -> NewKey:
            return self._tenancy.add_key(
                who, wish.kind, wish.tenant, life_s=wish.life_s, networks=wish.networks, note=wish.note
            )

        return self._new(await asyncio.to_thread(add))

    async def _rotate_key(self, request: Request) -> Response:
        wish, who = _body(RotateWish, request), self._who(request)
        return self._new(await asyncio.to_thread(self._tenancy.rotate_key, who, request.params["id"], wish.overlap_s))

    async def _revoke_key(self, request: Request) -> Response:
        record = await asyncio.to_thread(self._tenancy.revoke_key, self._who(request), request.params["id"])
        return _json(_shown(record, self._wall().unix_s))

    async def _tenants(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._tenancy.tenants)
        return _json({"tenants": [plain(tenant) for tenant in found]})

    async def _tenant(self, request: Request) -> Response:
        """The tenant with what it took: today, this month, and day by day."""
        name = check_name(request.params["name"], "name")
        tenant, unix_s = self._table.tenant(name), self._wall().unix_s
        today = day_of(unix_s)
        bills = await self._ledger.bills(name, today - BILL_DAYS + 1, today)
        month = [bill for bill in bills if month_of(bill.day * 86_400.0) == month_of(unix_s)]
        taken = {
            meter.dimension: await self._ledger.taken(name, meter.dimension, meter.slot(unix_s)) / NANO_PER_USD
            for meter in meters_of(tenant.quota)
            if not meter.slot_s
        }
        return _json(
            plain(tenant)
            | {
                "today": _bill([bill for bill in bills if bill.day == today]),
                "month": _bill(month),
                "days": [{"day": bill.day} | _bill([bill]) for bill in bills],
                "set_aside_usd": taken,
            }
        )

    async def _set_tenant(self, request: Request) -> Response:
        name = check_name(request.params["name"], "name")
        wish = evolve(_body(Tenant, request, {"name": name}), name=name)
        return _json(plain(await asyncio.to_thread(self._tenancy.set_tenant, self._who(request), wish)))

    async def _drop_tenant(self, request: Request) -> Response:
        await asyncio.to_thread(self._tenancy.drop_tenant, self._who(request), request.params["name"])
        return _json({"dropped": request.params["name"]})

    def _new(self, made: NewKey) -> Response:
        return _json(_shown(made.record, self._wall().unix_s) | {"key": made.text})


def _shown(record: KeyRecord, now_s: float) -> dict[str, Any]:
    """A key without its hash."""
    found: dict[str, Any] = plain(record)
    del found["sha256"]
    return found | {"alive": record.alive(now_s)}


def _bill(bills: list[Bill]) -> dict[str, Any]:
    return {
        "requests": sum(bill.requests for bill in bills),
        "prompt_tokens": sum(bill.prompt_tokens for bill in bills),
        "completion_tokens": sum(bill.completion_tokens for bill in bills),
        "usd": sum(bill.nano_usd for bill in bills) / NANO_PER_USD,
    }


def _body(cls: type[T], request: Request, defaults: dict[str, Any] | None = None) -> T:
    """A document of an operator: a field that nobody knows is a mistake, not news."""
    try:
        given = load_json(request.body or b"{}", what="the body")
        if not isinstance(given, dict):
            raise ProtocolError("the body is no JSON object")
        found, unknown = decode_listing(cls, {**(defaults or {}), **given}, what="the body")
    except ProtocolError as err:
        raise BadRequest(err.message, next_step=err.next_step, field=err.field) from err
    if unknown:
        raise BadRequest(f"unknown field {unknown[0]!r}", next_step="see docs/coordinator.md", field=unknown[0])
    return found


def _json(document: dict[str, Any]) -> Response:
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return Response(headers=headers, body=json.dumps(document).encode())
