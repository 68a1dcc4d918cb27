"""Peers that speak whatever a test wants, below HTTP and WebSocket."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[int]:
    """A TCP server on loopback; yields its port. Its connections are broken when a handler returns and at the end."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def run() -> None:
            try:
                await handler(reader, writer)
            finally:
                writer.transport.abort()

        task = asyncio.get_running_loop().create_task(run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)


async def accept_websocket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a WebSocket handshake (RFC 6455, section 4.2.2)."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    (key,) = re.findall(r"(?i)sec-websocket-key: (\S+)", head)
    token = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: " + base64.b64encode(token) + b"\r\n\r\n"
    )
    await writer.drain()
