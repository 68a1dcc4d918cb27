"""An OpenAI-compatible server that is bad in a chosen way: silent, lying, or cut in the middle of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from attrs import define, field

from tests.raw_peer import raw_server

Way = Literal["good", "slow", "lying", "cut"]
FIRST_BYTE_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@define
class BadServer:
    """`way` may be changed at any time. asked: bodies of the requests that came. `cut` ends after `cut_after` words."""

    way: Way
    cut_after: int = 40
    port: int = 0
    asked: list[bytes] = field(factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            size = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
            self.asked.append(head + await reader.readexactly(size))
            await self._answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            return

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self.way == "slow":
            await asyncio.sleep(FIRST_BYTE_S)
        writer.write(HEAD)
        if self.way == "lying":
            writer.write(_event({"error": {"message": "the server is overloaded", "code": "overloaded"}}))
        for number in range(self.cut_after if self.way == "cut" else 0):
            choice = {"index": 0, "delta": {"content": f" word{number}"}, "finish_reason": None}
            writer.write(_event({"choices": [choice]}))
        await writer.drain()
        # What was written must be on its way before the connection breaks.
        await asyncio.sleep(0.2)


def _event(document: object) -> bytes:
    data = b"data: " + json.dumps(document).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def bad_server(way: Way) -> AsyncIterator[BadServer]:
    """Serves until the block ends."""
    made = BadServer(way)
    async with raw_server(made.serve) as made.port:
        yield made
