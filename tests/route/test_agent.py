"""A whole agent against a real TLS coordinator front and a real mosquitto: finding, joining, losing, coming back."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from agent.compose_control import JOIN_LOOK_S, join_fleet
from agent.enrolment import join
from agent.fakes_host import FakeHost
from agent.identity import IdentityStore
from cloud_stub.mosquitto import write_mosquitto
from engines.registry import ImportGuard, use_guard
from links.http import HttpLink
from links.port import Found
from protocol.errors import ConfigError
from protocol.trust import encode_join
from tests.conftest import Broker, mosquitto_binary
from tests.unit.agent.coordinators import JoinableCoordinator
from tests.unit.agent.houses import RunningHouse, config_for


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[JoinableCoordinator]:
    running = JoinableCoordinator(tmp_path / "coordinator")
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def broker(coordinator: JoinableCoordinator, tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Broker]:
    """mosquitto with the fleet's CA and access rules, as the coordinator would set it up."""
    port = free_port()
    files = write_mosquitto(
        coordinator.authority, tmp_path / "mosquitto", ["127.0.0.1"], port, time.time(), "127.0.0.1"
    )
    if os.getuid() == 0:  # mosquitto would give up root and then not see the test's folder
        files.conf.write_text(files.conf.read_text() + "user root\n")
    running = Broker("127.0.0.1", port, [], [mosquitto_binary(), "-c", str(files.conf)])
    running.restart()
    coordinator.broker_port = port
    yield running
    for process in running.process:
        process.kill()
        process.wait()


