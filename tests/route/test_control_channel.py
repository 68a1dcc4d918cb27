"""The control channel over real sockets: instructions, results, restarts, and apps that vanish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.control_channel import ChannelSettings, ControlChannel, Desired
from gateway.ports import OpenKeys
from gateway.result_store import ResultBounds, SqliteResults
from links.http import HttpLink
from links.http_server import RunningServer, serve
from midstream_sdk import Client
from protocol.control_frames import PATH, Hello, Instruction, Result, read_frame, write_frame
from tests.unit.midstream_sdk.engines import SayingEngine


class House:
    """A gateway's channel on a real server; it can be stopped and opened again on the same port and disk."""

    def __init__(self, folder: Path, heartbeat_s: float = 5.0) -> None:
        self.folder = folder
        self.settings = ChannelSettings(heartbeat_s=heartbeat_s)
        self.desired = Desired("device", "m")
        self.port = 0
        self.results: list[Result] = []
        self.channel: ControlChannel
        self._server: RunningServer

    async def open(self) -> None:
        self.store = SqliteResults(self.folder / "results.sqlite")
        self.channel = ControlChannel(
            OpenKeys(),
            self.store,
            lambda: self.desired,
            time.monotonic,
            self.settings,
            lambda c, s, r: self.results.append(r),
        )
        await self.channel.start()
        self._server = await serve([], [self.channel.route()], host="127.0.0.1", port=self.port)
        self.port = self._server.port

    async def close(self) -> None:
        await self.channel.stop()
        await self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    await made.open()
    yield made
    await made.close()


def app(house: House, engine: SayingEngine | None = None, session: str | None = None) -> Client:
    return Client(None, house.url, engines={"device": engine or SayingEngine("a", "b")}, session=session, device="pi")


async def until(true: object, timeout_s: float = 8.0) -> None:
    assert callable(true)
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


async def test_an_app_is_told_its_route_and_model_and_warms_on_demand(house: House) -> None:
    engine = SayingEngine("yes")
    async with app(house, engine) as client:
        assert client.channel is not None
        await client.channel.connected()
        await until(lambda: len(house.results) >= 2)
        assert (client.order[0], client.model().model) == ("device", "m")
        assert await house.channel.instruct(Instruction(id="w1", do="warm", model="m")) == 1
        await until(lambda: any(result.of == "w1" for result in house.results))
        warm = next(result for result in house.results if result.of == "w1")
        assert warm.kind == "done" and {"cold_ttft_ms", "warm_ttft_ms"} <= warm.body.keys()
        house.desired = Desired("cloud", "m")
        await house.channel.refresh()
        await until(lambda: client.order[0] == "cloud")
        (seen,) = house.channel.sessions
        assert (seen.device, seen.connected) == ("pi", True) and "device" in seen.engines


async def test_what_an_app_ran_itself_is_told_without_its_words(house: House) -> None:
    async with app(house) as client:
        assert client.channel is not None
        await client.channel.connected()
        await client.model("m", "device").generate("a secret question")
        await until(lambda: any(result.kind == "answer" for result in house.results))
        answer = next(result for result in house.results if result.kind == "answer")
        assert answer.body["pieces"] == 2 and "secret" not in str(answer.body)


async def test_an_instruction_that_fails_is_told_with_its_code(house: House) -> None:
    async with app(house) as client:
        assert client.channel is not None
        await client.channel.connected()
        await house.channel.instruct(Instruction(id="bad", do="warm", target="nowhere", model="m"))
        await until(lambda: any(result.of == "bad" for result in house.results))
        assert next(result for result in house.results if result.of == "bad").kind == "failed"


async def test_a_restart_under_fifty_streams_loses_nothing_and_loads_nothing_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.open()
    engines = [SayingEngine("x") for _ in range(50)]
    clients = [app(house, engine) for engine in engines]
    for client, engine in zip(clients, engines, strict=True):
        await client.__aenter__()
        assert client.channel is not None
        await client.channel.connected(30.0)
        await client.model("m", "device").generate("load it")
        assert engine.loads == ["m"]

    async def stream(number: int, client: Client) -> None:
        assert client.channel is not None
        for part in range(40):
            client.channel.report(f"stream {number}", "part", {"part": part})
            await asyncio.sleep(0.02)

    streaming = [asyncio.create_task(stream(number, client)) for number, client in enumerate(clients)]
    await asyncio.sleep(0.3)
    await house.close()
    await asyncio.sleep(0.2)
    await house.open()
    await asyncio.gather(*streaming)
    for client in clients:
        assert client.channel is not None
        await client.channel.settled(40.0)
    for number, (client, engine) in enumerate(zip(clients, engines, strict=True)):
        assert client.channel is not None and client.channel.connections >= 2
        kept = await house.store.results("local", client.channel.session)
        assert [r.seq for r in kept] == list(range(1, len(kept) + 1))
        assert [r.body["part"] for r in kept if r.of == f"stream {number}"] == list(range(40))
        assert engine.loads == ["m"]
        await client.close()
    await house.close()


