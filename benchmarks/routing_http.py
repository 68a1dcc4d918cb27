"""`POST /v1/route` over real sockets: the gateway in a child process on one core, the client on the other.

The server runs on the loop that a coordinator takes by itself: uvloop where it is installed.

python -m benchmarks.routing_http     # the server alone; prints its port, ends with its standard input
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from attrs import evolve, frozen

from benchmarks.report import percentile
from cloud_stub.publishing import compile_policy
from engines.fakes_text import FakeTextEngine
from gateway.mount import GatewayPorts, build
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.event_loop import run_on, settle
from links.http_server import serve

POLICY = Path(__file__).parents[1] / "docs" / "routing.example.yaml"


@frozen
class Load:
    """What a client saw. right: answers of status 200 with a target. server_cpu_ms: the server's time per request."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    right: int
    server_cpu_ms: float = 0.0


def ask(bodies: Sequence[bytes], connections: int, seconds: float) -> Load:
    """Keep `connections` connections busy for `seconds`, one request at a time on each."""
    cores = sorted(os.sched_getaffinity(0))
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.routing_http"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        port = int(child.stdout.readline())
        if len(cores) > 1:
            os.sched_setaffinity(child.pid, {cores[0]})
            os.sched_setaffinity(0, {cores[1]})
        found, asked = asyncio.run(_load(port, bodies, connections, seconds))
        child.stdin.close()
        return evolve(found, server_cpu_ms=1000 * float(child.stdout.readline()) / asked)
    finally:
        os.sched_setaffinity(0, set(cores))
        child.stdin.close()
        child.wait(20)
        child.stdout.close()


async def _load(port: int, bodies: Sequence[bytes], connections: int, seconds: float) -> tuple[Load, int]:
    """What was seen, and how many requests there were with those that warm up."""
    numbers = count()
    await asyncio.gather(*(_client(port, bodies, numbers, 0.5) for _ in range(connections)))
    begun_s = time.perf_counter()
    found = await asyncio.gather(*(_client(port, bodies, numbers, seconds) for _ in range(connections)))
    took_s = time.perf_counter() - begun_s
    times_s = [taken for times, _ in found for taken in times]
    right = sum(good for _, good in found)
    p50, p99 = percentile(times_s, 0.5), percentile(times_s, 0.99)
    return Load(len(times_s) / took_s, 1000 * p50, 1000 * p99, right), next(numbers)


async def _client(port: int, bodies: Sequence[bytes], numbers: count[int], seconds: float) -> tuple[list[float], int]:
    """Seconds of each request, and how many were answered as they should be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times_s: list[float] = []
    right = 0
    end_s = time.perf_counter() + seconds
    try:
        while (begun_s := time.perf_counter()) < end_s:
            writer.write(bodies[next(numbers) % len(bodies)])
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            answer = await reader.readexactly(size)
            times_s.append(time.perf_counter() - begun_s)
            right += head.startswith(b"HTTP/1.1 200") and b'"target":"' in answer.replace(b": ", b":")
    finally:
        writer.close()
        await writer.wait_closed()
    return times_s, right


def message(document: object) -> bytes:
    """One HTTP/1.1 request with a JSON body."""
    data = json.dumps(document, ensure_ascii=False).encode()
    return (
        b"POST /v1/route HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (len(data))
        + data
    )


async def _serve() -> None:
    policy = compile_policy(POLICY.read_bytes(), "yaml")
    engines = FakeTextEngine(), FakeTextEngine()
    targets = (
        Target("device", True, engines[0], frozenset({"small"})),
        Target("cloud", False, engines[1], frozenset({"large"}), price_in=1e-6, price_out=4e-6),
    )
    way = build(GatewaySettings(), GatewayPorts(targets=lambda: targets, policy=lambda: policy))
    await way.start()
    server = await serve(way.routes)
    settle()
    print(server.port, flush=True)
    begun_s = time.process_time()
    await asyncio.to_thread(sys.stdin.read)
    print(time.process_time() - begun_s, flush=True)
    await server.close()
    await way.stop()


if __name__ == "__main__":
    run_on("auto", _serve())
