"""The control channel against apps that do not read, do not acknowledge, or say too much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.control_channel import ChannelSettings, ControlChannel, Desired
from gateway.ports import OpenKeys
from gateway.result_store import SqliteResults
from links.port import FrameStream, Request
from protocol.control_frames import PATH, Ack, Bye, Hello, Instruction, read_frame, write_frame
from protocol.errors import Full


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


class House:
    """A channel with apps on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.desired = Desired("device", "m")
        settings = ChannelSettings(heartbeat_s=60.0, waiting=4, send_s=0.05)
        self.channel = ControlChannel(
            OpenKeys(), SqliteResults(folder / "r.sqlite"), lambda: self.desired, time.monotonic, settings
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def app(self, number: int) -> AppStream:
        app = AppStream()
        stream: FrameStream = app
        app.say(write_frame(Hello(session=f"{number:032x}")))
        self.tasks.append(asyncio.create_task(self.channel.handle(Request("GET", PATH, {}), stream)))
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


async def test_an_app_that_acknowledges_nothing_is_passed_over_and_the_others_are_told(house: House) -> None:
    await house.app(1)
    good = await house.app(2)
    for number in range(4):
        good.say(write_frame(Ack(seq=100)))
        await asyncio.sleep(0.02)
        told = await house.channel.instruct(Instruction(id=f"w{number}", do="warm", model="m"))
        assert told == (2 if number < 2 else 1)
    with pytest.raises(Full):
        await house.channel.instruct(Instruction(id="x", do="warm", model="m"), session=f"{1:032x}")


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
