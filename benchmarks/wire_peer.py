"""The far end of the wire benchmark, a process of its own: our tensor front, a raw TCP copy, and shapers before both.

`python -m benchmarks.wire_peer FOLDER` serves, `... HTTP_PORT RAW_PORT` shapes. Either says its ports as one line of
JSON and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cloud_stub.certificates import issue_server, make_ca
from engines.port import TensorAnswer
from links.event_loop import run_on
from links.http_server import serve
from links.shaped import ShaperProxy
from links.tls import server_context
from protocol.tensors import Tensor, TensorSpec
from split_models.frames_front import FramesFront
from split_models.front import Front
from split_models.service import Service, Shown

MODEL = "sink"
ANSWER = Tensor("y", "FP32", (1, 2), bytes(8))
RATE_BYTES_PER_S = 100e6 / 8
ONE_WAY_S = 0.010
RAW_REPLY = bytes(400)
"""About what one of our answers weighs, headers included."""

_LENGTH = struct.Struct("<Q")

T = TypeVar("T")


class Sink:
    """A model that takes bytes and answers at once: what is measured is the wire."""

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        return TensorAnswer((ANSWER,), digest="0" * 64)

    async def describe(self, name: str) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], str]:
        return (TensorSpec("x", "UINT8", (None,)),), (TensorSpec("y", "FP32", (1, 2)),), "0" * 64

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None:
        return None

    def loaded(self, name: str) -> bool:
        return True

    def wait_s(self) -> float:
        return 0.0


class Inline:
    """The sink has nothing to compute."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)


def copy_forever(listener: socket.socket) -> None:
    """Take connections, one thread each: a length, that many bytes, and a short reply."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_copy, args=(connection,), daemon=True).start()


def _copy(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(64 << 20))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, contextlib.suppress(OSError):
        while True:
            head = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
            if len(head) < _LENGTH.size:
                return
            (size,) = _LENGTH.unpack(head)
            got = 0
            while got < size:
                read = connection.recv_into(buffer[got:size])
                if not read:
                    return
                got += read
            connection.sendall(RAW_REPLY)


def certificates(folder: Path) -> str:
    """Make a CA and a server's certificate for loopback in `folder`, as a coordinator does; returns the CA's PEM."""
    ca = make_ca("wire", time.time())
    server = issue_server(ca, ["127.0.0.1"], time.time())
    for name, data in (("ca.pem", ca.cert_pem), ("cert.pem", server.cert_pem), ("key.pem", server.key_pem)):
        (folder / name).write_bytes(data)
    return ca.cert_pem.decode()


async def main(tls: Path) -> None:
    """Serve; `tls`: the folder that `certificates` filled."""
    shown = {MODEL: Shown(MODEL, "sink")}
    service = Service(Sink(), Inline(), time.monotonic, lambda: shown, side="server")
    context = server_context(tls / "cert.pem", tls / "key.pem", tls / "ca.pem", require_client=False)
    server = await serve(Front(service).routes, [FramesFront(service).route])
    secure = await serve(Front(service).routes, [FramesFront(service).route], ssl=context)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=copy_forever, args=(listener,), daemon=True).start()
    raw_port = listener.getsockname()[1]
    print(json.dumps({"http": server.port, "raw": raw_port, "tls": secure.port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    listener.close()
    await server.close()
    await secure.close()


async def shape() -> None:
    """The shapers, in a process of their own."""
    proxies = [
        ShaperProxy("127.0.0.1", int(port), up_bytes_per_s=RATE_BYTES_PER_S, delay_s=ONE_WAY_S) for port in sys.argv[1:]
    ]
    ports = [await proxy.start() for proxy in proxies]
    print(json.dumps(dict(zip(("http", "raw"), ports, strict=True))), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for proxy in proxies:
        await proxy.close()


if __name__ == "__main__":
    # The far end is a coordinator, which runs on uvloop where the extra `fast` is installed.
    run_on("auto", main(Path(sys.argv[1])) if len(sys.argv) == 2 else shape())
