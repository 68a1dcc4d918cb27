"""What a server must withstand: garbage, slow and leaving clients, crowds, foreign web pages, long bodies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from links.http import HttpLink
from links.http_front import ServerLimits
from links.http_server import RunningServer, serve
from links.port import FrameRoute, FrameStream, RejectedStatus, Request, Response, Route
from links.tls import client_context, server_context
from protocol.errors import ConfigError, Full, LinkError, MidstreamError
from tests.unit.links.pki import make_authority

LIMITS = ServerLimits(connections=8, header_s=0.3, body_chunk_s=0.3, body_total_s=1.0, keep_idle_s=0.5, write_s=0.5)


class House:
    """A server with one of each kind of handler, and what they noticed."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.closed = asyncio.Event()
        self.started = asyncio.Event()
        self.frame_handler_ended = asyncio.Event()
        self.peers: list[str | None] = []

    async def hello(self, request: Request) -> Response:
        self.peers.append(request.peer)
        return Response(200, {"content-type": "application/json"}, request.body or b"{}")

    async def wait(self, request: Request) -> Response:
        self.started.set()
        try:
            await asyncio.sleep(30)
        finally:
            self.cancelled.set()
        return Response()

    async def stream(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                yield b"first"
                self.started.set()
                await asyncio.sleep(30)
                yield b"never"
            finally:
                self.closed.set()

        return Response(200, {"content-type": "text/event-stream"}, parts())

    async def flood(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(65536)
            finally:
                self.closed.set()

        return Response(200, {}, parts())

    async def bug(self, request: Request) -> Response:
        raise ValueError("a bug")

    async def full(self, request: Request) -> Response:
        raise Full("too many requests wait", retry_after_s=3.2)

    async def frames(self, request: Request, stream: FrameStream) -> None:
        try:
            while (frame := await stream.receive()) is not None:
                await stream.send(frame)
        finally:
            self.frame_handler_ended.set()

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/hello", self.hello),
            Route("POST", "/hello", self.hello, max_body_bytes=1000),
            Route("POST", "/wait", self.wait),
            Route("POST", "/stream", self.stream),
            Route("GET", "/flood", self.flood),
            Route("GET", "/bug", self.bug),
            Route("GET", "/full", self.full),
        ]


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
async def server(house: House) -> AsyncIterator[RunningServer]:
    running = await serve(house.routes(), [FrameRoute("/frames", house.frames)], origin_check=True, limits=LIMITS)
    yield running
    await running.close(grace_s=0.1)


async def _talk(port: int, request: bytes, seconds: float = 3.0) -> bytes:
    """Send raw bytes, return everything until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()


def _get(port: int, path: str = "/hello", *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
        b"POST /hello HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /hello HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 500 + b"\r\n",
    ],
)
async def test_garbage_is_a_400_in_json(server: RunningServer, garbage: bytes) -> None:
    answer = await _talk(server.port, garbage)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert json.loads(body)["error"]["message"]
    assert (await _talk(server.port, _get(server.port))).startswith(b"HTTP/1.1 200")


async def test_a_client_that_never_finishes_its_header_is_dropped(server: RunningServer) -> None:
    assert await _talk(server.port, b"GET /hello HTTP/1.1\r\nHost: 127") == b""
    assert await _talk(server.port, b"") == b""


async def test_a_body_that_does_not_come_is_a_408(server: RunningServer) -> None:
    head = f"POST /hello HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 100\r\n\r\npart"
    assert (await _talk(server.port, head.encode(), seconds=4)).startswith(b"HTTP/1.1 408")


async def test_long_bodies_are_413_also_when_their_length_is_not_told(server: RunningServer) -> None:
    host = f"Host: 127.0.0.1:{server.port}\r\n"
    told = f"POST /hello HTTP/1.1\r\n{host}Content-Length: 1001\r\nConnection: close\r\n\r\n".encode() + bytes(1001)
    chunk = b"400\r\n" + bytes(0x400) + b"\r\n"
    untold = f"POST /hello HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 4 + b"0\r\n\r\n"
    assert (await _talk(server.port, told)).startswith(b"HTTP/1.1 413")
    assert (await _talk(server.port, untold)).startswith(b"HTTP/1.1 413")


async def test_more_connections_than_allowed_are_told_to_come_back(server: RunningServer) -> None:
    held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(LIMITS.connections)]
    await asyncio.sleep(0.05)
    assert (await _talk(server.port, _get(server.port))).startswith(b"HTTP/1.1 503")
    for _, writer in held:
        writer.close()
    await asyncio.sleep(0.1)
    assert (await _talk(server.port, _get(server.port))).startswith(b"HTTP/1.1 200")


async def test_a_client_that_leaves_cancels_its_handler(server: RunningServer, house: House) -> None:
    request = f"POST /wait HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 2\r\n\r\n{{}}"
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request.encode())
    await asyncio.wait_for(house.started.wait(), 2)
    writer.close()
    await asyncio.wait_for(house.cancelled.wait(), 1)


async def test_a_half_closed_client_counts_as_gone(server: RunningServer, house: House) -> None:
    request = f"POST /wait HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 2\r\n\r\n{{}}"
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request.encode())
    await asyncio.wait_for(house.started.wait(), 2)
    writer.write_eof()
    await asyncio.wait_for(house.cancelled.wait(), 1)
    writer.close()


async def test_a_stream_is_closed_when_its_client_leaves_while_it_waits(server: RunningServer, house: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST /stream HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 0\r\n\r\n".encode())
    assert b"200" in await reader.readline()
    await asyncio.wait_for(house.started.wait(), 2)
    writer.transport.abort()
    await asyncio.wait_for(house.closed.wait(), 1)


async def test_a_client_that_stops_reading_is_given_up(server: RunningServer, house: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(_get(server.port, "/flood"))
    assert b"200" in await reader.readline()
    await asyncio.wait_for(house.closed.wait(), 5)
    writer.transport.abort()


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
async def test_a_client_that_never_takes_a_whole_answer_is_given_up(headers: str) -> None:
    async def much(request: Request) -> Response:
        return Response(200, {}, bytes(8 << 20))

    running = await serve([Route("GET", "/much", much)], limits=LIMITS)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", running.port))
        await loop.sock_sendall(client, f"GET /much?now=1 HTTP/1.1\r\nHost: h\r\n{headers}\r\n".encode())
        async with asyncio.timeout(5):
            while not running.connections:
                await asyncio.sleep(0.01)
            while running.connections:
                await asyncio.sleep(0.01)
    await running.close(grace_s=0.1)


async def test_a_whole_answer_goes_on_while_its_client_takes_some_of_it() -> None:
    async def much(request: Request) -> Response:
        return Response(200, {}, bytes(12 << 20))

    running = await serve([Route("GET", "/much", much)], limits=LIMITS)
    loop, taken_bytes = asyncio.get_running_loop(), 0
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", running.port))
        await loop.sock_sendall(client, b"GET /much?now=1 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(20):
            while part := await loop.sock_recv(client, 1 << 18):
                taken_bytes += len(part)
                await asyncio.sleep(0.03)
    await running.close(grace_s=0.1)
    assert taken_bytes > 12 << 20


async def test_close_ends_what_still_runs_and_frees_the_port(house: House) -> None:
    running = await serve(house.routes(), limits=LIMITS)
    link = HttpLink("here", f"http://127.0.0.1:{running.port}")
    waiting = asyncio.ensure_future(link.exchange("/wait", {}, b"{}", 10))
    await asyncio.wait_for(house.started.wait(), 2)
    await running.close(grace_s=0.05)
    assert house.cancelled.is_set()
    with pytest.raises(LinkError):
        await waiting
    await link.close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", running.port))


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_comes_while_the_server_closes_is_hung_up(house: House, turns: int) -> None:
    """In whichever turn of the loop: not left open until somebody collects garbage."""
    running = await serve(house.routes(), limits=LIMITS)
    gc.collect()
    gc.disable()
    try:
        with socket.create_connection(("127.0.0.1", running.port), timeout=2) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await running.close(grace_s=0.05)
            client.settimeout(2)
            with contextlib.suppress(ConnectionResetError):  # it was still in the backlog
                assert await asyncio.to_thread(client.recv, 1) == b""
    finally:
        gc.enable()


@pytest.mark.parametrize("grace_s", [0.0, -1.0, 0.05])
async def test_close_without_grace_ends_a_frame_handler_that_waits_for_its_peer(house: House, grace_s: float) -> None:
    running = await serve([], [FrameRoute("/frames", house.frames)], limits=LIMITS)
    link = HttpLink("here", f"http://127.0.0.1:{running.port}")
    stream = await link.open("/frames")
    await stream.send(b"hello")
    assert await stream.receive() == b"hello"
    async with asyncio.timeout(8):
        await running.close(grace_s=grace_s)
        await house.frame_handler_ended.wait()
    assert running.connections == 0
    await stream.close()
    await link.close()


async def test_a_port_in_use_names_the_port_and_the_next_step(server: RunningServer) -> None:
    with pytest.raises(ConfigError) as refusal:
        await serve([], port=server.port)
    assert str(server.port) in str(refusal.value)
    assert "another port" in refusal.value.next_step


async def test_an_address_that_is_not_ours_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        await serve([], host="203.0.113.9")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Origin: https://evil.example", 403),
        ("Origin: null", 403),
        ("Sec-Fetch-Site: cross-site", 403),
        ("Origin: http://localhost:3000", 200),
        ("X-Other: 1", 200),
    ],
)
async def test_web_pages_of_other_sites_are_refused(server: RunningServer, header: str, status: int) -> None:
    answer = await _talk(server.port, _get(server.port, "/hello", header))
    assert answer.split()[1] == str(status).encode()
    assert b"access-control" not in answer.lower()


@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1", "127.0.0.1:1", "", "127.0.0.1:{port}@evil.example"])
async def test_a_host_that_is_not_our_loopback_address_is_refused(server: RunningServer, host: str) -> None:
    request = f"GET /hello HTTP/1.1\r\nHost: {host.format(port=server.port)}\r\nConnection: close\r\n\r\n"
    assert (await _talk(server.port, request.encode())).split()[1] in (b"403", b"400")


async def test_the_origin_of_a_websocket_is_checked_too(server: RunningServer) -> None:
    link = HttpLink("here", f"http://127.0.0.1:{server.port}", headers={"origin": "https://evil.example"})
    with pytest.raises(RejectedStatus) as refusal:
        await link.open("/frames")
    assert refusal.value.status == 403
    await link.close()


@pytest.mark.parametrize("version", ["", "Sec-WebSocket-Version: 99\r\n", "Sec-WebSocket-Version: 13\r\n"])
async def test_a_bad_websocket_handshake_is_the_clients_fault(
    server: RunningServer, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = f"GET /frames HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    answer = await _talk(server.port, f"{request}{version}\r\n".encode())
    assert answer.split()[1] == b"400"
    assert b"no WebSocket handshake" in answer
    assert "Traceback" not in caplog.text


async def test_a_vanished_frame_client_ends_its_handler(server: RunningServer, house: House) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"GET /frames HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    await asyncio.sleep(0.1)
    writer.transport.abort()
    await asyncio.wait_for(house.frame_handler_ended.wait(), 2)


async def test_a_frame_header_that_promises_gigabytes_ends_the_stream(server: RunningServer, house: House) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"GET /frames HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    writer.write(b"\x82\xff" + (1 << 33).to_bytes(8, "big") + b"mask" + bytes(100))
    await asyncio.wait_for(house.frame_handler_ended.wait(), 2)
    writer.close()


async def test_a_bug_is_a_500_without_its_text(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        answer = await _talk(server.port, _get(server.port, "/bug"))
    assert answer.startswith(b"HTTP/1.1 500")
    assert b"a bug" not in answer


async def test_full_says_when_to_come_back_and_every_answer_its_server_time(server: RunningServer) -> None:
    answer = (await _talk(server.port, _get(server.port, "/full"))).lower()
    assert answer.startswith(b"http/1.1 503")
    assert b"retry-after: 3\r\n" in answer
    assert b"server-timing: app;dur=" in answer


async def test_head_has_the_headers_of_get_and_no_body(server: RunningServer) -> None:
    answer = await _talk(server.port, _get(server.port).replace(b"GET", b"HEAD"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


async def test_the_house_shapes_errors(house: House) -> None:
    def shaped(request: Request, error: MidstreamError) -> Response:
        return Response(error.http_status, {"content-type": "text/x"}, f"{request.path} {error.code}".encode())

    running = await serve(house.routes(), on_error=shaped)
    link = HttpLink("here", f"http://127.0.0.1:{running.port}")
    reply = await link.exchange("/nowhere", {}, b"", 5)
    assert (reply.status, reply.headers["content-type"], reply.body) == (404, "text/x", b"/nowhere not_found")
    await link.close()
    await running.close()


async def test_the_peer_is_the_name_in_the_verified_certificate(house: House, tmp_path: Path) -> None:
    fleet, stranger = make_authority(tmp_path), make_authority(tmp_path / "other", "other")
    context = server_context(*fleet.issue("coordinator"), fleet.ca_path, require_client=False)
    running = await serve(house.routes(), ssl=context)
    url = f"https://127.0.0.1:{running.port}"
    known = HttpLink("c", url, ssl=client_context(fleet.ca_pem, *fleet.issue("pi-7")))
    anonymous = HttpLink("c", url, ssl=client_context(fleet.ca_pem))
    forged = HttpLink("c", url, ssl=client_context(fleet.ca_pem, *stranger.issue("pi-7")))
    assert (await known.exchange("/hello", {}, b"", 5, method="GET")).status == 200
    assert (await anonymous.exchange("/hello", {}, b"", 5, method="GET")).status == 200
    with pytest.raises(LinkError):
        await forged.exchange("/hello", {}, b"", 5, method="GET")
    assert house.peers == ["pi-7", None]
    for link in (known, anonymous, forged):
        await link.close()
    await running.close()