async def test_results_sent_twice_are_kept_once(house: House) -> None:
    link = HttpLink("raw", house.url)
    for _ in range(2):
        stream = await link.open(PATH)
        await stream.send(write_frame(Hello(session="a" * 32)))
        await stream.receive()
        for seq in (1, 2, 2, 1, 3):
            await stream.send(write_frame(Result(seq=seq, of=str(seq), kind="part")))
        await until(lambda: [r.seq for r in house.results][-1:] == [3])
        await stream.close()
    assert [result.seq for result in await house.store.results("local", "a" * 32)] == [1, 2, 3]
    assert [result.seq for result in house.results] == [1, 2, 3]
    await link.close()


@pytest.mark.parametrize("first", [b"nonsense", b'{"type":"beat"}', write_frame(Hello(session="a" * 32))[:-3]])
async def test_a_bad_start_gets_a_sentence(house: House, first: bytes) -> None:
    link = HttpLink("raw", house.url)
    stream = await link.open(PATH)
    await stream.send(first)
    data = await stream.receive()
    assert data is not None
    answer = read_frame(data)
    assert answer is not None and answer.type == "bye" and answer.reason
    await stream.close()
    await link.close()


async def test_an_app_that_restarts_under_its_old_session_is_heard_and_told(house: House) -> None:
    for _ in range(2):
        async with app(house, session="d" * 32) as client:
            assert client.channel is not None
            client.channel.report("x", "part", {})
            await client.channel.connected()
            await client.channel.settled()
            await until(lambda: client.order[0] == "device" and client.model().model == "m")
            await until(lambda: len(house.channel.sessions[0].session) == 32)
    kept = await house.store.results("local", "d" * 32)
    assert [r.of for r in kept].count("x") == 2


async def test_a_gateway_that_lost_its_disk_takes_what_waits(tmp_path: Path) -> None:
    house = House(tmp_path / "one")
    await house.open()
    async with app(house) as client:
        assert client.channel is not None
        await client.channel.connected()
        await client.channel.settled()
        await house.close()
        client.channel.report("late", "part", {})
        house.folder = tmp_path / "two"
        await house.open()
        await client.channel.settled(40.0)
        assert "late" in [r.of for r in await house.store.results("local", client.channel.session)]
        await house.channel.instruct(Instruction(id="w", do="warm", model="m"))
        await until(lambda: any(result.of == "w" for result in house.results))
    await house.close()


async def test_a_second_connection_of_a_session_takes_it_over(house: House) -> None:
    async with app(house, session="b" * 32) as one:
        assert one.channel is not None
        await one.channel.connected()
        link = HttpLink("raw", house.url)
        stream = await link.open(PATH)
        await stream.send(write_frame(Hello(session="b" * 32)))
        assert await stream.receive() is not None
        assert len(house.channel.sessions) == 1
        await stream.close()
        await link.close()


async def test_silent_apps_are_reaped_within_two_heartbeats(tmp_path: Path) -> None:
    house = House(tmp_path, heartbeat_s=0.4)
    await house.open()
    link = HttpLink("raw", house.url, connections=200)
    streams = []
    for number in range(100):
        stream = await link.open(PATH)
        await stream.send(write_frame(Hello(session=f"{number:032x}")))
        await stream.receive()
        streams.append(stream)
    begun_s = time.monotonic()
    await until(lambda: not any(session.connected for session in house.channel.sessions), 10.0)
    assert house.channel.reaped == 100
    assert time.monotonic() - begun_s < 5.0  # two heartbeats, and what a busy machine adds
    for stream in streams:
        await stream.close()
    await link.close()
    await house.close()


async def test_the_store_forgets_the_oldest_and_keeps_tenants_apart(tmp_path: Path) -> None:
    store = SqliteResults(tmp_path / "r.sqlite", ResultBounds(results=5))
    results = [Result(seq=seq, of="x", kind="part") for seq in range(1, 11)]
    assert await store.keep("a", "s", results) == 10
    assert [r.seq for r in await store.results("a", "s")] == [6, 7, 8, 9, 10]
    assert await store.results("b", "s") == []
    assert await store.keep("a", "s", [Result(seq=12, of="x", kind="part")]) == 10
    assert (await store.received("a", "s"), await store.received("b", "s")) == (10, 0)
    await store.close()
