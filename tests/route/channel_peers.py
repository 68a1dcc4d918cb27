"""Run as programs by test_channel_reaping.py: a gateway's control channel, and many apps that will fall silent."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
from pathlib import Path

import psutil

from gateway.control_channel import ChannelSettings, ControlChannel, Desired
from gateway.ports import OpenKeys
from gateway.result_store import SqliteResults
from links.http_front import ServerLimits
from links.http_server import serve
from protocol.control_frames import PATH, Hello, write_frame

BURST = 100


async def gateway(folder: str, heartbeat_s: float) -> None:
    """Serve; print the port, then keep the present state in a file, ten times a second."""
    store = SqliteResults(Path(folder) / "results.sqlite")
    settings = ChannelSettings(heartbeat_s=heartbeat_s)
    channel = ControlChannel(OpenKeys(), store, lambda: Desired("device", "m"), time.monotonic, settings)
    await channel.start()
    limits = ServerLimits(connections=10_000)
    server = await serve([], [channel.route()], host="127.0.0.1", port=0, limits=limits)
    print(server.port, flush=True)
    process = psutil.Process()
    while True:
        connected = sum(session.connected for session in channel.sessions)
        state = {"connected": connected, "reaped": channel.reaped, "rss": process.memory_info().rss}
        fresh = Path(folder) / "state.new"
        fresh.write_text(json.dumps(state))
        fresh.replace(Path(folder) / "state.json")
        await asyncio.sleep(0.1)


async def apps(port: int, count: int) -> None:
    """Open `count` channels, say hello on each, print `ready`, and hold them."""
    held = []
    for first in range(0, count, BURST):
        held += await asyncio.gather(*(app(port, number) for number in range(first, min(count, first + BURST))))
    print("ready", flush=True)
    await asyncio.sleep(600)


async def app(port: int, number: int) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    payload, mask = write_frame(Hello(session=f"{number:032x}")), os.urandom(4)
    masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
    writer.write(b"\x82\xfe" + len(payload).to_bytes(2, "big") + mask + masked)
    await reader.read(1)  # the welcome has begun
    return writer


if __name__ == "__main__":
    if sys.argv[1] == "gateway":
        asyncio.run(gateway(sys.argv[2], float(sys.argv[3])))
    else:
        asyncio.run(apps(int(sys.argv[2]), int(sys.argv[3])))
