"""The MQTT channel against a real mosquitto and against peers that misbehave."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from links.mqtt import MqttChannel, MqttPace, MqttSettings
from links.port import ControlState, Delivery
from links.session import SessionRules
from links.tls import client_context
from protocol.events import Emit, Event, LinkStateChanged, ignore
from tests.conftest import Broker, mosquitto_binary, wait_for_port
from tests.unit.links.pki import Authority, make_authority

QUICK = SessionRules(spread_s=0.2, base_s=0.1, least_s=0.01, stable_s=5.0, short_s=2.0, duplicate_s=60.0)


@asynccontextmanager
async def channel_to(
    port: int, name: str = "pi", rules: SessionRules = QUICK, emit: Emit = ignore, **more: Any
) -> AsyncIterator[MqttChannel]:
    settings = MqttSettings("127.0.0.1", port, name, rules=rules, **more)
    channel = MqttChannel(settings, rng=random.Random(1), emit=emit)
    try:
        yield channel
    finally:
        await channel.close()


async def _until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_message_published_while_the_device_is_away_arrives(mosquitto: Broker) -> None:
    """The session outlives the process: a policy published meanwhile is not lost."""
    got: list[bytes] = []
    async with channel_to(mosquitto.port, "device") as device:
        await device.subscribe("policy", lambda d: got.append(d.payload))
        await _until(lambda: device.state == "up")
    async with channel_to(mosquitto.port, "cloud") as cloud:
        cloud.start()
        await _until(lambda: cloud.state == "up")
        await cloud.publish("policy", b"v2")
    async with channel_to(mosquitto.port, "device") as device:
        await device.subscribe("policy", lambda d: got.append(d.payload))
        await _until(lambda: got == [b"v2"])


async def test_dial_now_ends_a_long_pause(free_port: Callable[[], int]) -> None:
    port, came = free_port(), asyncio.Event()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.close()

    async with channel_to(port, rules=SessionRules(least_s=600.0)) as channel:
        channel.start()
        await _until(lambda: channel._session.attempt > 0)
        server = await asyncio.start_server(accept, "127.0.0.1", port)
        channel.dial_now()
        async with asyncio.timeout(5):
            await came.wait()
    server.close()
    await server.wait_closed()


async def test_a_dial_given_up_just_as_it_succeeds_leaves_no_socket(free_port: Callable[[], int]) -> None:
    """The connecting thread is through, and the event loop has not heard of it yet."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        async with channel_to(port) as channel:
            channel.start()
            while channel._connection is None:
                await asyncio.sleep(0)
            peer, _ = server.accept()
            assert peer.recv(1) == b"\x10"  # the CONNECT packet has been sent
            for thread in [thread for thread in threading.enumerate() if thread.name == "mqtt connect"]:
                thread.join()
            channel._supervisor.cancel()  # type: ignore[union-attr]
        peer.settimeout(5)
        while peer.recv(4096):
            pass
        peer.close()