async def test_an_agent_alone_serves_and_says_what_is_missing(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        status, body = await agent.get("/healthz")
        assert status == 200
        warnings = json.loads(body)["warnings"]
        assert [w["name"] for w in warnings] == ["fleet"]
        assert "join" in warnings[0]["next_step"]
        found = await agent.status()
        assert (found["life"]["serving"], found["coordinator"]) == ("ready", None)
        assert (await agent.get("/metrics"))[0] == 200
        assert (await agent.get("/nothing"))[0] == 404


async def test_a_web_page_may_not_call_the_loopback_api(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            reply = await agent.link.exchange("/v1/chat/completions", headers, b"{}", 5)
            assert reply.status == 403


async def test_a_port_in_use_is_a_config_error_and_leaves_nothing(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path / "a")) as agent:
        port = agent.house.supervisor.port
        second = RunningHouse(config_for(tmp_path / "b", port=port))
        with pytest.raises(ConfigError, match=f"port {port} .* in use"):
            await second.house.supervisor.start()


async def test_an_unknown_model_is_404_in_both_apis(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        body = json.dumps({"model": "nope", "messages": [{"role": "user", "content": "x"}]}).encode()
        reply = await agent.link.exchange("/v1/chat/completions", {"content-type": "application/json"}, body, 5)
        assert reply.status == 404


async def test_join_connect_register_and_drain(
    tmp_path: Path, coordinator: JoinableCoordinator, broker: Broker
) -> None:
    config = config_for(tmp_path, join_token=encode_join(coordinator.token()))
    async with RunningHouse(config) as agent:
        await agent.until_state("connected")
        found = await agent.status()
        assert found["coordinator"] == f"127.0.0.1:{coordinator.port}"
        assert found["via"] == "join"
        assert found["cloud_available"]
        assert found["warnings"] == []
        assert "connected" in agent.console.names()
    # The second start needs no token, and remembers where the coordinator was.
    async with RunningHouse(config_for(tmp_path)) as agent:
        await agent.until_state("connected")
        assert (await agent.status())["via"] == "last_good"


async def test_a_join_while_the_agent_runs_needs_no_restart(
    tmp_path: Path, coordinator: JoinableCoordinator, broker: Broker
) -> None:
    """As in the service's set-up: the agent starts unenrolled, another process joins."""
    config = config_for(tmp_path)
    async with RunningHouse(config) as agent:
        assert [w["name"] for w in (await agent.status())["warnings"]] == ["fleet"]
        before = {path: path.stat().st_mtime_ns for path in config.identity_dir.rglob("*")}
        await asyncio.sleep(2 * JOIN_LOOK_S)
        assert before == {path: path.stat().st_mtime_ns for path in config.identity_dir.rglob("*")}, "only looked at"
        await join_fleet(config, encode_join(coordinator.token()))
        await agent.until_state("connected")
        found = await agent.status()
        assert (found["fleet"], found["warnings"]) == ("default", [])


async def test_a_guest_finds_a_coordinator_that_moved_by_its_hosts_discovery(
    tmp_path: Path, coordinator: JoinableCoordinator
) -> None:
    await join(IdentityStore(config_for(tmp_path).identity_dir), "pi", coordinator.token())
    assert coordinator.server is not None
    await coordinator.server.close()
    await coordinator.start()
    others = Found("theirs", ("127.0.0.1",), 9, {"fl": "another"})
    host = FakeHost(found=[others, Found("ours", ("127.0.0.1",), coordinator.port, {"fl": "default"})])
    try:
        async with RunningHouse(config_for(tmp_path, mdns=True), host) as agent:
            await agent.until(lambda: agent.house.cloud.available)
            assert (await agent.status())["via"] == "mdns"
        asked = [call for call in host.calls if call[0] in ("browse", "hold_multicast")]
        assert asked[:3] == [("hold_multicast", True), ("browse", "_midstream._tcp"), ("hold_multicast", False)]
    finally:
        use_guard(ImportGuard())


async def test_a_new_join_string_renews_and_one_of_another_fleet_moves_nothing(
    tmp_path: Path, coordinator: JoinableCoordinator
) -> None:
    store = IdentityStore(config_for(tmp_path).identity_dir)
    first = await join(store, "pi", coordinator.token())
    other = JoinableCoordinator(tmp_path / "other", "lab")
    await other.start()
    async with RunningHouse(config_for(tmp_path, join_token=encode_join(other.token()))) as agent:
        await agent.until(lambda: "join" in {w.name for w in agent.house.health.warnings})
        (warning,) = [w for w in agent.house.health.warnings if w.name == "join"]
        assert "--replace" in warning.next_step
        assert (other.joins, store.enrolment()) == (0, first)
    await other.stop()
    async with RunningHouse(config_for(tmp_path, join_token=encode_join(coordinator.token()))) as agent:
        await agent.until(lambda: coordinator.joins == 2 and agent.house.control.connector is not None)
        renewed = agent.house.control.enrolment
        assert renewed is not None and renewed.cert_pem != first.cert_pem
        assert store.enrolment() == renewed


async def test_a_broker_that_vanishes_and_comes_back(
    tmp_path: Path, coordinator: JoinableCoordinator, broker: Broker
) -> None:
    config = config_for(tmp_path, join_token=encode_join(coordinator.token()))
    async with RunningHouse(config) as agent:
        await agent.until_state("connected")
        broker.kill()
        await agent.until(lambda: agent.house.life.life.connected != "connected")
        status, body = await agent.get("/healthz")
        assert status == 200
        assert "control" in [w["name"] for w in json.loads(body)["warnings"]]
        broker.restart()
        await agent.until_state("connected", 40)
        assert (await agent.status())["warnings"] == []


async def test_a_coordinator_absent_at_start_is_found_when_it_comes(
    tmp_path: Path, coordinator: JoinableCoordinator, broker: Broker
) -> None:
    token = encode_join(coordinator.token())
    async with RunningHouse(config_for(tmp_path, join_token=token)) as agent:
        await agent.until_state("connected")
    port = coordinator.port
    assert coordinator.server is not None
    await coordinator.server.close()
    async with RunningHouse(config_for(tmp_path)) as agent:
        await agent.until(lambda: any(w.name == "coordinator" for w in agent.house.health.warnings))
        assert (await agent.get("/healthz"))[0] == 200
        await coordinator.start(port=port)
        await agent.until_state("connected", 30)
        assert agent.house.cloud.available


async def test_a_coordinator_that_moves_is_found_at_its_new_address(
    tmp_path: Path, coordinator: JoinableCoordinator, broker: Broker
) -> None:
    token = encode_join(coordinator.token())
    async with RunningHouse(config_for(tmp_path, join_token=token)) as agent:
        await agent.until_state("connected")
        assert coordinator.server is not None
        await coordinator.server.close()
        await coordinator.start()
        control = agent.house.control.control
        assert control is not None
        await coordinator.announce(broker.port)
        await agent.until(lambda: agent.house.control.connector.found.port == coordinator.port, 30)  # type: ignore[union-attr]
        assert (await agent.status())["via"] == "broker"
        assert agent.house.cloud.available


async def test_a_client_that_opens_and_says_nothing_harms_nobody(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        _, writer = await asyncio.open_connection("127.0.0.1", agent.house.supervisor.port)
        writer.write(b"\x00\xff garbage\r\n\r\n")
        await writer.drain()
        link = HttpLink("agent", agent.house.url)
        assert (await link.exchange("/healthz", {}, b"", 5, method="GET")).status == 200
        await link.close()
        writer.close()
        await writer.wait_closed()
