"""Answering offers: whose, how many, how often; with stand-ins for the library and the signatures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from attrs import define, field

from cloud_stub.rendezvous import Rendezvous, RendezvousLimits, RendezvousPorts
from links.port import Delivery, MessageChannel
from protocol.clock import WallTime
from protocol.decode import decode, encode
from protocol.errors import LinkTimeout, MidstreamError, NotAllowed, ProtocolError
from protocol.signalling import Signal, Signed
from protocol.topics import Topics
from tests.unit.links.data_channels import MemoryChannel


@define(eq=False)
class Answered:
    """A negotiation that connects when it is told to."""

    sdp: str
    go: asyncio.Event = field(factory=asyncio.Event)
    fails: MidstreamError | None = None
    closed: bool = False
    channel: MemoryChannel = field(factory=MemoryChannel)

    async def connected(self) -> MessageChannel:
        await self.go.wait()
        if self.fails is not None:
            raise self.fails
        return self.channel

    async def close(self) -> None:
        self.closed = True


@define(eq=False)
class FakeVisit:
    name: str
    der: bytes
    gone: asyncio.Event = field(factory=asyncio.Event)

    async def closed(self) -> str:
        await self.gone.wait()
        return "left"

    async def close(self) -> None:
        self.gone.set()


@define(eq=False)
class World:
    members: set[str] = field(factory=lambda: {"pi", "pi-2"})
    said: list[tuple[str, Signal]] = field(factory=list)
    answers: list[Answered] = field(factory=list)
    visits: list[FakeVisit] = field(factory=list)
    unusable: bool = False
    broken: Exception | None = None
    limits: RendezvousLimits = field(factory=RendezvousLimits)
    point: Rendezvous = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.point = Rendezvous(
            RendezvousPorts(
                read=self.read, sign=encode, publish=self.publish, answer=self.answer,
                may_enter=lambda name, der: name in self.members and der == b"der", serve=self.serve,
                wall=lambda: WallTime(100.0, True),
            ),
            self.limits,
        )  # fmt: skip

    def read(self, payload: bytes, device_id: str) -> Signed:
        signal = decode(Signal, payload, what="signal")
        if signal.device_id != device_id:
            raise NotAllowed("not its own")
        return Signed(signal, b"der")

    async def publish(self, device_id: str, document: bytes) -> None:
        self.said.append((device_id, decode(Signal, document, what="signal")))

    async def answer(self, sdp: str) -> Answered:
        if self.unusable:
            raise ProtocolError("the offer cannot be used")
        self.answers.append(Answered("answer to " + sdp))
        return self.answers[-1]

    def serve(self, channel: MessageChannel, name: str, der: bytes) -> FakeVisit:
        if self.broken is not None:
            raise self.broken
        self.visits.append(FakeVisit(name, der))
        return self.visits[-1]

    def offer(self, number: int, device: str = "pi", *, topic: str | None = None, retained: bool = False) -> None:
        signal = Signal(kind="offer", id=f"{number:032x}", device_id=device, sdp=f"offer {number}")
        self.point.on_offer(Delivery(topic or Topics("lab", device).signal_offer, encode(signal), retained))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.point.stop()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_offer_is_answered_and_what_comes_of_it_is_served(world: World) -> None:
    world.offer(1)
    await until(lambda: world.said)
    device, said = world.said[0]
    assert (device, said.kind, said.id, said.sdp, said.at) == ("pi", "answer", f"{1:032x}", "answer to offer 1", 100.0)
    world.answers[0].go.set()
    await until(lambda: world.point.visits == 1)
    assert (world.visits[0].name, world.visits[0].der) == ("pi", b"der")
    world.visits[0].gone.set()
    await until(lambda: world.point.visits == 0)


async def test_a_second_delivery_and_a_kept_one_are_no_offers(world: World) -> None:
    world.offer(1)
    world.offer(1)
    world.offer(2, retained=True)
    world.point.on_offer(Delivery(Topics("lab", "pi").signal_offer, b""))
    await until(lambda: world.said)
    await asyncio.sleep(0.02)
    assert len(world.answers) == 1


async def test_what_is_not_its_own_is_dropped_without_a_word(world: World) -> None:
    world.offer(1, "pi", topic=Topics("lab", "pi-2").signal_offer)
    world.point.on_offer(Delivery("elsewhere", b"x"))
    world.point.on_offer(Delivery(Topics("lab", "pi").signal_offer, b"noise"))
    await asyncio.sleep(0.02)
    assert (world.point.dropped, world.said, world.answers) == (3, [], [])


async def test_strangers_and_offers_that_cannot_be_used_are_refused_with_a_reason(world: World) -> None:
    world.offer(1, "pi-3")
    world.unusable = True
    world.offer(2)
    await until(lambda: len(world.said) == 2)
    assert {said.id[-1]: (said.kind, said.reason) for _, said in world.said} == {
        "1": ("refusal", "this device is no member of the fleet"),
        "2": ("refusal", "the offer cannot be used"),
    }


async def test_a_devices_next_offer_ends_the_one_before(world: World) -> None:
    world.offer(1)
    await until(lambda: len(world.said) == 1)
    world.offer(2)
    await until(lambda: world.answers[0].closed and len(world.said) == 2)
    for answered in world.answers:
        answered.go.set()
    await until(lambda: world.point.visits == 1)
    world.offer(3)
    await until(lambda: len(world.answers) == 3)
    assert not world.visits[0].gone.is_set(), "the old way stays until the new one is there"
    world.answers[2].go.set()
    await until(lambda: len(world.visits) == 2 and world.visits[0].gone.is_set())
    assert world.point.visits == 1


async def test_no_path_closes_the_negotiation(world: World) -> None:
    world.offer(1)
    await until(lambda: world.said)
    world.answers[0].fails = LinkTimeout("no path")
    world.answers[0].go.set()
    await until(lambda: world.answers[0].closed)
    assert world.visits == []


async def test_a_device_that_loses_its_rights_is_out(world: World) -> None:
    world.offer(1)
    world.offer(2, "pi-2")
    await until(lambda: len(world.said) == 2)
    world.answers[0].go.set()
    await until(lambda: world.point.visits == 1)
    world.members.clear()
    await world.point.end("pi")
    await world.point.end("pi-2")
    assert world.visits[0].gone.is_set()
    await until(lambda: world.answers[1].closed)
    # Lost in the moment between the answer and the connection.
    world.members.add("pi")
    world.offer(3)
    await until(lambda: len(world.answers) == 3)
    world.members.clear()
    world.answers[2].go.set()
    await until(lambda: world.answers[2].channel.closed)
    assert len(world.visits) == 1


async def test_there_is_a_most_of_everything() -> None:
    world = World(limits=RendezvousLimits(negotiations=2, visits=1, ids=2, retry_after_s=7.0))
    world.offer(1)
    await until(lambda: world.said)
    world.answers[0].go.set()
    await until(lambda: world.point.visits == 1)
    world.offer(2, "pi-2")
    await until(lambda: len(world.said) == 2)
    assert (world.said[1][1].kind, world.said[1][1].retry_after_s) == ("refusal", 7.0)
    world.offer(3)
    await until(lambda: len(world.answers) == 2)
    assert len(world.point._seen) == 2
    await world.point.stop()


async def test_a_device_that_cannot_be_served_leaves_nothing_open(world: World) -> None:
    world.broken = RuntimeError("a bug")
    world.offer(1)
    await until(lambda: world.said)
    world.answers[0].go.set()
    await until(lambda: world.answers[0].channel.closed)
    assert world.point.visits == 0
    world.broken = None
    world.offer(2)
    await until(lambda: len(world.answers) == 2)
    world.answers[1].go.set()
    await until(lambda: world.point.visits == 1)
