"""The written mosquitto configuration on a real mosquitto: MQTT 5, TLS by our CA, identity from certificates, rules."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from attrs import define, field

from cloud_stub.authority import Authority, ensure_certificates, open_authority
from cloud_stub.certificates import check_request
from cloud_stub.coordinator import Coordinator, goodbye
from cloud_stub.mosquitto import MosquittoFiles, write_mosquitto
from cloud_stub.publishing import Publisher
from cloud_stub.registry import SqliteRegistry
from links.mqtt import MqttChannel
from links.mqtt_settings import MqttSettings
from links.port import Delivery
from links.session import SessionRules
from links.tls import client_context
from protocol.acceptance import judge
from protocol.clock import wall_now
from protocol.decode import decode, encode
from protocol.device import DeviceProfile
from protocol.documents import CoordinatorState, Presence, Registration
from protocol.events import ignore
from protocol.signature import Envelope
from protocol.topics import Topics, coord_state, fleet_pattern
from tests.conftest import mosquitto_binary, wait_for_port
from tests.unit.cloud_stub.device_side import new_device

QUICK = SessionRules(base_s=0.05, cap_s=0.3, least_s=0.02, spread_s=0.1, short_s=0.0)


@define(eq=False)
class Server:
    """A mosquitto that can be killed and started again."""

    authority: Authority
    files: MosquittoFiles
    port: int
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(factory=list)

    def start(self) -> None:
        command = [mosquitto_binary(), "-c", str(self.files.conf)]
        self.processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        wait_for_port(self.port)

    def kill(self) -> None:
        self.processes[-1].kill()
        self.processes[-1].wait()

    def channel(self, name: str, *, version: int = 5, will: Delivery | None = None) -> MqttChannel:
        if name == "coordinator":
            files = (self.authority.own_file, self.authority.own_file)
        else:
            device = new_device(name)
            certificate = self.authority.issue(check_request(device.csr_pem, name), time.time())
            files = device.write(self.folder, certificate)
        context = client_context(self.authority.ca_pem, *files)
        settings = MqttSettings(
            host="127.0.0.1", port=self.port, client_id=name, ssl=context, will=will, rules=QUICK,
            max_payload_bytes=64 << 10,
        )  # fmt: skip
        return MqttChannel(settings)


@pytest.fixture
def server(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Server]:
    authority = open_authority(tmp_path / "state", "lab", time.time())
    ensure_certificates(authority, ["127.0.0.1"], time.time())
    port = free_port()
    folder = tmp_path / "mosquitto"
    files = write_mosquitto(authority, folder, ["127.0.0.1"], port, time.time(), host="127.0.0.1")
    # Started by root, mosquitto becomes another user, who must be able to read and write here.
    user = "user root\n" if folder.owner() == "root" else ""
    files.conf.write_text(files.conf.read_text() + user)
    server = Server(authority, files, port, tmp_path)
    server.start()
    yield server
    for process in server.processes:
        process.kill()
        process.wait()


@pytest.fixture
async def coordinator(server: Server, tmp_path: Path) -> AsyncIterator[Coordinator]:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    state = CoordinatorState(addresses=("127.0.0.1",), port=1, broker_port=server.port, fingerprint="f" * 64, epoch=1)
    found = Coordinator(
        server.channel("coordinator", will=goodbye("lab")),
        registry,
        Publisher(server.authority, registry, wall_now),
        lambda: state,
        "lab",
        clock=time.monotonic,
        wall=wall_now,
        emit=ignore,
    )
    await found.start()
    yield found
    await found.stop()
    registry.close()


async def until(check: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.02)


async def test_the_whole_control_plane_over_mqtt_5(server: Server, coordinator: Coordinator) -> None:
    topics = Topics("lab", "pi-1")
    device = server.channel("pi-1", will=Delivery(topics.state, encode(Presence(s="offline", epoch=1)), True))
    policies: list[bytes] = []
    states: list[bytes] = []
    await device.subscribe(topics.policy_desired, lambda d: policies.append(d.payload))
    await device.subscribe(coord_state("lab"), lambda d: states.append(d.payload))
    await device.publish(topics.state, encode(Presence(s="online", epoch=1)), retain=True)
    profile = Registration(profile=DeviceProfile(device_id="pi-1"), epoch=1)
    await device.publish(topics.profile, encode(profile), retain=True)
    registry = coordinator._registry
    await until(lambda: states and (d := registry.device("pi-1")) and d.online and d.registration)
    assert device.version == 5
    coordinator._publisher.publish(b"[split]\nperiods = 7\n", "toml")
    coordinator.refresh()
    await until(lambda: policies)
    envelope = decode(Envelope, policies[-1], what="envelope")
    verdict = judge(envelope, None, server.authority.policy_keys, {}, wall_now(), fleet="lab")
    assert getattr(verdict, "code", "") == "accepted"
    await device.close()


async def test_a_device_signals_as_itself_and_hears_its_answer(server: Server, coordinator: Coordinator) -> None:
    offers: list[Delivery] = []
    answers: list[Delivery] = []
    await coordinator._channel.subscribe(fleet_pattern("lab", "signal/offer"), offers.append)
    device, spy = server.channel("pi-1"), server.channel("pi-2")
    mine, other = Topics("lab", "pi-1"), Topics("lab", "pi-2")
    await device.subscribe(mine.signal_answer, answers.append)
    spy.start()
    await until(lambda: device.state == spy.state == coordinator.broker_state == "up")
    await spy.publish(mine.signal_offer, b"forged", expires_in_s=30)
    await spy.publish(mine.signal_answer, b"forged", expires_in_s=30)
    await spy.publish(other.signal_offer, b"its own", expires_in_s=30)
    await device.publish(mine.signal_offer, b"offer", expires_in_s=30)
    await until(lambda: len(offers) == 2)
    await coordinator._channel.publish(mine.signal_answer, b"answer", expires_in_s=30)
    await until(lambda: answers)
    assert sorted((offer.topic, offer.payload) for offer in offers) == [
        (mine.signal_offer, b"offer"), (other.signal_offer, b"its own"),
    ]  # fmt: skip
    assert [answer.payload for answer in answers] == [b"answer"]
    await device.close()
    await spy.close()


async def test_another_devices_topics_are_closed(server: Server, coordinator: Coordinator) -> None:
    spy, victim = server.channel("pi-2"), Topics("lab", "pi-1")
    seen: list[Delivery] = []
    for pattern in (victim.policy_desired, victim.state, "midstream/v1/lab/#"):
        await spy.subscribe(pattern, seen.append)
    await until(lambda: spy.state == "up" and coordinator.broker_state == "up")
    await spy.publish(victim.state, encode(Presence(s="online", epoch=99)), retain=True, expires_in_s=5)
    own = Topics("lab", "pi-2")
    await spy.publish(own.state, encode(Presence(s="online", epoch=1)), retain=True)
    await until(lambda: coordinator._registry.device("pi-2"))
    assert coordinator._registry.device("pi-1") is None
    # The broker lets the wide pattern stand and delivers only what its rules allow.
    assert {d.topic for d in seen} <= {own.state, coord_state("lab")}
    await spy.close()


async def test_a_killed_broker_has_no_store_to_tear_and_is_filled_again(
    server: Server, coordinator: Coordinator
) -> None:
    """After a power cut mosquitto may refuse its own store; ours has none, and both sides publish again."""
    coordinator._publisher.publish(b"", "toml")
    topics = Topics("lab", "pi-1")
    device = server.channel("pi-1")
    births = []
    unwatch = device.watch(lambda state: births.append(state) if state == "up" else None)
    await device.publish(topics.profile, encode(Registration(profile=DeviceProfile(device_id="pi-1"), epoch=1)), True)
    await until(lambda: coordinator._registry.device("pi-1"))
    await asyncio.to_thread(server.kill)
    await until(lambda: coordinator.broker_state != "up")
    assert not list(server.files.folder.glob("*.db*"))
    await asyncio.to_thread(server.start)
    await until(lambda: coordinator.broker_state == "up" and len(births) >= 2)
    seen: dict[str, bytes] = {}
    for topic in (coord_state("lab"), topics.policy_desired):
        await device.subscribe(topic, lambda d: seen.update({d.topic: d.payload}))
    await until(lambda: len(seen) == 2)
    unwatch()
    await device.close()


async def test_strangers_do_not_get_in(server: Server) -> None:
    other = open_authority(server.folder / "other", "lab", time.time())
    ensure_certificates(other, ["127.0.0.1"], time.time())
    context = client_context(server.authority.ca_pem, other.own_file, other.own_file)
    settings = MqttSettings(host="127.0.0.1", port=server.port, client_id="coordinator", ssl=context, rules=QUICK)
    channel = MqttChannel(settings)
    states: list[str] = []
    channel.watch(states.append)
    channel.start()
    await asyncio.sleep(0.5)
    assert "up" not in states
    await channel.close()
