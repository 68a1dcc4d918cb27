"""The control plane on the in-memory broker: what devices say is kept, what they should do is published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from attrs import define, field

from cloud_stub.authority import open_authority
from cloud_stub.coordinator import RESEND_AFTER_S, Coordinator, Sent, goodbye, must_send
from cloud_stub.publishing import Publisher
from cloud_stub.registry import SqliteRegistry
from links.memory_control import MemoryBroker, MemoryControlChannel
from links.port import Delivery
from protocol.clock import FakeClock, WallTime
from protocol.decode import decode, encode
from protocol.device import DeviceProfile
from protocol.documents import CoordinatorState, Presence, Registration, Reported
from protocol.events import LinkStateChanged, PolicyJudged, RecordingEmit
from protocol.policy import Policy
from protocol.signature import Envelope
from protocol.topics import MAX_PAYLOAD_BYTES, Topics, coord_state

NOW_S = 1_800_000_000.0
STATE = CoordinatorState(addresses=("127.0.0.1",), port=8791, broker_port=8883, fingerprint="f" * 64, epoch=3)


@define(eq=False)
class Device:
    """The device's half: publishes documents, records what it gets."""

    channel: MemoryControlChannel
    topics: Topics
    seen: list[Delivery] = field(factory=list)

    async def start(self) -> None:
        for pattern in (self.topics.policy_desired, coord_state("lab")):
            await self.channel.subscribe(pattern, self.seen.append)

    async def birth(self, epoch: int = 1, state: str = "online") -> None:
        await self.channel.publish(self.topics.state, encode(Presence(s=state, epoch=epoch)), retain=True)  # type: ignore[arg-type]

    async def register(self, device_id: str | None = None, **labels: str) -> None:
        profile = DeviceProfile(device_id=device_id or self.topics.device_id, labels=labels)
        await self.channel.publish(self.topics.profile, encode(Registration(profile=profile, epoch=1)), retain=True)

    async def report(self, version: int, epoch: int, accepted: bool = True) -> None:
        reported = Reported(version=version, epoch=epoch, accepted=accepted, code="accepted", held_version=version)
        await self.channel.publish(self.topics.policy_reported, encode(reported), retain=True)

    def policies(self) -> list[Policy]:
        found = [d for d in self.seen if d.topic == self.topics.policy_desired]
        return [decode(Policy, decode(Envelope, d.payload, what="e").payload, what="p") for d in found]


@define(eq=False)
class Room:
    """A coordinator on a memory broker."""

    broker: MemoryBroker
    coordinator: Coordinator
    registry: SqliteRegistry
    publisher: Publisher
    clock: FakeClock
    emit: RecordingEmit
    devices: list[Device] = field(factory=list)

    async def device(self, device_id: str = "pi-1") -> Device:
        topics = Topics("lab", device_id)
        will = Delivery(topics.state, encode(Presence(s="offline", epoch=1)), retained=True)
        device = Device(MemoryControlChannel(self.broker, device_id, will=will), topics)
        await device.start()
        self.devices.append(device)
        return device

    def publish(self, text: str = "") -> int:
        version = self.publisher.publish(text.encode(), "toml").policy.version
        self.coordinator.refresh()
        return version


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    broker, clock, emit = MemoryBroker(), FakeClock(), RecordingEmit()
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    authority = open_authority(tmp_path / "s", "lab", NOW_S)
    publisher = Publisher(authority, registry, lambda: WallTime(NOW_S, True))
    channel = MemoryControlChannel(
        broker, "coordinator", will=goodbye("lab"), max_payload_bytes=MAX_PAYLOAD_BYTES + 1024
    )
    coordinator = Coordinator(
        channel, registry, publisher, lambda: STATE, "lab", clock=clock, wall=lambda: WallTime(NOW_S, True), emit=emit
    )
    await coordinator.start()
    room = Room(broker, coordinator, registry, publisher, clock, emit)
    yield room
    await coordinator.stop()
    for device in room.devices:
        await device.channel.close()
    registry.close()


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(3):
        while not check():
            await asyncio.sleep(0.005)


async def test_addresses_are_retained_and_taken_back(room: Room) -> None:
    device = await room.device()
    await until(lambda: device.seen)
    assert decode(CoordinatorState, device.seen[0].payload, what="s") == STATE
    await room.coordinator.stop()
    assert device.seen[-1].payload == b""
    late = await room.device("pi-2")
    assert late.seen == []


async def test_the_will_takes_the_addresses_back_too(room: Room) -> None:
    device = await room.device()
    await until(lambda: device.seen)
    room.broker.sever("coordinator")
    assert device.seen[-1].payload == b""
    room.broker.restart()
    await until(lambda: device.seen[-1].payload)


async def test_births_profiles_and_reports_are_kept(room: Room) -> None:
    device = await room.device()
    await device.birth()
    await device.register(room="kitchen")
    await device.report(4, 1)
    (kept,) = room.registry.devices()
    assert kept.online and kept.labels == {"room": "kitchen"}
    assert kept.reported is not None and kept.reported.held_version == 4
    assert any(isinstance(e, PolicyJudged) and e.accepted for e in room.emit.events)
    await device.birth(epoch=2)
    room.broker.sever("pi-1")
    (kept,) = room.registry.devices()
    assert kept.online, "the will has the epoch of the session before"


