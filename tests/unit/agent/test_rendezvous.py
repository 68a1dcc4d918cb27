"""The second way to the coordinator, without a network: when it is offered, what counts as an answer, when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import pytest
from attrs import define, evolve, field

from agent.health import Health
from agent.rendezvous import Mode, Rendezvous, RendezvousPorts, Waits
from links.port import Delivery, MessageChannel
from protocol.clock import WallTime
from protocol.decode import decode, encode
from protocol.errors import ConfigError, LinkClosed, MidstreamError, ProtocolError
from protocol.signalling import Signal, Signed
from tests.unit.links.data_channels import MemoryChannel


@define
class Offering:
    """A negotiation that connects when its answer is taken."""

    sdp: str = "offer"
    taken: str = ""
    fails: MidstreamError | None = None
    closed: bool = False

    async def accept(self, answer: str) -> None:
        self.taken = answer

    async def connected(self) -> MemoryChannel:
        if self.fails is not None:
            raise self.fails
        return MemoryChannel()

    async def close(self) -> None:
        self.closed = True


@define(eq=False)
class FakeLink:
    ended: asyncio.Event = field(factory=asyncio.Event)
    closes: int = 0
    idle: bool = True

    def idle_s(self) -> float:
        return 100.0 if self.idle else 0.0

    async def closed(self) -> str:
        await self.ended.wait()
        return "the peer left"

    async def close(self) -> None:
        self.closes += 1
        self.ended.set()


@define(eq=False)
class World:
    """What the way sees of the agent, and what it did. `reply` makes the coordinator's answer to an offer."""

    possible: bool = True
    needed: bool = True
    now_s: float = 0.0
    reply: Callable[[Signal], Signal | None] = lambda offer: Signal(
        kind="answer", id=offer.id, device_id="pi", sdp="answer"
    )
    fails: MidstreamError | None = None
    cannot: MidstreamError | None = None
    offers: list[Signal] = field(factory=list)
    offerings: list[Offering] = field(factory=list)
    links: list[FakeLink] = field(factory=list)
    unused: int = 0
    unusable: Exception | None = None
    channels: list[MemoryChannel] = field(factory=list)
    way: Rendezvous | None = None
    health: Health = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.health = Health(lambda: self.now_s)

    def ports(self) -> RendezvousPorts:
        return RendezvousPorts(
            possible=lambda: self.possible, needed=lambda: self.needed, offer=self.offer, send=self.send, sign=encode,
            read=self.read, use=self.use, unused=self.leave, health=self.health, clock=lambda: self.now_s,
            wall=lambda: WallTime(0.0, False),
        )  # fmt: skip

    async def offer(self) -> Offering:
        if self.cannot is not None:
            raise self.cannot
        self.offerings.append(Offering(fails=self.fails))
        return self.offerings[-1]

    async def send(self, document: bytes) -> None:
        offer = decode(Signal, document, what="signal")
        self.offers.append(offer)
        answer = self.reply(offer)
        if answer is not None:
            self.deliver(answer)

    def deliver(self, answer: Signal, *, retained: bool = False) -> None:
        assert self.way is not None
        self.way.on_answer(Delivery("t", encode(answer), retained))

    def read(self, data: bytes) -> Signed:
        signal = decode(Signal, data, what="signal")
        if signal.device_id != "pi":
            raise ProtocolError("another device's")
        return Signed(signal, b"")

    async def use(self, channel: MessageChannel) -> FakeLink:
        if self.unusable is not None:
            assert isinstance(channel, MemoryChannel)
            self.channels.append(channel)
            raise self.unusable
        self.links.append(FakeLink())
        return self.links[-1]

    async def leave(self) -> None:
        self.unused += 1


QUICK = Waits(first_s=0.02, longest_s=0.05, grace_s=0.02, linger_s=0.1, look_s=0.02)


