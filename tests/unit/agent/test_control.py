"""The control way over an in-memory broker: birth and will, registration on change, policy, canary, reconnecting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from attrs import evolve

from agent.config import PolicyBounds
from agent.control import Control, ControlPorts, will
from agent.policy import PolicyHolder
from agent.registration import Registrar
from links.memory_control import MemoryBroker, MemoryControlChannel
from links.port import ControlState, Delivery
from protocol.clock import WallTime
from protocol.decode import decode, encode
from protocol.device import DeviceProfile
from protocol.documents import CoordinatorState, Presence, Registration, Reported
from protocol.errors import Full
from protocol.topics import MAX_PAYLOAD_BYTES, Topics, coord_state
from tests.unit.agent.test_policy import NOW_S, holder, policy, signed

TOPICS = Topics("f", "pi")


class Fleet:
    """A broker, a coordinator's ear on it, and one device."""

    def __init__(self, tmp_path: Path, canary_timeout_s: float = 1.0, first_up_s: float = 10.0) -> None:
        self.broker = MemoryBroker()
        self.ear = MemoryControlChannel(self.broker, "coordinator", max_payload_bytes=MAX_PAYLOAD_BYTES)
        self.heard: list[Delivery] = []
        self.states: list[ControlState] = []
        self.told: list[CoordinatorState] = []
        self.deaf = 0
        self.profile = DeviceProfile(device_id="pi")
        self.holder: PolicyHolder = holder(tmp_path)
        self.channel = MemoryControlChannel(
            self.broker, "pi", will=will(TOPICS, 4, "boot"), max_payload_bytes=MAX_PAYLOAD_BYTES
        )
        ports = ControlPorts(
            on_state=self.states.append,
            on_coordinator=self.told.append,
            on_deaf=self._on_deaf,
            wall=lambda: WallTime(NOW_S, True),
        )
        self.registrar = Registrar(lambda: self.profile, lambda: ("m",), "1")
        self.control = Control(
            self.channel, TOPICS, epoch=4, boot="boot", holder=self.holder, registrar=self.registrar, ports=ports,
            canary_timeout_s=canary_timeout_s, first_up_s=first_up_s,
        )  # fmt: skip

    def _on_deaf(self) -> None:
        self.deaf += 1

    async def start(self) -> None:
        await self.ear.subscribe(f"{TOPICS.root}/#", self.heard.append)
        await self.control.start()
        await until(lambda: "up" in self.states)

    def last(self, topic: str) -> bytes:
        return [d.payload for d in self.heard if d.topic == topic][-1]

    def count(self, topic: str) -> int:
        return sum(d.topic == topic for d in self.heard)

    async def stop(self) -> None:
        await self.control.stop()
        await self.ear.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_birth_registration_and_goodbye_carry_one_epoch(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    birth = decode(Presence, fleet.last(TOPICS.state), what="presence")
    assert (birth.s, birth.epoch, birth.boot) == ("online", 4, "boot")
    registration = decode(Registration, fleet.last(TOPICS.profile), what="registration")
    assert (registration.epoch, registration.models) == (4, ("m",))
    await fleet.stop()
    goodbye = decode(Presence, fleet.last(TOPICS.state), what="presence")
    assert (goodbye.s, goodbye.epoch) == ("offline", 4)


async def test_a_lost_connection_leaves_the_will_and_the_return_is_a_birth_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    fleet.broker.sever("pi")
    await until(lambda: decode(Presence, fleet.last(TOPICS.state), what="presence").s == "offline")
    fleet.broker.restart()
    await until(lambda: decode(Presence, fleet.last(TOPICS.state), what="presence").s == "online")
    await until(lambda: fleet.states[-1] == "up")
    await fleet.stop()


async def test_the_profile_is_sent_again_only_when_it_changed_or_the_coordinator_began_anew(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    await fleet.control.register()
    assert fleet.count(TOPICS.profile) == 1
    fleet.profile = DeviceProfile(device_id="pi", cores=4)
    await fleet.control.register()
    assert fleet.count(TOPICS.profile) == 2
    for epoch in (1, 2):
        state = CoordinatorState(addresses=("10.0.0.1",), port=1, broker_port=2, fingerprint="", epoch=epoch)
        await fleet.ear.publish(coord_state("f"), encode(state), retain=True)
    await until(lambda: fleet.count(TOPICS.profile) == 3)
    assert [told.epoch for told in fleet.told] == [1, 2]
    await fleet.stop()


async def test_every_session_registers_for_the_broker_may_have_begun_empty(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    fleet.broker.stop()
    fleet.broker._retained.clear()
    fleet.states.clear()
    fleet.broker.restart()
    await until(lambda: "up" in fleet.states)
    assert {TOPICS.profile, TOPICS.state} <= set(fleet.broker._retained)
    await fleet.stop()


async def test_a_registration_that_was_not_taken_is_still_to_be_told(tmp_path: Path) -> None:
    class Choosy(MemoryControlChannel):
        """Refuses profiles as a full outbox does."""

        full = True

        async def publish(self, topic: str, payload: bytes, *args: object, **kwargs: object) -> None:
            if self.full and topic == TOPICS.profile:
                raise Full("the outbox is full", retry_after_s=1.0)
            await super().publish(topic, payload, *args, **kwargs)  # type: ignore[arg-type]

    fleet = Fleet(tmp_path)
    channel = Choosy(fleet.broker, "pi", max_payload_bytes=MAX_PAYLOAD_BYTES)
    fleet.control._channel = channel
    await fleet.start()
    assert fleet.count(TOPICS.profile) == 0, "and the session is up all the same"
    channel.full = False
    await fleet.control.register()
    assert fleet.count(TOPICS.profile) == 1
    await fleet.stop()


async def test_a_broker_that_never_answered_is_told_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, first_up_s=0.02)
    fleet.broker.stop()
    await fleet.control.start()
    await until(lambda: fleet.states == ["down"])
    fleet.broker.restart()
    await until(lambda: fleet.states[-1] == "up")
    await fleet.stop()


async def test_the_registration_names_the_policy_in_force(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    await fleet.ear.publish(TOPICS.policy_desired, signed(policy(2)), retain=True)
    await until(lambda: fleet.count(TOPICS.profile) == 2)
    assert decode(Registration, fleet.last(TOPICS.profile), what="registration").policy_version == 2
    await fleet.stop()


async def test_a_policy_published_while_the_device_was_away_is_applied_and_reported(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.ear.publish(TOPICS.policy_desired, signed(policy(2)), retain=True)
    await fleet.start()
    await until(lambda: fleet.holder.current().version == 2)
    await until(lambda: fleet.count(TOPICS.policy_reported) > 0)
    reported = decode(Reported, fleet.last(TOPICS.policy_reported), what="reported")
    assert (reported.accepted, reported.version) == (True, 2)
    await fleet.stop()


async def test_a_policy_published_during_an_outage_arrives_after_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    fleet.broker.stop()
    await fleet.ear.publish(TOPICS.policy_desired, signed(policy(3)), retain=True)
    fleet.broker.restart()
    await until(lambda: fleet.holder.current().version == 3)
    await until(lambda: fleet.count(TOPICS.policy_reported) > 0)
    await fleet.stop()


async def test_a_refused_policy_is_reported_with_its_code(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    await fleet.ear.publish(TOPICS.policy_desired, signed(policy(1), bytes(32)), retain=True)
    await until(lambda: fleet.count(TOPICS.policy_reported) > 0)
    reported = decode(Reported, fleet.last(TOPICS.policy_reported), what="reported")
    assert (reported.accepted, reported.code, reported.held_version) == (False, "bad_signature", 0)
    await fleet.stop()


async def test_a_session_that_gives_nothing_back_is_deaf_not_up(tmp_path: Path) -> None:
    class Mute(MemoryControlChannel):
        """Takes everything and delivers nothing, as a session that the broker has forgotten."""

        def _receive(self, delivery: Delivery) -> None:
            return None

    fleet = Fleet(tmp_path, canary_timeout_s=0.05)
    fleet.channel = Mute(fleet.broker, "pi", max_payload_bytes=MAX_PAYLOAD_BYTES)
    fleet.control._channel = fleet.channel
    await fleet.control.start()
    await until(lambda: fleet.deaf == 1)
    assert "up" not in fleet.states
    await fleet.stop()


async def test_garbage_on_our_topics_is_ignored(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    await fleet.ear.publish(coord_state("f"), b"\xff{", retain=True)
    await fleet.ear.publish(coord_state("f"), b"", retain=True)
    state = CoordinatorState(addresses=("10.0.0.1",), port=1, broker_port=2, fingerprint="", epoch=1)
    for schema in ("midstream.coordinator/2.0", "midstream.presence/1.0"):
        await fleet.ear.publish(coord_state("f"), encode(evolve(state, schema=schema)), retain=True)
    await fleet.ear.publish(TOPICS.policy_desired, b"", retain=True)
    await asyncio.sleep(0.02)
    assert fleet.told == []
    assert fleet.holder.current().version == 0
    await fleet.stop()


async def test_other_bounds_are_reported_to_the_fleet(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start()
    await fleet.ear.publish(TOPICS.policy_desired, signed(policy(2)), retain=True)
    await until(lambda: fleet.count(TOPICS.policy_reported) == 1)
    fleet.holder.rebound(PolicyBounds(max_answer_tokens=10))
    await fleet.control.report()
    await until(lambda: fleet.count(TOPICS.policy_reported) == 2)
    reported = decode(Reported, fleet.last(TOPICS.policy_reported), what="reported")
    assert (reported.version, reported.sections["limits"]) == (2, "clamped: max_answer_tokens = 10")
    await fleet.stop()