async def test_policy_reaches_those_it_selects_now_and_later(room: Room) -> None:
    kitchen, hall = await room.device("pi-1"), await room.device("pi-2")
    await kitchen.register(room="kitchen")
    await hall.register(room="hall")
    room.publish("[split]\nperiods = 4\n")
    room.publish('[selector]\nroom = "kitchen"\n[split]\nperiods = 8\n')
    await until(lambda: kitchen.policies() and hall.policies())
    assert kitchen.policies()[-1].split.periods == 8
    assert hall.policies()[-1].split.periods == 4
    late = await room.device("pi-3")
    await late.register(room="kitchen")
    await until(late.policies)
    assert late.policies()[-1].version == 2


async def test_a_device_that_is_away_gets_it_when_it_returns(room: Room) -> None:
    device = await room.device()
    await device.register()
    room.broker.sever("pi-1")
    version = room.publish()
    await asyncio.sleep(0.05)
    room.broker.restart()
    await until(device.policies)
    assert device.policies()[-1].version == version


async def test_an_older_report_is_answered_with_the_desired_policy_again(room: Room) -> None:
    """After a reconnect that only looks like one: the report says what really arrived."""
    device = await room.device()
    await device.register()
    version = room.publish()
    await until(device.policies)
    epoch = device.policies()[-1].epoch
    await device.report(0, 0)
    await asyncio.sleep(0.05)
    assert len(device.policies()) == 1, "not in the same breath"
    room.clock.advance(RESEND_AFTER_S + 1)
    await device.birth()
    await until(lambda: len(device.policies()) == 2)
    await device.report(version, epoch)
    room.clock.advance(RESEND_AFTER_S + 1)
    await device.birth(2)
    await asyncio.sleep(0.05)
    assert len(device.policies()) == 2, "judged: left alone"


async def test_a_broker_that_vanishes_and_returns_is_filled_again(room: Room) -> None:
    device = await room.device()
    await device.register()
    room.publish()
    await until(device.policies)
    room.broker.stop()
    assert room.coordinator.broker_state == "down"
    room.broker._retained.clear()
    room.broker.restart()
    await until(lambda: len(device.policies()) >= 2 and device.seen[-1].payload)
    assert [e.state for e in room.emit.events if isinstance(e, LinkStateChanged)] == ["up", "down", "up"]


@pytest.mark.parametrize(
    "payload",
    [
        b"{", b"null", b"[]", b'{"s":"online"}', b'{"s":"dancing","epoch":1}', b'{"s":"online","epoch":"1"}', b"\xff",
        b'{"s":"online","epoch":1,"schema":"midstream.presence/9.0"}', b"x" * (MAX_PAYLOAD_BYTES + 1),
    ],
)  # fmt: skip
async def test_garbage_is_dropped_and_counted(room: Room, payload: bytes) -> None:
    rogue = MemoryControlChannel(room.broker, "rogue", max_payload_bytes=1 << 20)
    for topic in (
        "midstream/v1/lab/pi-1/state",
        "midstream/v1/lab/pi-1/profile",
        "midstream/v1/lab/pi-1/policy/reported",
    ):
        await rogue.publish(topic, payload)
    await rogue.publish("midstream/v1/lab/NOT AN ID/state", payload)
    assert room.coordinator.dropped == 4
    assert room.registry.devices() == []
    device = await room.device()
    await device.birth()
    assert room.registry.devices()[0].online
    await rogue.close()


async def test_a_profile_of_another_device_is_dropped(room: Room) -> None:
    device = await room.device()
    await device.register("pi-9")
    assert room.coordinator.dropped == 1
    assert room.registry.devices() == []


async def test_forgetting_clears_what_the_broker_retains(room: Room) -> None:
    device = await room.device()
    await device.birth()
    await device.register()
    room.publish()
    await until(device.policies)
    room.registry.forget("pi-1")
    await room.coordinator.forget("pi-1")
    assert [t for t in room.broker._retained if "pi-1" in t] == []


def test_the_rule_of_sending(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    publisher = Publisher(open_authority(tmp_path / "s", "lab", NOW_S), registry, lambda: WallTime(NOW_S, True))
    desired = publisher.publish(b"", "toml")
    epoch = desired.policy.epoch
    judged = Reported(version=1, epoch=epoch, accepted=False, code="not_selected")
    older = Reported(version=0, epoch=epoch, accepted=True, code="accepted")
    sent = Sent(epoch, 1, 100.0)
    assert not must_send(None, None, None, 0.0)
    assert must_send(desired, judged, None, 0.0), "once per broker session"
    assert not must_send(desired, judged, sent, 1000.0), "refused stays refused"
    assert not must_send(desired, older, sent, 100.0 + RESEND_AFTER_S - 1)
    assert must_send(desired, older, sent, 100.0 + RESEND_AFTER_S)
    assert must_send(desired, judged, Sent(epoch, 0, 100.0), 100.0), "a newer one"
    registry.close()
