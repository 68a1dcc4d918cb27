"""Keys of two kinds: who may do what, from where, until when; their management, and the store behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from gateway.keys import KeyRecord, KeyTable, check_networks, new_key, presented, rotated, sha256_of
from gateway.quotas import Quota, Tenant
from gateway.tenancy import Tenancy
from gateway.tenant_store import MemoryTenants, SqliteTenants, TenantStore
from protocol.clock import WallTime
from protocol.errors import BadRequest, NotAllowed, NotFound, Unauthenticated

NOW_S = 1_790_000_000.0


class Wall:
    now_s = NOW_S

    def __call__(self) -> WallTime:
        return WallTime(self.now_s, True)


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def record(text: str = "k", **changes: Any) -> KeyRecord:
    return evolve(KeyRecord("key-1", "invoke", "acme", sha256_of(text), NOW_S), **changes)


def test_an_invoke_key_asks_and_an_admin_key_manages_and_neither_does_both() -> None:
    table = KeyTable(Wall(), [record("i"), record("a", id="key-2", kind="admin")], [Tenant("acme", models=("m",))])
    caller = table.caller(bearer("i"), None)
    assert (caller.tenant, caller.key_id, caller.models) == ("acme", "key-1", frozenset({"m"}))
    assert table.admin(bearer("a"), None).id == "key-2"
    with pytest.raises(NotAllowed, match="admin keys cannot invoke") as no_traffic:
        table.caller(bearer("a"), None)
    assert no_traffic.value.http_status == 403
    with pytest.raises(NotAllowed, match="neither bills nor configuration"):
        table.admin(bearer("i"), None)


@pytest.mark.parametrize("headers", [{}, bearer(""), bearer("x"), {"authorization": "Basic k"}, bearer("k" * 300)])
def test_no_key_or_an_unknown_one_is_401(headers: Mapping[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        KeyTable(Wall(), [record()]).caller(headers, None)


def test_keys_come_in_the_headers_of_the_usual_clients() -> None:
    assert presented(bearer("k")) == presented({"x-api-key": "k"}) == presented({"api-key": "k"}) == "k"


def test_a_device_needs_no_key_and_a_key_that_it_sends_counts() -> None:
    table = KeyTable(Wall(), [record()])
    assert table.caller({}, None, "pi-1").tenant == "fleet"
    assert table.caller(bearer("k"), None, "pi-1").tenant == "acme"
    assert table.caller(bearer("a placeholder"), None, "pi-1").tenant == "fleet", "stock clients always send one"


def test_expired_and_revoked_keys_are_refused() -> None:
    wall = Wall()
    table = KeyTable(wall, [record("e", expires_s=NOW_S + 10), record("r", id="key-2", revoked_s=NOW_S - 1)])
    table.caller(bearer("e"), None)
    wall.now_s = NOW_S + 10
    with pytest.raises(Unauthenticated, match="expired"):
        table.caller(bearer("e"), None)
    with pytest.raises(Unauthenticated, match="revoked"):
        table.caller(bearer("r"), None)


@pytest.mark.parametrize(
    ("networks", "ip", "allowed"),
    [
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("fd00::/8",), "fd12::1", True),
        (("fd00::/8",), "fe80::1%eth0", False),
        (("10.0.0.0/8", "192.168.1.7"), "192.168.1.7", True),
        (("10.0.0.0/8",), None, False),
        (("10.0.0.0/8",), "nonsense", False),
    ],
)
def test_a_key_may_be_bound_to_networks(networks: tuple[str, ...], ip: str | None, allowed: bool) -> None:
    table = KeyTable(Wall(), [record(networks=check_networks(networks))])
    for _ in range(2):  # asked, then remembered
        if allowed:
            table.caller(bearer("k"), ip)
        else:
            with pytest.raises(NotAllowed):
                table.caller(bearer("k"), ip)


def test_addresses_that_are_remembered_are_bounded() -> None:
    table = KeyTable(Wall(), [record(networks=("10.0.0.0/8",))])
    for number in range(10_000):
        table.caller(bearer("k"), f"10.0.{number >> 8}.{number & 255}")
    assert len(table._places) <= 4096


def test_rotation_keeps_rights_and_lifetime_and_the_old_key_for_the_overlap() -> None:
    old = record(expires_s=NOW_S + 100, networks=("10.0.0.0/8",))
    ending, new = rotated(old, "key-2", sha256_of("n"), NOW_S + 60, 20)
    assert ending.expires_s == NOW_S + 80
    assert (new.tenant, new.networks, new.expires_s, new.replaces) == ("acme", ("10.0.0.0/8",), NOW_S + 160, "key-1")
    assert rotated(old, "key-2", "h", NOW_S, 10**6)[0].expires_s == NOW_S + 100, "never longer than it had"


@pytest.fixture(params=("memory", "sqlite"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TenantStore]:
    found: TenantStore = MemoryTenants() if request.param == "memory" else SqliteTenants(tmp_path / "t.sqlite")
    yield found
    found.close()


def test_the_whole_life_of_a_key_and_what_is_recorded_of_it(store: TenantStore) -> None:
    log: list[tuple[str, str, str, Mapping[str, Any]]] = []
    wall = Wall()
    tenancy = Tenancy(store, wall, lambda *entry: log.append(entry))
    with pytest.raises(NotFound):
        tenancy.add_key("boss", "invoke", "acme")
    tenancy.set_tenant("boss", Tenant("acme", models=("m",), quota=Quota(usd_per_day=1.0)))
    made = tenancy.add_key("boss", "invoke", "acme", life_s=100.0, networks=("10.0.0.1",), note="shop")
    assert made.text.startswith("msk-") and made.text not in repr(tenancy.key_records())
    assert tenancy.table.caller(bearer(made.text), "10.0.0.1").models == frozenset({"m"})
    with pytest.raises(BadRequest, match="has keys"):
        tenancy.drop_tenant("boss", "acme")
    after = tenancy.rotate_key("boss", made.record.id, overlap_s=50.0)
    for text in (made.text, after.text):
        tenancy.table.caller(bearer(text), "10.0.0.1")
    wall.now_s += 60
    with pytest.raises(Unauthenticated):
        tenancy.table.caller(bearer(made.text), "10.0.0.1")
    tenancy.table.caller(bearer(after.text), "10.0.0.1")
    tenancy.revoke_key("boss", after.record.id)
    with pytest.raises(Unauthenticated):
        tenancy.table.caller(bearer(after.text), "10.0.0.1")
    with pytest.raises(BadRequest, match="ended already"):
        tenancy.rotate_key("boss", after.record.id)
    tenancy.drop_tenant("boss", "acme")
    assert [action for _, action, _, _ in log] == ["tenant.set", "key.add", "key.rotate", "key.revoke", "tenant.drop"]
    assert made.text not in repr(log) and after.text not in repr(log)


def test_the_first_keys_are_adopted_once_and_replaced_when_made_anew(store: TenantStore) -> None:
    tenancy = Tenancy(store, Wall())
    for text in ("one", "one", "two"):
        tenancy.adopt("client", "invoke", sha256_of(text), "")
    assert [key.sha256 for key in tenancy.key_records()] == [sha256_of("two")]
    tenancy.revoke_key("boss", "client")
    tenancy.adopt("client", "invoke", sha256_of("two"), "")
    with pytest.raises(Unauthenticated):
        tenancy.table.caller(bearer("two"), None)


@pytest.mark.parametrize(
    ("wish", "where"),
    [
        ({"life_s": 0.0}, "life_s"),
        ({"networks": ("10.0.0.1/8",)}, "networks"),
        ({"networks": ("1.1.1.1",) * 40}, "networks"),
        ({"note": "x" * 300}, "note"),
        ({"tenant": "../x"}, "tenant"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_by_field(wish: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Tenancy(MemoryTenants(), Wall()).add_key("boss", "invoke", **wish)
    assert refused.value.field == where


def test_another_process_sees_changes_at_its_next_look(tmp_path: Path) -> None:
    here, there = (Tenancy(SqliteTenants(tmp_path / "t.sqlite"), Wall()) for _ in range(2))
    made = here.add_key("boss", "invoke")
    with pytest.raises(Unauthenticated):
        there.table.caller(bearer(made.text), None)
    there.refresh()
    tenant = there.table.tenant("default")
    there.table.caller(bearer(made.text), None)
    there.refresh()
    assert there.table.tenant("default") is tenant, "nothing changed, nothing is made anew"
    for one in (here, there):
        one.close()


def test_no_two_keys_are_alike() -> None:
    assert len({new_key("invoke") for _ in range(100)}) == 100
    assert all(len(new_key(kind)) > 40 for kind in ("invoke", "admin"))  # type: ignore[arg-type]
