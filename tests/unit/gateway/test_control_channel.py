"""The control channel against apps that do not read, do not acknowledge, or say too much."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from gateway.context import Caller
from gateway.control_channel import CROWD, ChannelSettings, ControlChannel, Desired
from gateway.freed_memory import give_back
from gateway.ports import OpenKeys
from gateway.result_store import SqliteResults
from links.port import FrameStream, Request
from protocol.control_frames import PATH, Ack, Bye, Hello, Instruction, Welcome, read_frame, write_frame


class AppStream:
    """The gateway's end of one app. stuck: it takes no frame any more."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.stuck = False
        self._coming: asyncio.Queue[bytes | None] = asyncio.Queue()

    def say(self, data: bytes | None) -> None:
        self._coming.put_nowait(data)

    async def send(self, frame: bytes) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        self.sent.append(frame)

    async def receive(self) -> bytes | None:
        return await self._coming.get()

    def acknowledged(self) -> int | None:
        return None

    async def close(self) -> None:
        """Nothing is open."""


class LeavingStream(AppStream):
    """An app that hangs up at a goodbye, before its sender goes on."""

    def __init__(self, handlers: list[asyncio.Task[None]]) -> None:
        super().__init__()
        self._handlers = handlers

    async def send(self, frame: bytes) -> None:
        await super().send(frame)
        if isinstance(read_frame(frame), Bye):
            self.say(None)
            await asyncio.wait(self._handlers[-1:])


