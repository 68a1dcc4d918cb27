"""Plain requests: read as the full server reads them however the network cuts them; all else goes to that server."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.http_parser import HttpRequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

from links.http_front import Front, ServerLimits, plain_error
from links.http_plain import MAX_PLAIN_BYTES, Head, PlainConnections, head_bytes, head_of
from links.http_server import RunningServer, serve
from links.port import Request, Response, Route
from links.router import Router
from links.tls import client_context, server_context
from tests.unit.links.pki import make_authority

PLAIN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a:1\r\nContent-Length: 2\r\nX-Any:  b \r\n\r\n{}"


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async def echo(request: Request) -> Response:
        mark = request.headers.get("x-mark", "")
        return Response(200, {"x-length": str(len(request.body)), "x-mark": mark}, request.body)

    async def wait(request: Request) -> Response:
        await asyncio.sleep(0.2)
        return Response(200, {}, b"waited")

    async def parts(request: Request) -> Response:
        async def made() -> AsyncIterator[bytes]:
            yield b"one"
            yield b""
            yield b"two"

        return Response(200, {"content-type": "text/plain"}, made())

    async def file(request: Request) -> Response:
        async def made() -> AsyncIterator[bytes]:
            yield b"one"
            yield b"two"

        return Response(200, {"Content-Length": request.headers.get("x-declared", "6")}, made())

    async def empty(request: Request) -> Response:
        async def made() -> AsyncIterator[bytes]:
            yield b"never"

        whole = request.headers.get("x-whole")
        return Response(204, {}, b"never" if whole else made())

    async def cancelled(request: Request) -> Response:
        raise asyncio.CancelledError

    async def broken(request: Request) -> Response:
        return Response(200, {"x-broken": "a\r\nset-cookie: b"}, b"never")

    routes = [
        Route("POST", "/echo", echo),
        Route("GET", "/echo", echo),
        Route("POST", "/wait", wait),
        Route("POST", "/parts", parts),
        Route("POST", "/file", file),
        Route("POST", "/broken", broken),
        Route("POST", "/empty", empty),
        Route("POST", "/cancelled", cancelled),
    ]
    running = await serve(routes, limits=ServerLimits(header_s=1.0, keep_idle_s=0.4, body_chunk_s=0.5))
    yield running
    await running.close(grace_s=0.1)


async def _said(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Everything the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def test_a_plain_head_is_taken_apart() -> None:
    found = head_of(PLAIN)
    headers = {"host": "a:1", "content-length": "2", "x-any": "b"}
    assert found == Head("POST", "/v1/chat/completions", headers, len(PLAIN) - 2, len(PLAIN), True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"POST", b"HEAD"),
        (b"POST", b"post"),
        (b"POST ", b"POST  "),
        (b"/v1/chat", b"/v1/../chat"),
        (b"/v1/chat", b"/v1/%63hat"),
        (b"/v1/chat", b"//v1/chat"),
        (b"completions", b"completions?a=1"),
        (b"/v1/chat", b"http://other/v1/chat"),
        (b"Host: a:1\r\n", b""),
        (b"Content-Length: 2", b"Content-Length: +2"),
        (b"Content-Length: 2", b"Content-Length: 2, 2"),
        (b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 2"),
        (b"Content-Length: 2", b"Content-Length : 2"),
        (b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 2", b"Content-Length: 2\r\nTransfer-Encoding: identity"),
        (b"X-Any:  b", b"Expect: 100-continue"),
        (b"X-Any:  b", b"Upgrade: websocket"),
        (b"X-Any:  b", b"Connection: upgrade"),
        (b"X-Any:  b", b"X-Any: a\r\n b"),
        (b"X-Any:  b", b"X-Any: a\nX-Other: b"),
        (b"X-Any:  b", b"X-Any: a\rb"),
        (b"X-Any:  b", b"X-Any: a\x00b"),
        (b"X-Any:  b", "X-Any: ü".encode()),
        (b"X-Any:  b", b"X-Any"),
        (b"X-Any:  b", b": b"),
        (b"X-Any:  b", b"X-Any: " + b"a" * 9000),
    ],
)
def test_what_is_not_plain_is_left_to_the_full_server(old: bytes, new: bytes) -> None:
    assert old in PLAIN
    assert head_of(PLAIN.replace(old, new)) is None


_TOKEN = st.text("abcXYZ019-_!#", min_size=1, max_size=8)
_VALUE = st.text(st.characters(min_codepoint=9, max_codepoint=126), max_size=12)
_PATH = st.text("ab/.~-:%?#", max_size=10)


@settings(max_examples=300)
@given(_PATH, st.lists(st.tuples(_TOKEN, _VALUE), max_size=4), st.sampled_from(["", "0", "7", "07"]))
def test_whatever_is_taken_as_plain_the_full_server_reads_alike(
    path: str, fields: list[tuple[str, str]], length: str
) -> None:
    lines = [f"POST /{path} HTTP/1.1", "host: h", *(f"{name}:{value}" for name, value in fields)]
    lines += [f"content-length: {length}"] if length else []
    data = ("\r\n".join(lines) + "\r\n\r\n").encode()
    found = head_of(data)
    if found is not None:
        message = _full(data)
        assert (found.method, found.path) == (message.method, message.url.raw_path)
        assert found.headers == {name.lower(): value for name, value in message.headers.items()}
        assert found.size_bytes - found.body_at == int(message.headers.get("content-length", "0"))
        assert found.keeps is not message.should_close


def _full(data: bytes) -> Any:
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(None, loop, 2**16)  # type: ignore[arg-type]
        messages, upgraded, _ = parser.feed_data(data)
        assert not upgraded
        assert len(messages) == 1
        return messages[0][0]
    finally:
        loop.close()


@pytest.mark.parametrize("step", [1, 7, 60, 1000])
async def test_requests_come_in_any_cut_and_several_on_a_connection(server: RunningServer, step: int) -> None:
    sent = _post("/echo", b"first") + _post("/echo", b"x" * 200) + _post("/echo", b"last", "Connection: close")
    answer = await _said(server.port, *(sent[at : at + step] for at in range(0, len(sent), step)))
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answer.index(b"first") < answer.index(b"x" * 200) < answer.index(b"last")
    assert answer.endswith(b"connection: close\r\n\r\nlast")


async def test_a_request_in_two_slow_halves_is_served_and_the_next_one_too(server: RunningServer) -> None:
    sent = _post("/echo", b"halved")
    answer = await _said(server.port, sent[:-3], sent[-3:] + _post("/echo", b"next", "Connection: close"), pause_s=0.35)
    assert b"halved" in answer
    assert answer.endswith(b"next")


async def test_plain_and_other_requests_share_a_connection(server: RunningServer) -> None:
    other = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nchunk\r\n0\r\n\r\n"
    answer = await _said(
        server.port, _post("/echo", b"plain") + other, _post("/echo", b"again", "Connection: close"), pause_s=0.1
    )
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answer.index(b"plain") < answer.index(b"chunk") < answer.index(b"again")


async def test_a_body_beyond_the_plain_size_is_served(server: RunningServer) -> None:
    body = bytes(MAX_PLAIN_BYTES + 1)
    answer = await _said(server.port, _post("/echo", body, "Connection: close"))
    assert f"x-length: {len(body)}".encode() in answer.lower()


async def test_a_client_that_sends_ahead_is_read_no_further_than_the_bound(server: RunningServer) -> None:
    ahead = b"".join(_post("/echo", bytes(60_000)) for _ in range(9))
    answer = await _said(server.port, _post("/wait", b"{}") + ahead, _post("/echo", b"end", "Connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 11
    assert answer.endswith(b"end")


@asynccontextmanager
async def _listening(routes: list[Route], limits: ServerLimits, system_bytes: int) -> AsyncIterator[PlainConnections]:
    """Only the plain side, over sockets that hold little; its port is `front.port`."""
    front = Front(Router(routes), plain_error, limits, False)
    plain = PlainConnections(front, asyncio.Protocol, lambda: 0)
    with socket.socket() as listening:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listening.setsockopt(socket.SOL_SOCKET, option, system_bytes)
        listening.bind(("127.0.0.1", 0))
        front.port = listening.getsockname()[1]
        listener = await asyncio.get_running_loop().create_server(plain, sock=listening)
        yield plain
        listener.close()
        await plain.end(0.05)


async def _dialled(port: int, system_bytes: int) -> socket.socket:
    client = socket.socket()
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        client.setsockopt(socket.SOL_SOCKET, option, system_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


async def test_a_client_that_sends_small_requests_ahead_is_read_no_further_either() -> None:
    """Each request that was answered let another read in: without end, as reads are longer than requests."""
    held = asyncio.Event()

    async def quick(request: Request) -> Response:
        return Response(200, {}, b"quick")

    async def hold(request: Request) -> Response:
        held.set()
        await asyncio.sleep(30)
        return Response()

    routes = [Route("POST", "/quick", quick), Route("POST", "/hold", hold)]
    async with _listening(routes, ServerLimits(), 1 << 16) as plain:
        client = await _dialled(plain.front.port, 1 << 16)
        reader, writer = await asyncio.open_connection(sock=client)
        reading = asyncio.ensure_future(reader.read(-1))
        writer.write(_post("/quick", b"") * 300 + _post("/hold", b"") + _post("/quick", b"") * 100_000)
        async with asyncio.timeout(5):
            await held.wait()
        await asyncio.sleep(0.3)
        assert writer.transport.get_write_buffer_size() > 3 << 20
        writer.transport.abort()
        reading.cancel()


@pytest.mark.parametrize("whole", ["X-Whole: yes", "X-Other: yes"])
async def test_an_answer_that_may_have_no_body_has_none(server: RunningServer, whole: str) -> None:
    answer = await _said(server.port, _post("/empty", b"", whole), _post("/echo", b"next", "Connection: close"))
    assert b"never" not in answer
    assert answer.endswith(b"next")


async def test_a_handler_that_is_cancelled_by_its_own_doing_leaves_no_client_waiting(server: RunningServer) -> None:
    assert await _said(server.port, _post("/cancelled", b"")) == b""
    assert server.connections == 0


async def test_a_client_that_never_takes_the_end_of_its_answer_is_hung_up_on() -> None:
    """Less than the transport's high-water mark: nothing waits for it to be written."""

    async def some(request: Request) -> Response:
        return Response(200, {}, bytes(60_000))

    limits = ServerLimits(header_s=0.2, keep_idle_s=0.2)
    async with _listening([Route("POST", "/some", some)], limits, 4096) as plain:
        client = await _dialled(plain.front.port, 4096)
        await asyncio.get_running_loop().sock_sendall(client, _post("/some", b"", "Connection: close"))
        async with asyncio.timeout(5):
            while not plain.open:
                await asyncio.sleep(0.01)
            while plain.open:
                await asyncio.sleep(0.01)
        client.close()


