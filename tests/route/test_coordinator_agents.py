"""A whole coordinator with real agents and brokers: both MQTT versions, policy, revoked devices, absent brokers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import define, evolve

from agent.config import PolicyBounds
from cloud_stub import cli
from cloud_stub.admin_client import AdminClient
from cloud_stub.compose import CoordinatorHouse
from links.mqtt import MqttChannel
from protocol.decode import decode
from protocol.documents import JoinAnswer
from protocol.errors import ConfigError
from tests.conftest import Broker, mosquitto_binary
from tests.route.coordinator_house import running, settings
from tests.unit.agent.houses import RunningHouse, config_for
from tests.unit.cloud_stub.device_side import new_device


@define
class WaitTargets:
    """A part with queues that keeps what it is told."""

    told: list[float]

    def set_wait_target(self, seconds: float) -> None:
        self.told.append(seconds)


async def test_the_real_agent_joins_registers_and_takes_policy(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        config = config_for(tmp_path / "agent", join_token=coordinator.house.join_string())
        async with RunningHouse(config) as agent:
            await agent.until_state("connected")
            assert agent.house.control.control is not None
            channel = agent.house.control.control._channel
            assert isinstance(channel, MqttChannel)
            assert channel._settings.version == 4, "what the broker speaks is told, not found out"
            assert channel._settings.outbox_path == config.state_dir / "outbox-default.sqlite"
            client = AdminClient(coordinator.house.config.state_dir)
            async with asyncio.timeout(20):
                while not (devices := (await client.ask("GET", "/devices"))["devices"]) or devices[0]["cores"] is None:
                    await asyncio.sleep(0.05)
            assert devices[0]["state"] == "online"
            told: list[float] = []
            agent.house._queueing.append(WaitTargets(told))
            policy = b"[split]\nperiods = 9\n[engines]\nwait_target_s = 0.5\n"
            answer = await client.ask("POST", "/policy", policy, {"form": "toml"})
            assert answer["devices"] == [devices[0]["device_id"]]
            async with asyncio.timeout(20):
                while (devices := (await client.ask("GET", "/devices"))["devices"])[0]["policy"] != answer["version"]:
                    await asyncio.sleep(0.05)
            assert devices[0]["policy_code"] == "accepted"
            reported = agent.house.holder.reported()
            assert reported is not None
            assert (reported.sections["split"], reported.sections["engines"]) == ("applied", "applied")
            assert told == [0.5], "queues follow without a restart"
            agent.house.reconfigure(evolve(agent.house.config, bounds=PolicyBounds(wait_target_s=0.2)))

            def engines() -> str:
                (device,) = coordinator.house.registry.devices()
                return device.reported.sections["engines"] if device.reported is not None else ""

            await agent.until(lambda: engines() == "clamped: wait_target_s = 0.2")
            assert told == [0.5, 0.2]
        async with asyncio.timeout(10):
            while (devices := (await client.ask("GET", "/devices"))["devices"])[0]["state"] != "offline":
                await asyncio.sleep(0.05)


async def test_the_real_agent_over_mosquitto_with_mqtt_5(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The broker is named, set up by our own command, and dies once in between."""
    port, state = free_port(), tmp_path / "coordinator"
    names = ["mosquitto-conf", "--out", str(tmp_path / "m"), "--names", "127.0.0.1", "--listen", "127.0.0.1"]
    assert (
        await asyncio.to_thread(cli.coordinator, [*names, "--listen-port", str(port), "--state-dir", str(state)]) == 0
    )
    conf = tmp_path / "m" / "mosquitto.conf"
    if os.getuid() == 0:  # mosquitto would give up root and then not see the test's folder
        conf.write_text(conf.read_text() + "user root\n")
    broker = Broker("127.0.0.1", port, [], [mosquitto_binary(), "-c", str(conf)])
    broker.restart()
    try:
        async with running(tmp_path, broker=f"mqtts://127.0.0.1:{port}") as coordinator:
            config = config_for(tmp_path / "agent", join_token=coordinator.house.join_string())
            async with RunningHouse(config) as agent:
                await agent.until_state("connected")
                assert coordinator.house.coordinator._channel.version == 5  # type: ignore[attr-defined]
                client = AdminClient(state)
                await _policy_in_force(client, (await client.ask("POST", "/policy", b""))["version"])
                broker.kill()
                second = (await client.ask("POST", "/policy", b"[split]\nperiods = 9\n"))["version"]
                broker.restart()
                await _policy_in_force(client, second)
    finally:
        for process in broker.process:
            process.kill()
            process.wait()


async def test_a_revoked_agent_says_so_and_keeps_serving(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        config = config_for(tmp_path / "agent", join_token=coordinator.house.join_string())
        async with RunningHouse(config) as agent:
            await agent.until_state("connected")
            await AdminClient(coordinator.house.config.state_dir).ask("POST", "/devices/pi/revoke")
            await agent.until_state("refused")
            assert agent.house.control.connector is not None
            agent.house.control.connector.kick("no waiting for the pause between searches")
            await agent.until(lambda: {"control", "fleet"} <= {w.name for w in agent.house.health.warnings})
            found = await agent.status()
            assert found["life"]["connected"] == "refused", "and a search does not hide it"
            assert all("fleet list" in w["next_step"] for w in found["warnings"])
            assert (await agent.get("/healthz"))[0] == 200


async def _policy_in_force(client: AdminClient, version: int) -> None:
    async with asyncio.timeout(40):
        while not (devices := (await client.ask("GET", "/devices"))["devices"]) or devices[0]["policy"] != version:
            await asyncio.sleep(0.05)


async def test_a_foreign_broker_that_is_away_costs_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path, broker="mqtts://127.0.0.1:1") as coordinator:
        assert (await coordinator.get("/healthz")).status == 200
        answer = decode(JoinAnswer, (await coordinator.join(new_device())).body, what="answer")
        assert (answer.broker_host, answer.broker_port) == ("127.0.0.1", 1)
        assert (answer.broker_tls, answer.broker_version) == (True, 5)
        published = await AdminClient(coordinator.house.config.state_dir).ask("POST", "/policy", b"")
        assert published["broker"] == "down"


@pytest.mark.parametrize("content", [b"", b"no certificate", b"\xff\xfe"])
async def test_a_broker_ca_that_is_none_is_told(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broker-ca.pem"
    file.write_bytes(content)
    house = CoordinatorHouse(settings(tmp_path, broker="mqtts://127.0.0.1:1", broker_ca=file))
    with pytest.raises(ConfigError, match=r"broker-ca\.pem") as caught:
        await house.start()
    assert (caught.value.field, "PEM" in caught.value.next_step) == ("broker_ca", True)


async def test_a_plain_broker_on_any_port_is_told_to_devices(tmp_path: Path, mosquitto: Broker) -> None:
    async with running(tmp_path, broker=f"mqtt://127.0.0.1:{mosquitto.port}") as coordinator:
        config = config_for(tmp_path / "agent", join_token=coordinator.house.join_string())
        async with RunningHouse(config) as agent:
            await agent.until_state("connected")
            enrolment = agent.house.control.enrolment
            assert enrolment is not None
            assert (enrolment.broker_tls, enrolment.broker_version) == (False, 5)