class SlowStream(AppStream):
    """It takes nothing before `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        await self.go.wait()
        await super().send(frame)


SETTINGS = ChannelSettings(heartbeat_s=60.0, waiting=4, send_s=0.05)


class NamedKeys(OpenKeys):
    """A tenant is who says so."""

    def caller(self, headers: Mapping[str, str], remote_ip: str | None, peer: str | None = None) -> Caller:
        return Caller(tenant=headers.get("who", "local"))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not true():
            await asyncio.sleep(0.005)


class House:
    """A channel with apps on it."""

    def __init__(self, folder: Path, settings: ChannelSettings = SETTINGS) -> None:
        self.folder = folder
        self.desired = Desired("device", "m")
        self.channel = ControlChannel(
            NamedKeys(), SqliteResults(folder / "r.sqlite"), lambda: self.desired, time.monotonic, settings
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def app(self, number: int, tenant: str = "local", received: int = 0) -> AppStream:
        app = AppStream()
        stream: FrameStream = app
        app.say(write_frame(Hello(session=f"{number:032x}", received=received)))
        self.tasks.append(asyncio.create_task(self.channel.handle(Request("GET", PATH, {"who": tenant}), stream)))
        while len(app.sent) < 3:
            await asyncio.sleep(0.005)
        return app

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.channel.stop()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    yield made
    await made.close()


async def test_apps_that_take_no_frames_hold_up_nobody_and_are_ended(house: House) -> None:
    stuck = [await house.app(number) for number in range(8)]
    good = await house.app(100)
    for app in stuck:
        app.stuck = True
    async with asyncio.timeout(2.0):
        assert await house.channel.instruct(Instruction(id="w", do="warm", model="m")) == 9
        house.desired = Desired("cloud", "m")
        await house.channel.refresh()
    told = [read_frame(frame) for frame in good.sent]
    assert [one.do for one in told if isinstance(one, Instruction)] == ["route", "switch", "warm", "route"]
    await asyncio.wait(house.tasks[:8], timeout=1.0)
    assert [session.connected for session in house.channel.sessions] == [False] * 8 + [True]


async def test_an_app_that_acknowledges_nothing_loses_the_oldest_and_is_told_how_many(house: House) -> None:
    lazy, good = await house.app(1), await house.app(2)
    for number in range(6):
        good.say(write_frame(Ack(seq=100)))
        await asyncio.sleep(0.02)
        assert await house.channel.instruct(Instruction(id=f"w{number}", do="warm", model="m")) == 2
    assert [(one.waiting, one.lost) for one in house.channel.sessions] == [(4, 4), (1, 0)]
    lazy.say(None)
    await asyncio.wait(house.tasks[:1])
    back = await house.app(1, received=3)  # route, switch and w0 were taken, w1 went
    welcome, *rest = (read_frame(frame) for frame in back.sent)
    assert isinstance(welcome, Welcome) and welcome.lost == 1 and welcome.resumed
    await until(lambda: len(back.sent) == 7)
    rest = [read_frame(frame) for frame in back.sent[1:]]
    assert [(one.seq, one.id) for one in rest if isinstance(one, Instruction)] == [
        (4, "w2"), (5, "w3"), (6, "w4"), (7, "w5"), (8, "route"), (9, "switch"),
    ]  # fmt: skip


async def test_what_is_given_during_the_greeting_keeps_its_turn(house: House) -> None:
    """Sent at once, it overtook what waited, and an app that takes numbers in order was deaf from then on."""
    app, slow = await house.app(1), SlowStream()
    await house.channel.instruct(Instruction(id="w0", do="warm", model="m"))
    app.say(None)
    await asyncio.wait(house.tasks)
    stream: FrameStream = slow
    slow.say(write_frame(Hello(session=f"{1:032x}")))
    house.tasks.append(asyncio.create_task(house.channel.handle(Request("GET", PATH, {"who": "local"}), stream)))
    await until(lambda: house.channel.sessions[0].connected)
    assert await house.channel.instruct(Instruction(id="w1", do="warm", model="m")) == 1
    slow.go.set()
    await until(lambda: len(slow.sent) == 5)
    told = [read_frame(frame) for frame in slow.sent[1:]]
    assert [(one.seq, one.id) for one in told if isinstance(one, Instruction)] == [
        (1, "w0"), (2, "w1"), (3, "route"), (4, "switch"),
    ]  # fmt: skip


async def test_a_gateway_that_stops_waits_for_all_at_once_and_for_nobody_long(house: House) -> None:
    """One after the other, a crowd that reads nothing held the stop up; an app that left at its goodbye broke it."""
    for number in range(40):
        (await house.app(number)).stuck = True
    leaving = LeavingStream(house.tasks)
    stream: FrameStream = leaving
    leaving.say(write_frame(Hello(session=f"{100:032x}")))
    house.tasks.append(asyncio.create_task(house.channel.handle(Request("GET", PATH, {}), stream)))
    await until(lambda: len(leaving.sent) == 3)
    async with asyncio.timeout(4.0):
        await house.channel.stop()
        await asyncio.wait(house.tasks)
    assert isinstance(read_frame(leaving.sent[-1]), Bye)


async def test_an_app_that_never_acknowledges_is_never_locked_out(house: House) -> None:
    for _ in range(6):
        app = await house.app(1)
        assert [type(read_frame(frame)) for frame in app.sent] == [Welcome, Instruction, Instruction]
        app.say(None)
        await asyncio.wait(house.tasks)
    assert [(one.waiting, one.lost, one.connected) for one in house.channel.sessions] == [(2, 0, False)]


async def test_one_tenants_apps_leave_places_for_other_tenants_and_its_newcomers_are_told_why(tmp_path: Path) -> None:
    house = House(tmp_path, ChannelSettings(heartbeat_s=60.0, sessions=9))
    for number in range(8):
        await house.app(number, "greedy")
    refused = AppStream()
    refused.say(write_frame(Hello(session=f"{8:032x}")))
    await house.channel.handle(Request("GET", PATH, {"who": "greedy"}), refused)
    (bye,) = (read_frame(frame) for frame in refused.sent)
    assert isinstance(bye, Bye) and "8 apps of this tenant" in bye.reason and "9 places" in bye.reason
    await house.app(1, "small")
    await house.close()


async def test_what_waits_for_an_app_that_stays_away_is_forgotten_in_the_end(house: House) -> None:
    app = await house.app(1)
    await house.channel.instruct(Instruction(id="w", do="warm", model="m"))
    app.say(None)
    await asyncio.wait(house.tasks)
    house.channel.sweep(time.monotonic() + 3_600.0)
    assert len(house.channel.sessions) == 1
    house.channel.sweep(time.monotonic() + 90_000.0)
    assert not house.channel.sessions


@pytest.mark.parametrize("hello", [{"device": "d" * 300}, {"engines": ("e" * 300,)}, {"models": ("m" * 300,)}])
async def test_names_in_a_hello_are_bounded(house: House, hello: dict[str, object]) -> None:
    app = AppStream()
    app.say(write_frame(Hello(session="0" * 32, **hello)))  # type: ignore[arg-type]
    await house.channel.handle(Request("GET", PATH, {}), app)
    (bye,) = (read_frame(frame) for frame in app.sent)
    assert isinstance(bye, Bye) and f"{next(iter(hello))}" in bye.reason and "256" in bye.reason
    assert not house.channel.sessions


async def test_a_full_disk_is_told_to_the_operator_and_not_to_apps(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    (house.folder / "r.sqlite").write_bytes(b"no database, " * 100)
    app = AppStream()
    app.say(write_frame(Hello(session="0" * 32)))
    await house.channel.handle(Request("GET", PATH, {}), app)
    (bye,) = (read_frame(frame) for frame in app.sent)
    assert isinstance(bye, Bye) and "later" in bye.reason and "sqlite" not in bye.reason
    assert any("r.sqlite" in record.message for record in caplog.records)


async def test_memory_is_given_back_once_when_a_crowd_has_gone(tmp_path: Path) -> None:
    given: list[int] = []
    store = SqliteResults(tmp_path / "r.sqlite")
    settings = ChannelSettings(heartbeat_s=0.1)
    channel = ControlChannel(
        OpenKeys(), store, lambda: Desired("device"), time.monotonic, settings, crowd_left=lambda: given.append(1)
    )
    await channel.start()
    for number in range(CROWD + 1):
        app = AppStream()
        app.say(write_frame(Hello(session=f"{number:032x}")))
        app.say(None)
        await channel.handle(Request("GET", PATH, {}), app)
    await until(lambda: bool(given))
    await asyncio.sleep(0.2)
    assert given == [1]
    await channel.stop()


def test_giving_memory_back_frees_what_only_refers_to_itself() -> None:
    class Knot:
        """Refers to itself."""

        def __init__(self) -> None:
            self.itself = self

    gone = weakref.ref(Knot())
    give_back()
    assert gone() is None
