"""The embedded broker with a real MQTT client: who gets in, what each sees, silence, a taken port."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from attrs import define, field

from cloud_stub.authority import Authority, ensure_certificates, open_authority
from cloud_stub.broker import EmbeddedBroker
from cloud_stub.certificates import check_request
from links.tls import client_context
from protocol.errors import ConfigError
from tests.unit.cloud_stub.device_side import new_device

FLEET = "midstream/v1/lab"


@define(eq=False)
class Client:
    """A paho client that records what it sees."""

    paho: mqtt.Client
    connects: list[str] = field(factory=list)
    messages: list[tuple[str, bytes, bool]] = field(factory=list)
    subacks: list[list[bool]] = field(factory=list)

    def stop(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()


@define(eq=False)
class House:
    """A broker with the fleet's authority."""

    authority: Authority
    broker: EmbeddedBroker
    folder: Path
    revoked: set[str]
    clients: list[Client] = field(factory=list)

    def files(self, name: str) -> tuple[Path, Path]:
        device = new_device(name)
        return device.write(self.folder, self.authority.issue(check_request(device.csr_pem, name), time.time()))

    def connect(
        self, name: str, *, cert: tuple[Path, Path] | None = None, v5: bool = False, clean: bool = True,
        will: str | None = None, keepalive_s: int = 60,
    ) -> Client:  # fmt: skip
        version = mqtt.MQTTv5 if v5 else mqtt.MQTTv311
        paho = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, client_id=name, protocol=version, clean_session=None if v5 else clean
        )
        files = cert or (
            (self.authority.own_file, self.authority.own_file) if name == "coordinator" else self.files(name)
        )
        paho.tls_set_context(client_context(self.authority.ca_pem, *files))
        client = Client(paho)
        paho.on_connect = lambda c, u, f, reason, p: client.connects.append(str(reason))
        paho.on_message = lambda c, u, m: client.messages.append((m.topic, m.payload, m.retain))
        paho.on_subscribe = lambda c, u, mid, codes, p: client.subacks.append([code.is_failure for code in codes])
        if will:
            paho.will_set(will, b"gone", 1, True)
        paho.connect_async("127.0.0.1", self.broker.port, keepalive=keepalive_s)
        paho.loop_start()
        self.clients.append(client)
        return client


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    authority = open_authority(tmp_path / "state", "lab", time.time())
    ensure_certificates(authority, ["127.0.0.1"], time.time())
    revoked: set[str] = set()
    broker = EmbeddedBroker("lab", lambda name, der: der is not None and name not in revoked)
    await broker.start("127.0.0.1", 0, authority.server_file, authority.roots_file)
    house = House(authority, broker, tmp_path, revoked)
    yield house
    await asyncio.gather(*(asyncio.to_thread(client.stop) for client in house.clients))
    await broker.close()
    house.clients.clear()
    gc.collect()  # paho closes its wake-up sockets in its finaliser only