async def test_a_long_answer_to_a_slow_reader_goes_on_while_something_is_taken() -> None:
    async def much(request: Request) -> Response:
        return Response(200, {}, bytes(2 << 20))

    async with _listening([Route("POST", "/much", much)], ServerLimits(write_s=0.4), 1 << 16) as plain:
        client = await _dialled(plain.front.port, 1 << 16)
        loop, taken_bytes = asyncio.get_running_loop(), 0
        await loop.sock_sendall(client, _post("/much", b"", "Connection: close"))
        async with asyncio.timeout(20):
            while part := await loop.sock_recv(client, 1 << 16):
                taken_bytes += len(part)
                await asyncio.sleep(0.03)
        client.close()
    assert taken_bytes > 2 << 20


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_not_begun_when_there_are_too_many(
    tmp_path: Path,
) -> None:
    """Over TLS data is handed on while the connection closes."""
    begun: list[str] = []

    async def noted(request: Request) -> Response:
        begun.append(request.path)
        return Response()

    fleet = make_authority(tmp_path)
    context = server_context(*fleet.issue("here"), fleet.ca_path, require_client=False)
    limits = ServerLimits(connections=0)
    running = await serve([Route("POST", "/noted", noted)], ssl=context, limits=limits)
    answer = await asyncio.to_thread(_hasty, running.port, client_context(fleet.ca_pem), _post("/noted", b""))
    await running.close(grace_s=0.1)
    assert answer.startswith(b"HTTP/1.1 503")
    assert begun == []