class Start(Protocol):
    def __call__(self, world: World, mode: Mode, waits: Waits = QUICK) -> Rendezvous: ...


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Begin a way whose pauses are short; it ends with the test."""
    tasks: list[asyncio.Task[None]] = []

    def begin(world: World, mode: Mode, waits: Waits = QUICK) -> Rendezvous:
        world.way = Rendezvous(mode, "pi", world.ports(), waits)
        tasks.append(asyncio.ensure_future(world.way.run()))
        return world.way

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_it_is_offered_only_when_it_is_possible_and_needed(start: Start) -> None:
    world = World(possible=False)
    way = start(world, "auto")
    await asyncio.sleep(0.1)
    world.possible, world.needed = True, False
    way.poke()
    await asyncio.sleep(0.1)
    assert world.offers == []
    world.needed = True
    way.poke()
    await until(lambda: way.state == "up")
    assert [offering.taken for offering in world.offerings] == ["answer"]
    assert not world.offerings[0].closed


async def test_always_needs_no_need_and_off_nothing(start: Start) -> None:
    always, off = World(needed=False), World()
    way, none = start(always, "always"), start(off, "off")
    await until(lambda: way.state == "up")
    await asyncio.sleep(0.2)
    assert (way.state, none.state, off.offers) == ("up", "off", [])


async def test_an_answer_to_another_offer_or_of_another_or_kept_is_none(start: Start) -> None:
    world = World(reply=lambda offer: None)
    way = start(world, "auto")
    await until(lambda: world.offers)
    mine = Signal(kind="answer", id=world.offers[0].id, device_id="pi", sdp="right")
    world.deliver(Signal(kind="answer", id="0" * 32, device_id="pi", sdp="stale"))
    world.deliver(Signal(kind="answer", id=mine.id, device_id="other", sdp="foreign"))
    world.deliver(Signal(kind="offer", id=mine.id, device_id="pi", sdp="echo"))
    world.deliver(mine, retained=True)
    way.on_answer(Delivery("t", b"noise"))
    await asyncio.sleep(0.05)
    assert way.state == "offering"
    world.deliver(mine)
    await until(lambda: way.state == "up")
    assert world.offerings[0].taken == "right"
    world.deliver(mine)  # nobody waits any more


async def test_a_link_that_ends_is_offered_anew(start: Start) -> None:
    world = World()
    way = start(world, "auto")
    await until(lambda: len(world.links) == 1)
    world.links[0].ended.set()
    await until(lambda: len(world.links) == 2)
    way.on_trouble(LinkClosed("three answers are late"))
    await until(lambda: len(world.links) == 3)
    assert (world.unused, [link.closes for link in world.links[:2]]) == (2, [1, 1])
    assert len({offer.id for offer in world.offers}) == 3


async def test_it_is_closed_when_the_direct_way_is_there_for_good(start: Start) -> None:
    world = World()
    way = start(world, "auto")
    await until(lambda: way.state == "up")
    world.links[0].idle, world.needed = False, False
    await asyncio.sleep(0.2)
    assert way.state == "up", "an answer is still coming over it"
    world.links[0].idle = True
    await until(lambda: world.links[0].closes)
    assert (way.state, world.unused) == ("idle", 1)
    await asyncio.sleep(0.1)
    assert len(world.offers) == 1


@pytest.mark.parametrize(
    ("fails", "cannot", "reason"),
    [
        (LinkClosed("no path to the peer"), None, "no path"),
        (None, ConfigError("a package is missing", next_step="pip install"), "package"),
    ],
)
async def test_what_fails_is_a_warning_and_tried_again(
    start: Start, fails: MidstreamError | None, cannot: MidstreamError | None, reason: str
) -> None:
    world = World(fails=fails, cannot=cannot)
    way = start(world, "auto")
    await until(lambda: any(reason in warning.text for warning in world.health.warnings))
    assert all(offering.closed for offering in world.offerings)
    world.fails = world.cannot = None
    await until(lambda: way.state == "up")
    assert list(world.health.warnings) == []


async def test_a_refusal_says_why_and_when_to_come_back(start: Start) -> None:
    world = World(reply=lambda offer: Signal(kind="refusal", id=offer.id, device_id="pi", reason="too many devices"))
    way = start(world, "auto")
    await until(lambda: "too many devices" in way.trouble)
    assert world.offerings[0].closed
    world.reply = lambda offer: Signal(
        kind="refusal", id=offer.id, device_id="pi", reason="full", retry_after_s=0.2
    )  # fmt: skip
    await until(lambda: "full" in way.trouble)
    tried = len(world.offers)
    await asyncio.sleep(0.03)
    assert len(world.offers) == tried, "the bound that we set ourselves is the longest pause"


async def test_a_connection_that_lived_for_good_after_s_begins_the_pauses_anew(start: Start) -> None:
    world = World(fails=LinkClosed("no path to the peer"))
    way = start(world, "auto", evolve(QUICK, good_after_s=30.0))
    await until(lambda: way._tries >= 3)
    world.fails = None
    await until(lambda: way.state == "up")
    grown = way._tries
    world.links[0].ended.set()
    await until(lambda: len(world.links) == 2)
    assert way._tries == grown + 1, "a short life proves nothing"
    world.now_s += 31.0
    world.links[1].ended.set()
    await until(lambda: len(world.links) == 3)
    assert way._tries == 1


async def test_a_channel_that_cannot_be_used_is_closed(start: Start) -> None:
    world = World(unusable=LinkClosed("it has ended already"))
    way = start(world, "auto")
    await until(lambda: len(world.channels) >= 2)
    assert world.channels[0].closed
    world.unusable = None
    await until(lambda: way.state == "up")