async def test_a_pace_holds_dialling_back_and_sets_the_keepalive_of_the_next_connection(
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    connects: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connects.append(await reader.read(64))
        writer.close()

    paces = [MqttPace(240, QUICK, may_dial=False)]
    server = await asyncio.start_server(accept, "127.0.0.1", port)
    async with channel_to(port, version=4, pace=lambda: paces[-1]) as channel:
        channel.start()
        await asyncio.sleep(0.3)
        assert connects == []
        for keepalive_s in (240, 30):
            paces.append(MqttPace(keepalive_s, QUICK))
            seen = len(connects)
            channel.dial_now()
            await _until(lambda seen=seen: len(connects) > seen)  # type: ignore[misc]
            # CONNECT of MQTT 3.1.1: two bytes of header, "MQTT" with its length, level, flags, keepalive.
            assert int.from_bytes(connects[-1][10:12], "big") == keepalive_s
    server.close()
    await server.wait_closed()


async def test_the_will_is_published_when_the_process_dies(mosquitto: Broker) -> None:
    will = Delivery("state/pi", b'{"s":"offline","epoch":7}', retained=True)
    got: list[Delivery] = []
    async with channel_to(mosquitto.port, "watcher") as watcher:
        await watcher.subscribe("state/+", got.append)
        await _until(lambda: watcher.state == "up")
        async with channel_to(mosquitto.port, "pi", will=will) as pi:
            await pi.publish("state/pi", b'{"s":"online","epoch":7}', retain=True)
            await _until(lambda: len(got) == 1)
            connection = pi._connection
            assert connection is not None
            connection.drop()
            await _until(lambda: any(b"offline" in d.payload for d in got))


async def test_two_processes_with_one_identity_are_noticed(mosquitto: Broker) -> None:
    """MQ2: three short sessions in a row, then a long wait with a state that says why."""
    states: list[ControlState] = []
    events: list[Event] = []
    async with channel_to(mosquitto.port, "same", emit=events.append) as one, channel_to(mosquitto.port, "same") as two:
        one.watch(states.append)
        two.watch(states.append)
        one.start()
        two.start()
        await _until(lambda: "duplicate" in states, 15)
        await asyncio.sleep(0.5)
        connects = sum(1 for state in states if state == "up")
        await asyncio.sleep(1.0)
        assert sum(1 for state in states if state == "up") <= connects + 1
    assert any(isinstance(e, LinkStateChanged) and e.state == "up" for e in events)


async def test_a_message_that_is_not_acknowledged_is_on_disk_when_publish_returns(
    mosquitto: Broker, tmp_path: Path
) -> None:
    """MQ6, MQ8: publish never blocks for ever and never loses."""
    path = tmp_path / "outbox.db"
    async with channel_to(mosquitto.port, "pi", outbox_path=path) as channel:
        channel.start()
        await _until(lambda: channel.state == "up")
        mosquitto.process[-1].send_signal(19)
        try:
            began_s = time.monotonic()
            await channel.publish("t", b"important")
            assert time.monotonic() - began_s < 4
            assert path.exists()
        finally:
            mosquitto.process[-1].send_signal(18)
        await _until(lambda: len(channel._outbox) == 0)


async def test_messages_of_a_dead_process_are_sent_by_the_next(mosquitto: Broker, tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    mosquitto.kill()
    async with channel_to(mosquitto.port, "pi", outbox_path=path) as offline:
        for number in range(40):
            await offline.publish("t", str(number).encode())
    mosquitto.restart()
    got: list[bytes] = []
    async with channel_to(mosquitto.port, "watcher") as watcher:
        await watcher.subscribe("t", lambda d: got.append(d.payload))
        await _until(lambda: watcher.state == "up")
        async with channel_to(mosquitto.port, "pi", outbox_path=path) as pi:
            pi.start()
            await _until(lambda: len(got) == 40)
    assert got == [str(number).encode() for number in range(40)]


_PUBLISH_AND_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from links.mqtt import MqttChannel, MqttPace, MqttSettings

async def main():
    channel = MqttChannel(MqttSettings("127.0.0.1", int(sys.argv[1]), "pi", outbox_path=Path(sys.argv[2])))
    for number in range(10):
        await channel.publish("t", str(number).encode())
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_was_published_offline_survives_kill_9_of_the_whole_process(
    mosquitto: Broker, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    path = tmp_path / "outbox.db"
    command = [sys.executable, "-c", _PUBLISH_AND_DIE, str(free_port()), str(path)]
    process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).resolve().parents[3])
    assert await asyncio.wait_for(process.wait(), 20) == -signal.SIGKILL
    got: list[bytes] = []
    async with channel_to(mosquitto.port, "watcher") as watcher:
        await watcher.subscribe("t", lambda d: got.append(d.payload))
        await _until(lambda: watcher.state == "up")
        async with channel_to(mosquitto.port, "pi", outbox_path=path) as pi:
            pi.start()
            await _until(lambda: len(got) == 10)
    assert got == [str(number).encode() for number in range(10)]


async def test_short_lived_messages_are_not_written_to_disk(free_port: Callable[[], int], tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    channel = MqttChannel(MqttSettings("127.0.0.1", free_port(), "pi", outbox_path=path))
    await channel.publish("tele/load", b"0.3", expires_in_s=30)
    assert not path.exists()
    await channel.publish("state", b"1", retain=True)
    assert path.exists()
    await channel.close()


async def test_messages_over_the_bound_are_dropped_on_the_old_protocol_too(mosquitto: Broker) -> None:
    got: list[bytes] = []
    async with (
        channel_to(mosquitto.port, "big", max_payload_bytes=100_000) as big,
        channel_to(mosquitto.port, "small", version=4) as small,
    ):
        await small.subscribe("t", lambda d: got.append(d.payload))
        await _until(lambda: small.state == "up")
        await big.publish("t", bytes(50_000))
        await big.publish("t", b"fits")
        await _until(lambda: got == [b"fits"])
        assert small.refused_messages == 1


async def test_a_state_watcher_with_a_bug_harms_nobody(mosquitto: Broker) -> None:
    def broken(state: ControlState) -> None:
        raise RuntimeError("a bug in a watcher")

    async with channel_to(mosquitto.port) as channel:
        channel.watch(broken)
        channel.start()
        await _until(lambda: channel.state == "up")
        assert channel.alive


NOT_MQTT = (b"", b"\x20\x02\x00\x05", b"\xff" * 64, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x20\xff\xff\xff\x7f")


@pytest.mark.parametrize("answer", NOT_MQTT)
async def test_a_port_that_speaks_something_else_is_survived(answer: bytes) -> None:
    connections = 0

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(1024)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with channel_to(server.sockets[0].getsockname()[1], welcome_s=0.3, connect_s=0.5) as channel:
        channel.start()
        await asyncio.sleep(1.2)
        assert channel.alive
        assert channel.state in ("down", "refused")
        assert 1 <= connections < 30
        await channel.publish("t", b"queued")
    server.close()
    await server.wait_closed()


async def test_closing_while_dialling_a_silent_peer_returns_at_once() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    channel = MqttChannel(MqttSettings("127.0.0.1", server.sockets[0].getsockname()[1], "pi"))
    channel.start()
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    await channel.close()
    assert time.monotonic() - began_s < 1
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def _tls_broker(folder: Path, port: int, fleet: Authority, begins_in_days: float = -1) -> AsyncIterator[None]:
    cert, key = fleet.issue("broker", begins_in_days)
    config = folder / "tls.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\ncafile {fleet.ca_path}\n"
        f"certfile {cert}\nkeyfile {key}\nrequire_certificate true\nuser root\n"
    )
    folder.chmod(0o755)
    key.chmod(0o644)
    process = subprocess.Popen(
        [mosquitto_binary(), "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port)
        yield
    finally:
        process.kill()
        process.wait()


async def test_mutual_tls_and_an_identity_that_is_not_ours(tmp_path: Path, free_port: Callable[[], int]) -> None:
    fleet, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b", "other")
    port = free_port()
    async with _tls_broker(tmp_path, port, fleet):
        ours = client_context(fleet.ca_pem, *fleet.issue("pi-1"))
        got: list[bytes] = []
        async with channel_to(port, ssl=ours, max_payload_bytes=200_000) as channel:
            await channel.subscribe("t", lambda d: got.append(d.payload))
            await _until(lambda: channel.state == "up")
            await channel.publish("t", bytes(150_000))
            await _until(lambda: [len(p) for p in got] == [150_000])
        async with channel_to(port, ssl=client_context(other.ca_pem)) as foreign:
            foreign.start()
            await _until(lambda: foreign.state == "refused")


async def test_a_broker_whose_certificate_is_not_valid_yet(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """CL3: wait in a state of its own, try again, go on living."""
    fleet = make_authority(tmp_path / "a")
    port = free_port()
    ours = client_context(fleet.ca_pem, *fleet.issue("pi-1"))
    async with _tls_broker(tmp_path, port, fleet, begins_in_days=5), channel_to(port, ssl=ours) as channel:
        channel.start()
        await _until(lambda: channel.state == "clock")
        assert channel.alive


async def test_wrong_credentials_are_refused_and_not_hammered(tmp_path: Path, free_port: Callable[[], int]) -> None:
    port = free_port()
    passwords = tmp_path / "passwords"
    passwords.write_text("")
    config = tmp_path / "auth.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous false\npassword_file {passwords}\npersistence false\nuser root\n"
    )
    tmp_path.chmod(0o755)
    process = subprocess.Popen(
        [mosquitto_binary(), "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port)
        async with channel_to(port, username="pi", password="wrong") as channel:
            channel.start()
            await _until(lambda: channel.state == "refused")
    finally:
        process.kill()
        process.wait()


def test_the_password_is_not_in_the_settings_text() -> None:
    assert "hunter2" not in repr(MqttSettings("h", 1, "c", username="u", password="hunter2"))
