"""Keys, tenants and the audit of a running coordinator: endpoints, command line, and what each kind of key may see."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent.cli.main import main
from benchmarks.fake_upstream import serve_upstream
from cloud_stub.admin_client import AdminClient
from cloud_stub.authority import read_admin_key
from gateway.providers import read_providers
from protocol.errors import BadRequest, NotFound
from tests.route.coordinator_house import Running, running


async def verb(coordinator: Running, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit code and JSON answer of one command."""
    state = str(coordinator.house.config.state_dir)
    capsys.readouterr()
    code = await asyncio.to_thread(main, [*words, "--state-dir", state, "--json"])
    return code, json.loads(capsys.readouterr().out)


async def test_the_verbs_make_rotate_and_end_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(tmp_path) as coordinator:
        wish = ("tenants", "set", "acme", "--usd-per-day", "2", "--model", "m", "--on-budget", "degrade")
        code, tenant = await verb(coordinator, capsys, *wish)
        assert code == 0 and tenant["quota"]["usd_per_day"] == 2.0 and tenant["on_budget"] == "degrade"
        _, made = await verb(coordinator, capsys, "keys", "add", "--tenant", "acme", "--life", "90d")
        assert (await coordinator.get("/v1/models", key=made["key"])).status == 200
        _, boss = await verb(coordinator, capsys, "keys", "add", "--admin")
        assert (await coordinator.get("/v1/models", key=boss["key"])).status == 403
        assert (await coordinator.get("/midstream/v1/admin/keys", key=boss["key"])).status == 200
        _, after = await verb(coordinator, capsys, "keys", "rotate", made["id"], "--overlap", "1h")
        for key in (made["key"], after["key"]):
            assert (await coordinator.get("/v1/models", key=key)).status == 200
        await verb(coordinator, capsys, "keys", "revoke", made["id"])
        assert (await coordinator.get("/v1/models", key=made["key"])).status == 401
        _, listed = await verb(coordinator, capsys, "keys", "list")
        states = {key["id"]: key["alive"] for key in listed["keys"]}
        assert states[made["id"]] is False and states[after["id"]] is True and {"operator", "client"} <= states.keys()
        text = json.dumps(listed)
        assert "sha256" not in text and made["key"] not in text and after["key"] not in text
        _, shown = await verb(coordinator, capsys, "tenants", "show", "acme")
        assert shown["today"]["usd"] == 0.0
        nowhere = ["keys", "list", "--state-dir", str(tmp_path / "nowhere")]
        assert await asyncio.to_thread(main, nowhere) == 2
        for change in ("rotate", "revoke"):  # the command line would lock itself out
            words = ["keys", change, "operator", "--state-dir", str(coordinator.house.config.state_dir)]
            assert await asyncio.to_thread(main, words) == 1
            assert "delete admin.key" in capsys.readouterr().err
        code, found = await verb(coordinator, capsys, "audit", "verify")
        assert code == 0 and found["fault"] is None and found["lines"] == 2 + 5
        head = found["head"]
    log = tmp_path / "coordinator" / "audit" / "audit-000001.jsonl"
    assert all(key.encode() not in log.read_bytes() for key in (made["key"], boss["key"], after["key"]))
    words = ["audit", "verify", "--state-dir", str(tmp_path / "coordinator")]
    assert main([*words, "--head", head]) == 0
    assert main([*words, "--head", "0" * 63 + "1"]) == 1
    log.write_bytes(log.read_bytes().replace(b'"tenant":"acme"', b'"tenant":"acne"', 1))
    assert main(words) == 1
    assert "broken at audit-000001.jsonl:" in capsys.readouterr().out


