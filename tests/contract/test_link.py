"""One suite over every Link: memory, shaped memory, HTTP, through a shaping proxy, over mutual TLS, and WebRTC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from attrs import define, field

from links.channel_link import ChannelLink
from links.channel_server import ChannelServer, Peer
from links.channel_session import Session
from links.http import HttpLink
from links.http_front import plain_error
from links.http_lean import LeanHttpLink
from links.http_server import serve
from links.memory import MemoryLink
from links.port import MAX_FRAME_BYTES, FrameRoute, FrameStream, Link, RejectedStatus, Request, Response, Route
from links.shaped import Conditions, ShapedLink, ShaperProxy
from links.tls import client_context, server_context
from protocol.errors import BadRequest, LinkClosed, LinkError, LinkTimeout, TooLarge
from protocol.events import TransferSample
from tests.unit.links.data_channels import connected
from tests.unit.links.pki import make_authority

KINDS = ("memory", "shaped", "http", "proxied", "tls", "webrtc", "lean", "lean-tls")


@define
class House:
    """A link under test, what its server saw, and the samples it emitted."""

    link: Link
    samples: list[TransferSample] = field(factory=list)
    closed: list[str] = field(factory=list)
    cancelled: list[str] = field(factory=list)


def _routes(house: House) -> tuple[list[Route], list[FrameRoute]]:
    async def echo(request: Request) -> Response:
        if request.query.get("fail"):
            raise BadRequest("this field is wrong", field="inputs[0].shape")
        headers = {"content-type": "application/octet-stream", "x-name": request.params["name"]}
        return Response(200, headers, request.body)

    async def slow(request: Request) -> Response:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            house.cancelled.append(request.path)
            raise
        return Response()

    async def stream(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                yield b"data: 1\n\n"
                yield b"data: 2\n\n"
                if request.query.get("hang"):
                    await asyncio.sleep(30)
            finally:
                house.closed.append(request.path)

        return Response(200, {"content-type": "text/event-stream"}, parts())

    async def frames(request: Request, stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            if frame == b"leave":
                return
            await stream.send(frame)
        house.closed.append(request.path)

    routes = [
        Route("POST", "/echo/{name}", echo, max_body_bytes=3 << 20),
        Route("GET", "/echo/{name}", echo),
        Route("POST", "/slow", slow),
        Route("POST", "/stream", stream),
    ]
    return routes, [FrameRoute("/frames", frames)]


@pytest.fixture(params=KINDS)
async def house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    kind = request.param
    house = House(link=MemoryLink("none"))
    routes, frame_routes = _routes(house)
    sink = house.samples.append
    async with AsyncExitStack() as stack:
        if kind in ("memory", "shaped"):
            if kind == "memory":
                house.link = MemoryLink("cloud", routes, frame_routes, on_error=plain_error, sink=sink)
            else:
                fast = Conditions(up_bytes_per_s=1e9, down_bytes_per_s=1e9, delay_s=0.001)
                inner = MemoryLink("cloud", routes, frame_routes, on_error=plain_error)
                house.link = ShapedLink(inner, lambda at_s: fast, sink=sink)
        elif kind == "webrtc":
            ours, theirs = await connected()
            served = ChannelServer(routes, frame_routes, Peer("pi-1"), on_error=plain_error)
            far = Session(theirs, "pi-1", accept=served.accept)
            for end in (far.close, served.close):
                stack.push_async_callback(end)
            house.link = ChannelLink("cloud", Session(ours, "cloud"), sink=sink)
        else:
            server_tls = client_tls = None
            if kind.endswith("tls"):
                authority = make_authority(tmp_path)
                server_tls = server_context(*authority.issue("coordinator"), authority.ca_path, require_client=True)
                client_tls = client_context(authority.ca_pem, *authority.issue("pi-1"))
            server = await serve(routes, frame_routes, ssl=server_tls)
            stack.push_async_callback(server.close)
            port = server.port
            if kind == "proxied":
                proxy = ShaperProxy("127.0.0.1", port, up_bytes_per_s=50e6, delay_s=0.001)
                port = await proxy.start()
                stack.push_async_callback(proxy.close)
            address = f"{'https' if client_tls else 'http'}://127.0.0.1:{port}"
            if kind.startswith("lean"):
                house.link = LeanHttpLink("cloud", address, ssl=client_tls)
            else:
                house.link = HttpLink("cloud", address, ssl=client_tls, sink=sink)
        stack.push_async_callback(house.link.close)
        yield house


def full_client_only(house: House) -> None:
    if isinstance(house.link, LeanHttpLink):
        pytest.skip("the lean client has exchanges and streams, no frames and no samples")


async def test_exchange_returns_the_whole_answer(house: House) -> None:
    body = bytes(range(256)) * 4096
    reply = await house.link.exchange("/echo/det", {"X-Any": "1"}, body, 10)
    assert (reply.status, reply.body, reply.headers["x-name"]) == (200, body, "det")


async def test_get_has_no_body_and_percent_names_are_decoded(house: House) -> None:
    reply = await house.link.exchange("/echo/a%20b", {}, b"", 10, method="GET")
    assert (reply.status, reply.body, reply.headers["x-name"]) == (200, b"", "a b")


async def test_exchange_hands_over_any_status(house: House) -> None:
    unknown = await house.link.exchange("/nowhere", {}, b"{}", 10)
    wrong_method = await house.link.exchange("/slow", {}, b"", 10, method="GET")
    bad_field = await house.link.exchange("/echo/x?fail=1", {}, b"{}", 10)
    too_long = await house.link.exchange("/echo/x", {}, bytes((3 << 20) + 1), 10)
    assert [r.status for r in (unknown, wrong_method, bad_field, too_long)] == [404, 405, 400, 413]
    assert b"inputs[0].shape" in bad_field.body


async def test_deadline_passes(house: House) -> None:
    with pytest.raises(LinkTimeout):
        await house.link.exchange("/slow", {}, b"", 0.15)
    for _ in range(100):
        if house.cancelled:
            break
        await asyncio.sleep(0.01)
    assert house.cancelled == ["/slow"]


async def test_lines_arrive_in_order(house: House) -> None:
    chunks = [chunk async for chunk in house.link.lines("/stream", {}, b"{}", 10)]
    assert b"".join(chunks) == b"data: 1\n\ndata: 2\n\n"
    assert house.closed == ["/stream"]


async def test_leaving_a_stream_closes_it_at_the_server_while_it_waits(house: House) -> None:
    lines = house.link.lines("/stream?hang=1", {}, b"{}", 10)
    received = b""
    while received != b"data: 1\n\ndata: 2\n\n":
        received += await anext(lines)
    await lines.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(1):
        while not house.closed:
            await asyncio.sleep(0.005)


async def test_a_stream_that_stalls_is_a_timeout(house: House) -> None:
    with pytest.raises(LinkTimeout):
        async for _ in house.link.lines("/stream?hang=1", {}, b"{}", 0.2):
            pass


async def test_lines_raise_the_status_of_a_refusal(house: House) -> None:
    with pytest.raises(RejectedStatus) as refusal:
        async for _ in house.link.lines("/nowhere", {}, b"{}", 10):
            pass
    assert refusal.value.status == 404
    assert b"/nowhere" in refusal.value.body


async def test_frames_go_both_ways_in_order(house: House) -> None:
    full_client_only(house)
    stream = await house.link.open("/frames")
    sent = [b"", b"one", bytes(MAX_FRAME_BYTES)]
    for frame in sent:
        await stream.send(frame)
    assert [await stream.receive() for _ in sent] == sent
    await stream.close()
    async with asyncio.timeout(2):
        while not house.closed:
            await asyncio.sleep(0.005)


async def test_the_server_may_end_a_stream_in_order(house: House) -> None:
    full_client_only(house)
    stream = await house.link.open("/frames")
    await stream.send(b"leave")
    assert await stream.receive() is None
    with pytest.raises(LinkClosed):
        for _ in range(200):
            await stream.send(bytes(1000))
            await asyncio.sleep(0.005)
    await stream.close()


async def test_a_frame_over_the_limit_is_refused_before_it_is_sent(house: House) -> None:
    full_client_only(house)
    stream = await house.link.open("/frames")
    with pytest.raises(TooLarge):
        await stream.send(bytes(MAX_FRAME_BYTES + 1))
    await stream.send(b"still open")
    assert await stream.receive() == b"still open"
    await stream.close()


async def test_an_unknown_frame_route_is_a_refusal(house: House) -> None:
    full_client_only(house)
    with pytest.raises(RejectedStatus) as refusal:
        await house.link.open("/nowhere")
    assert refusal.value.status == 404


async def test_each_exchange_leaves_a_sample(house: House) -> None:
    full_client_only(house)
    await house.link.exchange("/echo/det", {}, bytes(100_000), 10)
    ups = [sample for sample in house.samples if sample.direction == "up"]
    assert [sample.size_bytes for sample in ups] == [100_000]
    assert all(sample.complete and sample.seconds >= 0 and sample.link == "cloud" for sample in house.samples)


async def test_a_closed_link_says_so(house: House) -> None:
    await house.link.close()
    with pytest.raises(LinkError):
        await house.link.exchange("/echo/det", {}, b"{}", 1)
