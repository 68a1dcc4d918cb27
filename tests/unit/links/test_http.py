"""The HTTP client: samples, bounds, and an error that names the phase for each way to fail."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest

from links.http import HttpLink, server_seconds
from links.http_server import RunningServer, serve
from links.port import Request, Response, Route
from links.shaped import ShaperProxy
from protocol.errors import ConfigError, LinkClosed, LinkError, LinkTimeout
from protocol.events import TransferSample
from tests.raw_peer import accept_websocket, raw_server

FILE = bytes(range(256)) * 2000


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async def work(request: Request) -> Response:
        await asyncio.sleep(0.2)
        return Response(200, {}, b"done")

    async def file(request: Request) -> Response:
        first = request.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
        headers = {"etag": '"v1"'}
        if not first or request.headers.get("if-range", '"v1"') != '"v1"':
            return Response(200, headers, FILE)
        if int(first) >= len(FILE):
            return Response(416, headers | {"content-range": f"bytes */{len(FILE)}"})
        span = f"bytes {first}-{len(FILE) - 1}/{len(FILE)}"
        return Response(206, headers | {"content-range": span}, FILE[int(first) :])

    running = await serve([Route("POST", "/work", work), Route("GET", "/file", file)])
    yield running
    await running.close()


async def test_the_servers_own_time_is_taken_out_of_the_sample(server: RunningServer) -> None:
    samples: list[TransferSample] = []
    link = HttpLink("c", f"http://127.0.0.1:{server.port}", sink=samples.append)
    await link.exchange("/work", {}, bytes(10_000), 5)
    await asyncio.sleep(0.3)
    await link.exchange("/work", {}, bytes(10_000), 5)
    await link.close()
    assert [sample.size_bytes for sample in samples] == [10_000, 10_000]
    assert all(sample.server_s >= 0.19 and sample.seconds < 0.15 for sample in samples)
    assert samples[0].idle_before_s == 0.0
    assert samples[1].idle_before_s >= 0.29


async def test_the_stages_of_an_exchange_are_all_of_its_time(server: RunningServer) -> None:
    """On a clock that moves with each look at it, so that a stage that is forgotten or counted twice shows."""
    looks = itertools.count()
    link = HttpLink("c", f"http://127.0.0.1:{server.port}", clock=lambda: float(next(looks)))
    before = next(looks)
    times = (await link.exchange("/work", {}, bytes(10_000), 5)).times
    assert before + 1 + times.total_s <= next(looks)
    assert times.connect_s > 0
    assert times.send_s > 0
    assert times.receive_s > 0
    await link.close()
    real = HttpLink("c", f"http://127.0.0.1:{server.port}")
    began_s = time.monotonic()
    first = (await real.exchange("/work", {}, bytes(10_000), 5)).times
    elapsed_s = time.monotonic() - began_s
    assert 0.19 <= first.server_s <= first.total_s <= elapsed_s
    kept = (await real.exchange("/work", {}, bytes(10_000), 5)).times
    assert kept.connect_s < first.total_s
    await real.close()


async def test_an_answer_that_is_given_up_on_its_way_took_at_least_so_long(server: RunningServer) -> None:
    samples: list[TransferSample] = []
    shaper = ShaperProxy("127.0.0.1", server.port, up_bytes_per_s=1e6, down_bytes_per_s=100_000.0)
    await shaper.start()
    link = HttpLink("c", f"http://127.0.0.1:{shaper.port}", sink=samples.append)
    task = asyncio.ensure_future(link.exchange("/file", {}, b"", 30, "GET"))
    await asyncio.sleep(0.6)
    seen = link.under_way()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert link.under_way() is None
    await link.close()
    await shaper.close()
    assert seen is not None
    (given_up,) = [sample for sample in samples if sample.direction == "down"]
    for sample in (seen, given_up):
        assert (sample.direction, sample.size_bytes, sample.complete) == ("down", len(FILE), False)
        assert sample.seconds > 0.3
        assert sample.moved_bytes is not None and 10_000 < sample.moved_bytes < len(FILE) / 2


async def test_a_transfer_whose_caller_leaves_took_at_least_so_long(server: RunningServer) -> None:
    samples: list[TransferSample] = []
    link = HttpLink("c", f"http://127.0.0.1:{server.port}", sink=samples.append)
    task = asyncio.ensure_future(link.exchange("/work", {}, bytes(10_000), 5))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await link.close()
    assert [(sample.complete, sample.size_bytes) for sample in samples] == [(False, 10_000)]


async def test_a_transfer_under_way_can_be_seen_and_a_given_up_one_is_told(server: RunningServer) -> None:
    samples: list[TransferSample] = []
    proxy = ShaperProxy("127.0.0.1", server.port, up_bytes_per_s=0)
    link = HttpLink("c", f"http://127.0.0.1:{await proxy.start()}", sink=samples.append)
    assert link.under_way() is None
    stuck = asyncio.ensure_future(link.exchange("/work", {}, bytes(200_000), 0.5))
    await asyncio.sleep(0.2)
    running = link.under_way()
    assert running is not None
    assert (running.size_bytes, running.complete, running.direction) == (200_000, False, "up")
    assert 0.1 < running.seconds < 0.5
    assert running.moved_bytes is None or running.moved_bytes < 200_000
    with pytest.raises(LinkTimeout):
        await stuck
    assert [(sample.size_bytes, sample.complete) for sample in samples] == [(200_000, False)]
    assert samples[0].seconds >= 0.4
    assert link.under_way() is None
    await link.close()
    await proxy.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not count acknowledged bytes")
async def test_a_transfer_under_way_tells_how_much_of_it_has_crossed(server: RunningServer) -> None:
    """The system counts acknowledged bytes; the proxy's buffers take some before they are paced."""
    proxy = ShaperProxy("127.0.0.1", server.port, up_bytes_per_s=400_000)
    link = HttpLink("c", f"http://127.0.0.1:{await proxy.start()}")
    await link.exchange("/work", {}, bytes(1000), 5)
    moving = asyncio.ensure_future(link.exchange("/work", {}, bytes(600_000), 10))
    seen: list[int] = []
    while not moving.done():
        running = link.under_way()
        if running is not None and running.moved_bytes is not None:
            seen.append(running.moved_bytes)
        await asyncio.sleep(0.1)
    await moving
    assert seen == sorted(seen)
    assert len({count for count in seen if 0 < count < 600_000}) >= 4
    await link.close()
    await proxy.close()