async def test_everything_an_operator_changes_is_written_down_first(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        client = AdminClient(coordinator.house.config.state_dir)
        await client.ask("POST", "/token")
        await client.ask("GET", "/devices")
        with pytest.raises(NotFound):
            await client.ask("POST", "/devices/pi-9/revoke")
        lines = (tmp_path / "coordinator" / "audit" / "audit-000001.jsonl").read_text().splitlines()
    actions = [(line["who"], line["action"]) for line in map(json.loads, lines)]
    assert actions[-2:] == [
        ("operator", "POST /midstream/v1/admin/token"),
        ("operator", "POST /midstream/v1/admin/devices/{device_id}/revoke"),
    ]


@pytest.mark.parametrize("ledger_on", ["sqlite", "redis"])
async def test_a_provider_is_billed_to_the_tenant_and_refused_at_its_cap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, ledger_on: str
) -> None:
    """From the command line to the upstream and back, over TLS, with a key of the first start and one of a tenant."""
    port, ledger, stop = await serve_upstream()
    table = {"name": "p", "kind": "openai", "base_url": f"http://127.0.0.1:{port}", "keyless": True}
    price = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 10.0}
    providers = read_providers([table], {"big": {"at": "p/there", **price}})
    body = {"model": "big", "messages": [{"role": "user", "content": "n=1 tokens=8"}], "max_tokens": 20}

    async def ask(key: str) -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        path, data = "/v1/chat/completions", json.dumps(body).encode()
        reply = await coordinator.link(key=key).exchange(path, headers, data, 10)
        return reply.status, json.loads(reply.body)

    try:
        redis = request.getfixturevalue("redis_server").url if ledger_on == "redis" else None
        async with running(tmp_path, providers=providers, limits_redis=redis) as coordinator:
            await verb(coordinator, capsys, "tenants", "set", "acme", "--usd-per-day", "0.0005", "--alert", "0.3")
            _, made = await verb(coordinator, capsys, "keys", "add", "--tenant", "acme")
            answers = [await ask(made["key"]) for _ in range(6)]
            assert [status for status, _ in answers] == [200, 200, 200, 429, 429, 429]
            usage = answers[0][1]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 8)
            assert answers[-1][1]["error"]["code"] == "budget_exceeded" and ledger.requests == 3
            await asyncio.sleep(1.3)  # bills are written once a second
            _, shown = await verb(coordinator, capsys, "tenants", "show", "acme")
            assert shown["today"] == {"requests": 3, "prompt_tokens": 36, "completion_tokens": 24, "usd": 0.000276}
            assert shown["set_aside_usd"]["day"] >= 0.000276
            boss = read_admin_key(coordinator.house.config.state_dir)
            page = (await coordinator.get("/metrics", key=boss)).body.decode()
            assert 'midstream_limit_refusals_total{limit="day",tenant="acme"} 3' in page
            assert 'midstream_budget_spent_ratio{tenant="acme",window="day"} 0.' in page
            client_key = coordinator.house.authority.new_client_key
            assert client_key is not None and (await ask(client_key))[0] == 200, "another tenant does not notice"
    finally:
        stop()
        await asyncio.sleep(0)


async def test_wrong_wishes_name_their_field(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        client = AdminClient(coordinator.house.config.state_dir)
        for method, path, body, field in (
            ("POST", "/keys", {"knid": "invoke"}, "knid"),
            ("POST", "/keys", {"kind": "root"}, "kind"),
            ("POST", "/keys", {"networks": ["10.0.0.0/99"]}, "networks"),
            ("PUT", "/tenants/acme", {"quota": {"usd_per_day": -1}}, "quota.usd_per_day"),
            ("PUT", "/tenants/acme", {"quota": {"usd_per_dya": 1}}, "quota.usd_per_dya"),
            ("PUT", "/tenants/AC%20ME", {}, "name"),
        ):
            with pytest.raises(BadRequest) as refused:
                await client.ask(method, path, json.dumps(body).encode())
            assert refused.value.field == field, body


async def test_no_key_sees_more_than_its_kind(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        client_key = coordinator.house.authority.new_client_key
        boss = read_admin_key(coordinator.house.config.state_dir)
        for path in ("/keys", "/tenants", "/tenants/default", "/policy", "/devices"):
            full = f"/midstream/v1/admin{path}"
            assert (await coordinator.get(full, key=client_key)).status == 403, path
            assert (await coordinator.get(full, key=boss)).status == 200, path
            assert (await coordinator.get(full)).status == 401, path
