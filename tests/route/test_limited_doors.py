"""The family of limits at both front doors: the device's (one tenant, by policy) and the coordinator's (keys)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from attrs import evolve, frozen

from cloud_stub.authority import open_authority, read_admin_key
from cloud_stub.config import CoordinatorConfig
from cloud_stub.tenants import TenantHouse
from engines.fakes_text import FakeTextEngine
from gateway.audit import verify
from gateway.context import LOCAL
from gateway.door_limits import DoorLimits, limited
from gateway.ledger import LedgerError
from gateway.mount import GatewayPorts, build
from gateway.ports import Estimate
from gateway.prices import Price, check_price
from gateway.quotas import Quota, Tenant
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http import HttpLink
from links.http_server import serve
from links.port import Reply
from protocol.clock import wall_now
from protocol.errors import ConfigError
from protocol.events import PolicyJudged, RecordingEmit
from protocol.policy import LimitsPolicy, Policy

JSON = {"content-type": "application/json"}
PRICE = Price(1.0, 10.0)


@frozen
class AtDoor:
    """One front door with a model of this machine (`own`) and one that costs money (`paid`)."""

    link: HttpLink
    key: str
    reserved: Callable[[], Mapping[str, int]]
    engine: FakeTextEngine
    admin_key: str = ""

    async def ask(self, model: str = "paid", max_tokens: int = 20, key: str | None = None, **more: Any) -> Reply:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, **more}
        return await self._post(body, self.key if key is None else key)

    async def _post(self, body: Mapping[str, Any], key: str) -> Reply:
        headers = JSON | ({"authorization": f"Bearer {key}"} if key else {})
        return await self.link.exchange("/v1/chat/completions", headers, json.dumps(body).encode(), 20)

    async def many(self, count: int, **more: Any) -> list[Reply]:
        return list(await asyncio.gather(*(self.ask(**more) for _ in range(count))))


class Door(Protocol):
    def __call__(self, folder: Path, *, on_budget: str = "refuse", **quota: float) -> Any: ...


def targets(engine: FakeTextEngine) -> list[Target]:
    price = check_price(PRICE, "paid")
    return [
        Target("device", True, FakeTextEngine(answer_tokens=8, capacity=600), frozenset({"own", "both"})),
        Target(
            "cloud", False, engine, frozenset({"paid", "both"}),
            price_in=price.usd_per_million_prompt_tokens / 1e6, price_out=price.usd_per_million_completion_tokens / 1e6,
        ),
    ]  # fmt: skip


def slow_engine() -> FakeTextEngine:
    return FakeTextEngine(answer_tokens=8, tokens_per_s=20, capacity=600)


@asynccontextmanager
async def device_door(folder: Path, *, on_budget: str = "refuse", **quota: float) -> AsyncIterator[AtDoor]:
    """As the agent mounts it: no key, limits from the policy."""
    policy = Policy(limits=LimitsPolicy(on_budget=on_budget, **quota))  # type: ignore[arg-type]
    engine, emit = slow_engine(), RecordingEmit()
    limits = DoorLimits(folder, lambda: policy, emit, time.monotonic, wall_now)
    offered = targets(engine)
    ports = GatewayPorts(targets=lambda: offered, policy=lambda: policy, emit=emit, limits=limits, audit=limits)
    mount = limited(build(GatewaySettings(max_concurrent=600, drain_s=0.2), ports), limits)
    async with AsyncExitStack() as stack:
        await mount.start()
        stack.push_async_callback(mount.stop)
        server = await serve(mount.routes, origin_check=True)
        stack.push_async_callback(server.close)
        link = HttpLink("door", f"http://127.0.0.1:{server.port}", connections=600)
        stack.push_async_callback(link.close)
        yield AtDoor(link, "", lambda: limits.reserved, engine)


@asynccontextmanager
async def coordinator_door(folder: Path, *, on_budget: str = "refuse", **quota: float) -> AsyncIterator[AtDoor]:
    """As the coordinator mounts it: keys of its own first start, tenants of its store."""
    config = CoordinatorConfig(state_dir=folder / "state", models_dir=folder / "models")
    authority = open_authority(config.state_dir, config.fleet, wall_now().unix_s)
    engine, emit = slow_engine(), RecordingEmit()
    house = await asyncio.to_thread(TenantHouse, config, authority, wall_now, emit)
    offered = targets(engine)
    ports = GatewayPorts(
        targets=lambda: offered, policy=Policy, emit=emit, keys=house.keys, limits=house.limits, audit=house.audit
    )
    mount = build(GatewaySettings(max_concurrent=600, drain_s=0.2), ports)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(house.close)
        await house.start()
        tenant = Tenant("acme", quota=Quota(**quota), on_budget=on_budget)  # type: ignore[arg-type]
        await asyncio.to_thread(house.tenancy.set_tenant, "test", tenant)
        made = await asyncio.to_thread(house.tenancy.add_key, "test", "invoke", "acme")
        await mount.start()
        stack.push_async_callback(mount.stop)
        server = await serve(mount.routes)
        stack.push_async_callback(server.close)
        link = HttpLink("door", f"http://127.0.0.1:{server.port}", connections=600)
        stack.push_async_callback(link.close)
        admin_key = read_admin_key(config.state_dir)
        yield AtDoor(link, made.text, lambda: house.limits.reserved("acme"), engine, admin_key)


@pytest.fixture(params=(device_door, coordinator_door), ids=("device", "coordinator"))
def door(request: pytest.FixtureRequest) -> Door:
    found: Door = request.param
    return found


def error(reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reply.body)["error"]
    return found


async def settled(at: AtDoor) -> None:
    """Nothing is reserved any more, a moment later."""
    async with asyncio.timeout(3):
        while any(at.reserved().values()):
            await asyncio.sleep(0.01)


async def test_five_in_parallel_do_not_pass_a_limit_of_tokens(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path, tokens_per_min=100) as at:
        replies = await at.many(5, max_tokens=40)
        assert [reply.status for reply in replies].count(200) == 2
        refused = next(reply for reply in replies if reply.status == 429)
        assert error(refused)["code"] == "rate_limit_exceeded" and int(refused.headers["retry-after"]) >= 1
        spent = sum(json.loads(r.body)["usage"]["total_tokens"] for r in replies if r.status == 200)
        assert spent <= 100


async def test_many_at_once_do_not_all_pass_a_budget(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path, usd_per_day=0.0025) as at:
        replies = await at.many(100)
        passed = [reply for reply in replies if reply.status == 200]
        assert 5 <= len(passed) <= 10, "ten, if each took the most it may take"
        refused = next(reply for reply in replies if reply.status == 429)
        assert error(refused)["code"] == "budget_exceeded" and error(refused)["type"] == "insufficient_quota"
        await settled(at)
        assert (await at.ask()).status == 200, "what was reserved and not spent is there for the next"


async def test_a_client_that_leaves_and_a_time_out_give_their_places_back(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path, max_concurrent=3) as at:
        at.engine.answer_tokens = 400  # 20 s: nobody is through before the places are counted
        waiting = [asyncio.create_task(at.ask(max_tokens=400, stream=number == 0)) for number in range(3)]
        async with asyncio.timeout(10):
            while at.reserved().get("places", 0) < 3:
                await asyncio.sleep(0.01)
        assert (await at.ask()).status == 429
        at.engine.answer_tokens = 8
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await settled(at)
        assert [reply.status for reply in await at.many(3)] == [200] * 3


async def test_failures_of_the_engine_give_everything_back(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path, max_concurrent=3, usd_per_day=1.0, tokens_per_min=10_000) as at:
        at.engine.kill()
        assert all(reply.status >= 500 for reply in await at.many(3))
        at.engine.revive()
        await settled(at)
        assert (await at.ask()).status == 200


async def test_remaining_falls_while_streams_run_and_by_what_they_take(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path, tokens_per_min=1000, requests_per_s=50) as at:
        seen = []
        for _ in range(3):
            reply = await at.ask(stream=True, max_tokens=100)
            assert reply.status == 200
            seen.append(int(reply.headers["x-ratelimit-remaining-tokens"]))
            assert reply.headers["x-ratelimit-limit-requests"] == "50"
        assert seen[0] > seen[1] > seen[2], "reserved before the first token, not charged after the last"
        assert seen[0] - seen[1] < 100, "and by what it took, not by what was reserved"


async def test_an_admin_key_is_no_way_around_a_budget(tmp_path: Path) -> None:
    """The device's door takes no keys for anything; at the coordinator's, keys that manage cannot ask."""
    async with coordinator_door(tmp_path / "c", usd_per_day=0.0) as at:
        assert (await at.ask(key=at.admin_key)).status == 403
        assert error(await at.ask(key=at.admin_key))["message"].startswith("admin keys cannot invoke")
        assert at.engine.prepared == []
    async with device_door(tmp_path / "d", usd_per_day=0.0) as device:
        assert (await device.ask(key=at.admin_key)).status == 429, "the key changes nothing"
        assert device.engine.prepared == []


async def test_a_budget_that_is_set_counts_and_one_that_is_not_blocks_nobody(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path / "none") as at:
        assert [reply.status for reply in await at.many(20)] == [200] * 20
    async with door(tmp_path / "zero", usd_per_day=0.0) as at:
        assert {reply.status for reply in await at.many(5)} == {429}
        assert (await at.ask("own")).status == 200, "what costs nothing needs no budget"
        assert at.engine.prepared == []


async def test_at_the_cap_the_device_answers_where_policy_says_so(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path, on_budget="degrade", usd_per_day=0.0) as at:
        reply = await at.ask("both")
        assert reply.status == 200 and reply.headers["x-midstream-target"] == "device"
        assert at.engine.prepared == []
        refused = await at.ask("paid")
        assert refused.status == 403 and "the cost cap is reached" in error(refused)["message"]


async def test_policies_that_a_device_got_are_in_its_audit(tmp_path: Path) -> None:
    limits = DoorLimits(tmp_path, Policy, RecordingEmit(), time.monotonic, wall_now)
    judged = PolicyJudged(at_s=0.0, version=7, accepted=True, code="accepted")
    limits.heard(judged)  # before it is open: nothing to write to, and no harm
    await limits.start()
    limits.heard(judged)
    limits.heard(evolve(judged, version=6, accepted=False, code="older_version"))
    await limits.stop()
    found = verify(tmp_path / "audit")
    assert (found.lines, found.fault) == (2, None)
    (file,) = tmp_path.rglob("audit-*.jsonl")
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["who"], first["action"], first["subject"]) == ("fleet", "policy.accept", "7")
    assert (second["action"], second["detail"]) == ("policy.refuse", {"code": "older_version"})


async def test_a_disk_that_cannot_be_used_opens_a_door_without_limits_only(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("no folder")
    estimate = Estimate("m", 1, 1)
    for limit, admitted in ((None, True), (5.0, False)):
        policy = Policy(limits=LimitsPolicy(usd_per_day=limit))
        limits = DoorLimits(tmp_path, lambda policy=policy: policy, RecordingEmit(), time.monotonic, wall_now)  # type: ignore[misc]
        await limits.start()
        if admitted:
            await (await limits.reserve(LOCAL, estimate)).release()
        else:
            with pytest.raises(LedgerError, match="not kept"):
                await limits.reserve(LOCAL, estimate)
        await limits.stop()


def test_a_price_per_token_where_one_per_million_is_meant_is_refused() -> None:
    for value in (1.5e-7, 150_000.0):
        with pytest.raises(ConfigError):
            check_price(evolve(PRICE, usd_per_million_prompt_tokens=value), "provider_models.m")


async def test_requests_at_both_doors_are_in_the_audit_without_their_words(door: Door, tmp_path: Path) -> None:
    async with door(tmp_path, usd_per_day=1.0) as at:
        assert (await at.ask(messages=[{"role": "user", "content": "the secret plan"}])).status == 200
        await settled(at)
    (file,) = tmp_path.rglob("audit-*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (record,) = [line for line in lines if line["kind"] == "invocation"]
    assert record["model"] == "paid" and record["sides"] == [["cloud", 8]] and record["usd"] > 0
    assert "secret plan" not in file.read_text()