async def test_large_answers_are_samples_of_the_way_down(server: RunningServer) -> None:
    samples: list[TransferSample] = []
    link = HttpLink("c", f"http://127.0.0.1:{server.port}", sink=samples.append)
    await link.exchange("/file", {}, b"", 5, method="GET")
    await link.close()
    assert [(sample.direction, sample.size_bytes) for sample in samples] == [("up", 0), ("down", len(FILE))]


async def test_connections_are_kept(server: RunningServer) -> None:
    link = HttpLink("c", f"http://127.0.0.1:{server.port}")
    for _ in range(5):
        await link.exchange("/file", {}, b"", 5, method="GET")
    assert server.connections == 1
    await link.close()


async def test_answers_over_the_bound_are_refused(server: RunningServer) -> None:
    link = HttpLink("c", f"http://127.0.0.1:{server.port}", max_reply_bytes=1000)
    with pytest.raises(LinkError, match="at most 1000"):
        await link.exchange("/file", {}, b"", 5, method="GET")
    await link.close()


async def test_an_answer_without_end_is_cut_off_at_the_bound() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            writer.write(bytes(10_000))
            await writer.drain()

    async with raw_server(endless) as port:
        link = HttpLink("c", f"http://127.0.0.1:{port}", max_reply_bytes=100_000)
        with pytest.raises(LinkError, match="more than the 100000"):
            await link.exchange("/x", {}, b"", 5)
        await link.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", LinkClosed),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfour", LinkClosed),
        (b"this is not HTTP\r\n\r\n", LinkError),
        (b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", LinkError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 40_000 + b"\r\n\r\n", LinkError),
    ],
)
async def test_peers_that_break_the_rules_are_link_errors(answer: bytes, kind: type[LinkError]) -> None:
    async def break_rules(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with raw_server(break_rules) as port:
        link = HttpLink("c", f"http://127.0.0.1:{port}")
        with pytest.raises(kind):
            await link.exchange("/x", {}, b"{}", 2)
        await link.close()


async def test_errors_name_the_peer_and_the_phase(free_port: Callable[[], int]) -> None:
    nobody = HttpLink("desk", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(LinkError, match=r"desk.*connecting") as refusal:
        await nobody.exchange("/x", {}, b"", 2)
    assert refusal.value.next_step

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(10)

    async with raw_server(silent) as port:
        waiting = HttpLink("desk", f"http://127.0.0.1:{port}")
        with pytest.raises(LinkTimeout, match="waiting for the answer"):
            await waiting.exchange("/x", {}, b"{}", 0.2)
        encrypted = HttpLink("desk", f"https://127.0.0.1:{port}")
        with pytest.raises(LinkTimeout, match="connecting"):
            await encrypted.exchange("/x", {}, b"{}", 0.2)
        for link in (waiting, encrypted):
            await link.close()
    await nobody.close()


async def test_a_peer_that_vanishes_in_a_frame_stream_is_link_closed() -> None:
    async def upgrade_then_die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_websocket(reader, writer)
        await asyncio.sleep(0.05)

    async with raw_server(upgrade_then_die) as port:
        link = HttpLink("c", f"http://127.0.0.1:{port}")
        stream = await link.open("/frames")
        with pytest.raises(LinkClosed):
            await stream.receive()
        await stream.close()
        await link.close()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("app;dur=12.5", 0.0125),
        ('db;dur=3, app;desc="x";dur=7', 0.007),
        ("app", 0.0),
        ("app;dur=nonsense", 0.0),
        ("app;dur=-5", 0.0),
        ("app;dur=inf", 0.0),
        ("app;dur=nan", 0.0),
        ("", 0.0),
    ],
)
def test_server_timing_is_read_leniently(value: str, seconds: float) -> None:
    assert server_seconds({"server-timing": value}) == pytest.approx(seconds)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "127.0.0.1:80"])
def test_an_address_that_is_no_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpLink("c", url)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.mark.parametrize(("kept", "connections"), [(True, 2), (False, 1)])
async def test_a_request_that_a_kept_connection_cannot_take_goes_over_another(kept: bool, connections: int) -> None:
    """A peer that breaks a used connection at the next request's head has not acted on it; one that breaks a new
    connection is down."""
    seen = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size_bytes: int) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(size_bytes)
        writer.write(OK)
        await writer.drain()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            if kept:
                await answer(reader, writer, 3)
            await reader.readuntil(b"\r\n\r\n")
            return
        await answer(reader, writer, 20 * len(FILE))
        await reader.read()

    async with raw_server(peer) as port:
        link = HttpLink("peer", f"http://127.0.0.1:{port}")
        if kept:
            assert (await link.exchange("/", {}, b"one", 5)).body == b"ok"
            assert (await link.exchange("/", {}, FILE * 20, 5)).body == b"ok"
        else:
            with pytest.raises(LinkClosed):
                await link.exchange("/", {}, FILE * 20, 5)
        await link.close()
    assert seen == connections