async def until(check: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "nothing happened in time"
        await asyncio.sleep(0.01)


async def test_devices_see_their_own_topics_only(house: House) -> None:
    coordinator, one, two = house.connect("coordinator"), house.connect("pi-1"), house.connect("pi-2", clean=False)
    await until(lambda: all(c.connects == ["Success"] for c in (coordinator, one, two)))
    coordinator.paho.subscribe(f"{FLEET}/+/profile", 1)
    one.paho.subscribe(f"{FLEET}/pi-1/policy/desired", 1)
    two.paho.subscribe([("#", 1), (f"{FLEET}/+/profile", 1), (f"{FLEET}/pi-2/later/+", 1)])
    await until(lambda: coordinator.subacks and one.subacks and two.subacks)
    assert two.subacks == [[True, True, False]]
    one.paho.publish(f"{FLEET}/pi-2/profile", b"forged", 1, True)
    one.paho.publish(f"{FLEET}/pi-1/profile", b"mine", 1, True)
    coordinator.paho.publish(f"{FLEET}/pi-1/policy/desired", b"policy", 1, True)
    await until(lambda: coordinator.messages and one.messages)
    assert coordinator.messages == [(f"{FLEET}/pi-1/profile", b"mine", False)]
    assert one.messages == [(f"{FLEET}/pi-1/policy/desired", b"policy", False)]
    # A session that comes back is sent every retained message by amqtt; the gate lets none of another's through.
    await asyncio.to_thread(two.stop)
    again = house.connect("pi-2", clean=False)
    await until(lambda: again.connects == ["Success"])
    coordinator.paho.publish(f"{FLEET}/pi-2/later/a1", b"do", 1)
    await until(lambda: again.messages)
    assert again.messages == [(f"{FLEET}/pi-2/later/a1", b"do", False)]


async def test_strangers_are_refused_before_they_can_disturb(house: House) -> None:
    victim = house.connect("pi-1")
    await until(lambda: victim.connects == ["Success"])
    thief = house.connect("pi-1", cert=house.files("pi-2"))
    will = house.connect("pi-3", will=f"{FLEET}/_coord/state")
    house.revoked.add("pi-4")
    revoked = house.connect("pi-4")
    await until(lambda: thief.connects and will.connects and revoked.connects)
    assert thief.connects[0] == "Not authorized"
    assert will.connects[0] == "Not authorized"
    assert revoked.connects[0] == "Not authorized", "so that it can tell a refusal from a broker that is away"
    assert victim.connects == ["Success"], "the session of the id's owner was left alone"


async def test_a_revoked_device_loses_its_session(house: House) -> None:
    device, other = house.connect("pi-1"), house.connect("pi-2")
    await until(lambda: device.connects == ["Success"] and other.connects == ["Success"])
    house.revoked.add("pi-1")
    house.broker.end_sessions("pi-1")
    await until(lambda: len(device.connects) > 1)
    assert other.paho.is_connected()
    assert set(device.connects[1:]) == {"Not authorized"}


async def test_mqtt_5_clients_are_told_to_step_down(house: House) -> None:
    client = house.connect("pi-1", v5=True)
    await until(lambda: client.connects)
    assert client.connects[0] == "Unsupported protocol version"


async def test_no_certificate_no_connection_and_garbage_changes_nothing(house: House) -> None:
    context = client_context(house.authority.ca_pem)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.broker.port, ssl=context)
    with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
        writer.write(b"\x10\x00")
        await reader.readexactly(1)
    writer.transport.abort()
    authentic = client_context(house.authority.ca_pem, *house.files("pi-1"))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x10\xff\xff\xff\xff", b"\x10\xff\xff\x7f", b"\x10\x02\x00\x10"):
        reader, writer = await asyncio.open_connection("127.0.0.1", house.broker.port, ssl=authentic)
        writer.write(garbage)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.transport.abort()
    client = house.connect("pi-1")
    await until(lambda: client.connects == ["Success"])


async def test_an_oversized_packet_ends_its_connection_only(house: House) -> None:
    coordinator, loud = house.connect("coordinator"), house.connect("pi-1")
    await until(lambda: coordinator.connects == ["Success"] and loud.connects == ["Success"])
    coordinator.paho.subscribe(f"{FLEET}/+/profile", 1)
    await until(lambda: coordinator.subacks)
    loud.paho.publish(f"{FLEET}/pi-1/profile", b"x" * (300 << 10), 0)
    await until(lambda: len(loud.connects) > 1)
    assert coordinator.messages == []
    assert coordinator.connects == ["Success"]


async def test_silence_sends_the_will(house: House) -> None:
    """A peer that vanishes without closing its socket; amqtt alone would keep it for ever."""
    coordinator = house.connect("coordinator")
    await until(lambda: coordinator.connects)
    coordinator.paho.subscribe(f"{FLEET}/+/state", 1)
    silent = house.connect("pi-1", will=f"{FLEET}/pi-1/state", keepalive_s=1)
    await until(lambda: silent.connects == ["Success"] and coordinator.subacks)
    await asyncio.to_thread(silent.paho.loop_stop)
    await until(lambda: coordinator.messages)
    assert coordinator.messages == [(f"{FLEET}/pi-1/state", b"gone", False)]


async def test_a_taken_port_is_told(house: House, free_port: Callable[[], int]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        second = EmbeddedBroker("lab", lambda name, der: True)
        with pytest.raises(ConfigError, match="already in use") as caught:
            await second.start(
                "127.0.0.1", taken.getsockname()[1], house.authority.server_file, house.authority.roots_file
            )
    assert caught.value.field == "broker_port"