def _hasty(port: int, context: ssl.SSLContext, request: bytes) -> bytes:
    """What is said to a client that sends its request in one packet with the end of its handshake."""
    came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(came, goes, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(goes.read())
                came.write(raw.recv(1 << 16))
        tls.write(request)
        raw.sendall(goes.read())
        while True:
            try:
                return tls.read(1 << 16)
            except ssl.SSLWantReadError:
                part = raw.recv(1 << 16)
                if not part:
                    return b""
                came.write(part)


async def test_an_idle_connection_is_closed(server: RunningServer) -> None:
    assert (await _said(server.port, _post("/echo", b"once"))).endswith(b"once")


async def test_chunks_of_a_stream(server: RunningServer) -> None:
    answer = await _said(server.port, _post("/parts", b"", "Connection: close"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_a_stream_whose_length_is_known_comes_as_it_is(server: RunningServer) -> None:
    """Both a length and chunks are refused by clients: bundles could not be fetched."""
    answer = await _said(server.port, _post("/file", b""), _post("/file", b"", "Connection: close"))
    assert b"transfer-encoding" not in answer
    assert answer.lower().count(b"content-length: 6\r\n") == 2
    assert answer.count(b"onetwo") == 2


@pytest.mark.parametrize("declared", ["5", "7"])
async def test_a_stream_of_another_length_than_declared_ends_the_connection(
    server: RunningServer, declared: str
) -> None:
    answer = await _said(server.port, _post("/file", b"", f"X-Declared: {declared}"), _post("/echo", b"next"))
    assert b"next" not in answer


async def test_the_head_of_a_stream_does_not_wait_for_a_late_part() -> None:
    seen = asyncio.Event()

    async def late(request: Request) -> Response:
        async def made() -> AsyncIterator[bytes]:
            await seen.wait()
            yield b"late"

        return Response(200, {}, made())

    running = await serve([Route("POST", "/late", late)])
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    async with asyncio.timeout(5):
        writer.write(_post("/late", b"", "Connection: close"))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        seen.set()
        assert await reader.read() == b"4\r\nlate\r\n0\r\n\r\n"
    writer.close()
    await running.close(grace_s=0.1)


async def test_a_header_with_a_line_break_is_never_sent(server: RunningServer) -> None:
    assert b"set-cookie" not in await _said(server.port, _post("/broken", b""))
    with pytest.raises(ValueError, match="line break"):
        head_bytes(200, {"a": "b\nc"}, 0, True)


def test_the_type_of_an_answer_is_said_once() -> None:
    assert head_bytes(200, {"Content-Type": "text/x"}, 0, True).lower().count(b"content-type") == 1
    with pytest.raises(ValueError, match="line break"):
        head_bytes(200, {"a": "b\0c"}, 0, True)


def test_an_answer_without_a_body_says_no_length() -> None:
    assert head_bytes(204, {}, 0, True) == b"HTTP/1.1 204 No Content\r\n\r\n"


async def test_an_answer_that_is_written_leaves_although_the_server_stops() -> None:
    body = bytes(8 << 20)

    async def big(request: Request) -> Response:
        return Response(200, {}, body)

    running = await serve([Route("GET", "/big", big)])
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 16)
    writer.write(b"GET /big HTTP/1.1\r\nHost: a:1\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    stopping, size_bytes = asyncio.create_task(running.close(grace_s=20.0)), 0
    while part := await reader.read(1 << 16):
        size_bytes += len(part)
        await asyncio.sleep(0.002)
    await stopping
    writer.close()
    assert head.startswith(b"HTTP/1.1 200") and size_bytes == len(body)
