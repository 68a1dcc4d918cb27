"""Our way of moving tensors against a raw TCP copy of the same bytes, in turns, in one run."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from benchmarks.wire_peer import MODEL, RAW_REPLY, certificates
from engines.port import TensorEndpoint
from engines.remote_frames import FramesEndpoint
from engines.remote_oip import RemoteEndpoint
from links.http import HttpLink
from links.tls import client_context
from protocol.tensors import Tensor

MB, KB64 = 1 << 20, 64 << 10
DEADLINE_S = 30.0
WARM_UP = 5


@frozen
class Series:
    """Seconds of each round by way: `raw`, `http` and `frames`."""

    size_bytes: int
    seconds: Mapping[str, Sequence[float]]

    def median_s(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def added_ms(self, way: str) -> float:
        """Milliseconds over the raw copy."""
        return 1000 * (self.median_s(way) - self.median_s("raw"))

    def ratio(self, way: str) -> float:
        """Time over the raw copy's."""
        return self.median_s(way) / self.median_s("raw")


class RawCopy:
    """One kept TCP connection; a length, the bytes, and a short reply, by blocking calls."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, body: bytes) -> None:
        self._socket.sendall(struct.pack("<Q", len(body)))
        self._socket.sendall(body)
        left = len(RAW_REPLY)
        while left:
            left -= len(self._socket.recv(left))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def peer(*arguments: str) -> Iterator[Mapping[str, int]]:
    """The peer's ports by way; its process ends with the block. One argument: a folder for its certificates."""
    if len(arguments) == 1:
        certificates(Path(arguments[0]))
    command = [sys.executable, "-m", "benchmarks.wire_peer", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(20)


async def in_turns(ports: Mapping[str, int], size_bytes: int, rounds: int, ca_pem: str = "") -> Series:
    """Each round sends the same bytes once by every way, the first way changing; with `ca_pem` over TLS as well."""
    tensor = Tensor("x", "UINT8", (size_bytes,), os.urandom(size_bytes))
    body = bytes(tensor.data)
    raw = RawCopy(ports["raw"])
    link = HttpLink("peer", f"http://127.0.0.1:{ports['http']}")
    oip, frames = RemoteEndpoint(link), FramesEndpoint("peer", link.open)
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "raw": lambda: _now(raw, body),
        "http": lambda: _ask(oip, tensor),
        "frames": lambda: _ask(frames, tensor),
    }
    secure = HttpLink("peer", f"https://127.0.0.1:{ports['tls']}", ssl=client_context(ca_pem)) if ca_pem else link
    secure_oip, secure_frames = RemoteEndpoint(secure), FramesEndpoint("peer", secure.open)
    if ca_pem:
        ways["http over TLS"] = lambda: _ask(secure_oip, tensor)
        ways["frames over TLS"] = lambda: _ask(secure_frames, tensor)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gc.disable()
    try:
        for number in range(rounds + WARM_UP):
            order = list(ways)
            for way in order[number % len(order) :] + order[: number % len(order)]:
                began_s = time.perf_counter()
                await ways[way]()
                if number >= WARM_UP:
                    seconds[way].append(time.perf_counter() - began_s)
            gc.collect(0)
    finally:
        gc.enable()
        raw.close()
        for stream in (frames, secure_frames):
            await stream.close()
        for one in (link, secure):
            await one.close()
    return Series(size_bytes, seconds)


async def _now(raw: RawCopy, body: bytes) -> None:
    raw.send(body)


async def _ask(endpoint: TensorEndpoint, tensor: Tensor) -> object:
    return await endpoint.infer(MODEL, (tensor,), DEADLINE_S)


def measured(rounds: int, shaped_rounds: int) -> tuple[Sequence[Series], Sequence[Series]]:
    """Loopback and shaped series, 1 MB and 64 KB each."""
    with tempfile.TemporaryDirectory(prefix="midstream-wire-") as folder, peer(folder) as ports:
        ca_pem = (Path(folder) / "ca.pem").read_text()
        loopback = [asyncio.run(in_turns(ports, size, rounds, ca_pem)) for size in (MB, KB64)]
        with peer(str(ports["http"]), str(ports["raw"])) as shaped_ports:
            shaped = [asyncio.run(in_turns(shaped_ports, size, shaped_rounds)) for size in (MB, KB64)]
    return loopback, shaped
