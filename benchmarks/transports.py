"""HTTP, WebSocket and WebRTC between two processes on loopback: Mbit/s, and milliseconds over a raw TCP copy.

    python -m benchmarks.transports --json F [--quick]

Each round sends the same bytes once by each transport, in a random order, with a short answer; medians over the rounds.
`added_ms` is over a bare TCP connection that carries the same bytes in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from attrs import frozen

from benchmarks.report import arguments, publish, spread
from links.channel_link import ChannelLink
from links.channel_server import ChannelServer, Peer
from links.channel_session import Session
from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.port import FrameRoute, FrameStream, Link, Request, Response, Route
from links.webrtc import answer, offer
from links.webrtc_settings import WebRtcSettings

LOOPBACK = WebRtcSettings(addresses=("127.0.0.1",))
SIZES = {"64kb": 64 << 10, "1mb": 1 << 20}
SMALL_BYTES = 64
SEED = 20
DEADLINE_S = 60.0
TRANSPORTS = ("http", "websocket", "webrtc", "webrtc_frames")

Send = Callable[[bytes], Awaitable[None]]


@frozen
class Plan:
    """Rounds of each size."""

    rounds: int
    large_rounds: int


# -- the far end --------------------------------------------------------------------------------------------------


async def _take(request: Request) -> Response:
    return Response(body=b"ok")


async def _frames(request: Request, stream: FrameStream) -> None:
    while await stream.receive() is not None:
        await stream.send(b"ok")


ROUTES = [Route("POST", "/take", _take)]
FRAME_ROUTES = [FrameRoute("/frames", _frames)]


async def far_end() -> None:
    """Serve until standard input ends; the first line on standard output has both ports."""
    sessions: list[Session] = []
    begun: set[asyncio.Task[None]] = set()

    async def signal(request: Request) -> Response:
        negotiation = await answer(LOOPBACK, request.body.decode())

        async def host() -> None:
            channel = await negotiation.connected()
            served = ChannelServer(ROUTES, FRAME_ROUTES, Peer("bench"))
            sessions.append(Session(channel, "bench", accept=served.accept))

        task = asyncio.create_task(host())
        begun.add(task)
        task.add_done_callback(begun.discard)
        return Response(body=negotiation.sdp.encode())

    server: RunningServer = await serve([*ROUTES, Route("POST", "/signal", signal)], FRAME_ROUTES)
    raw = await asyncio.start_server(_copy, "127.0.0.1", 0)
    print(server.port, raw.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    raw.close()
    for session in sessions:
        await session.close()
    await server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size_bytes = int.from_bytes(await reader.readexactly(4), "big")
            await reader.readexactly(size_bytes)
            writer.write(b"ok")
            await writer.drain()
    writer.close()


# -- this end -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _raw(port: int) -> AsyncIterator[Send]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 21)

    async def send(body: bytes) -> None:
        writer.write(len(body).to_bytes(4, "big"))
        writer.write(body)
        await writer.drain()
        await reader.readexactly(2)

    yield send
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _exchanging(link: Link) -> Send:
    async def send(body: bytes) -> None:
        reply = await link.exchange("/take", {}, body, DEADLINE_S)
        assert reply.body == b"ok"

    return send


async def _framing(link: Link) -> Send:
    stream = await link.open("/frames")

    async def send(body: bytes) -> None:
        await stream.send(body)
        assert await stream.receive() == b"ok"

    return send


async def _dial(signalling: HttpLink) -> tuple[ChannelLink, float]:
    """A link over WebRTC and the seconds it took to open, descriptions exchanged over HTTP."""
    began_s = time.monotonic()
    ours = await offer(LOOPBACK)
    reply = await signalling.exchange("/signal", {}, ours.sdp.encode(), DEADLINE_S)
    await ours.accept(reply.body.decode())
    link = ChannelLink("webrtc", Session(await ours.connected(), "far end"))
    return link, time.monotonic() - began_s


async def _rounds(sends: dict[str, Send], size_bytes: int, rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Seconds of each transport, one value per round; a first round is not counted."""
    body = rng.randbytes(size_bytes)
    took: dict[str, list[float]] = {name: [] for name in sends}
    for number in range(rounds + 1):
        for name in rng.sample(list(sends), len(sends)):
            began_s = time.perf_counter()
            await sends[name](body)
            if number:
                took[name].append(time.perf_counter() - began_s)
    return took


async def measure(plan: Plan) -> dict[str, object]:
    """All keys."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.transports", "--serve",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    port, raw_port = map(int, (await child.stdout.readline()).split())
    http = HttpLink("far end", f"http://127.0.0.1:{port}")
    first, _ = await _dial(http)  # the library is loaded now
    await first.close()
    webrtc, open_s = await _dial(http)
    keys: dict[str, object] = {"webrtc_open_ms": open_s * 1000}
    async with _raw(raw_port) as raw:
        sends = {
            "raw": raw,
            "http": _exchanging(http),
            "websocket": await _framing(http),
            "webrtc": _exchanging(webrtc),
            "webrtc_frames": await _framing(webrtc),
        }
        rng = random.Random(SEED)
        small = await _rounds(sends, SMALL_BYTES, plan.rounds, rng)
        keys |= {f"{name}_round_trip_ms": statistics.median(small[name]) * 1000 for name in TRANSPORTS}
        for label, size_bytes in SIZES.items():
            rounds = plan.rounds if size_bytes < SIZES["1mb"] else plan.large_rounds
            keys |= _keys(label, size_bytes, await _rounds(sends, size_bytes, rounds, rng))
    await webrtc.close()
    await http.close()
    child.stdin.close()
    await child.wait()
    return keys


def _keys(label: str, size_bytes: int, took: dict[str, list[float]]) -> dict[str, object]:
    raw_s = statistics.median(took["raw"])
    keys: dict[str, object] = {}
    for name in TRANSPORTS:
        median_s = statistics.median(took[name])
        print(f"{label:5} {name:14} ms {spread([seconds * 1000 for seconds in took[name]])}")
        keys[f"{name}_mbit_per_s_{label}"] = size_bytes * 8 / median_s / 1e6
        keys[f"{name}_added_ms_{label}"] = (median_s - raw_s) * 1000
    keys[f"webrtc_ratio_to_http_{label}"] = statistics.median(took["webrtc"]) / statistics.median(took["http"])
    return keys


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__ or "")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(far_end())
        return
    plan = Plan(rounds=30, large_rounds=10) if options.quick else Plan(rounds=300, large_rounds=60)
    publish("transports", asyncio.run(measure(plan)), options.json, ["both processes on one machine, without TLS"])


if __name__ == "__main__":
    main()
