"""FrameStream over an aiohttp WebSocket, the same for client and server.

The heartbeat runs only while somebody waits in `receive` with nothing buffered: a reader that is slow on purpose
(back-pressure) must not be taken for a dead peer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from links.patience import Patience
from links.port import MAX_FRAME_BYTES
from links.progress import acknowledged
from protocol.errors import LinkClosed, LinkError, TooLarge

_SILENT_BEATS = 3
_CLOSE_S = 1.0
_CLOSE_TURNS = 50


class WebSocketFrames:
    """Binary frames over an open WebSocket (aiohttp client or server side, made with autoping=False)."""

    def __init__(self, socket: Any, *, peer: str, heartbeat_s: float) -> None:
        self._socket = socket
        self._peer = peer
        self._heartbeat_s = heartbeat_s
        # Asked while it is open; a server's socket is closed by the server, which waits by itself.
        client = isinstance(socket, aiohttp.ClientWebSocketResponse)
        self._connection: Any = socket.get_extra_info("socket") if client else None
        self._acknowledged = acknowledged(socket)
        self._patience = Patience()  # one timer: the library's own costs more than reading a small frame

    def acknowledged(self) -> int | None:
        """Bytes of frames that the peer's system has acknowledged, WebSocket's and TLS's own included."""
        return self._acknowledged()

    async def send(self, frame: bytes) -> None:
        """Waits until the frame fits into the connection's buffer. Raises TooLarge, LinkClosed."""
        if len(frame) > MAX_FRAME_BYTES:
            raise TooLarge(f"a frame has {len(frame)} bytes, at most {MAX_FRAME_BYTES} are sent")
        try:
            await self._socket.send_bytes(frame)
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as err:
            raise LinkClosed(f"{self._peer} closed the frame stream") from err

    async def receive(self) -> bytes | None:
        """The next frame, None after an orderly close. Raises LinkClosed; LinkError on a frame that is not binary."""
        silent = 0
        while True:
            try:
                message = await self._patience.wait(self._socket.receive(), self._heartbeat_s)
            except TimeoutError as err:
                silent += 1
                if silent >= _SILENT_BEATS:
                    await self._drop(aiohttp.WSCloseCode.GOING_AWAY)
                    raise LinkClosed(f"{self._peer} said nothing for {silent * self._heartbeat_s:.0f} s") from err
                await self._ping()
                continue
            except (ConnectionError, aiohttp.ClientError, RuntimeError) as err:
                raise LinkClosed(f"{self._peer} closed the frame stream") from err
            silent = 0
            if message.type is aiohttp.WSMsgType.BINARY:
                return bytes(message.data)
            if message.type is aiohttp.WSMsgType.PING:
                await self._pong(message.data)
            elif message.type is not aiohttp.WSMsgType.PONG:
                await self._ended(message)
                return None

    async def close(self) -> None:
        """Say goodbye; waits at most two seconds for the peer's."""
        await self._drop(aiohttp.WSCloseCode.OK)

    async def _ended(self, message: aiohttp.WSMessage) -> None:
        """Returns after an orderly end, raises the error that describes any other."""
        kind = message.type
        if kind is aiohttp.WSMsgType.TEXT:
            await self._drop(aiohttp.WSCloseCode.UNSUPPORTED_DATA)
            raise LinkError(f"{self._peer} sent a text message on a stream of binary frames")
        if kind is aiohttp.WSMsgType.ERROR:
            await self._drop(aiohttp.WSCloseCode.MESSAGE_TOO_BIG)
            raise LinkError(f"{self._peer} broke the frame stream: {message.data}")
        if self._socket.close_code in (aiohttp.WSCloseCode.OK, aiohttp.WSCloseCode.GOING_AWAY):
            return
        raise LinkClosed(f"{self._peer} vanished in the middle of a frame stream (code {self._socket.close_code})")

    async def _ping(self) -> None:
        try:
            await self._socket.ping()
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as err:
            raise LinkClosed(f"{self._peer} closed the frame stream") from err

    async def _pong(self, data: bytes) -> None:
        try:
            await self._socket.pong(data)
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as err:
            raise LinkClosed(f"{self._peer} closed the frame stream") from err

    async def _drop(self, code: int) -> None:
        self._patience.close()
        try:
            async with asyncio.timeout(2.5):
                await self._socket.close(code=code)
        except (TimeoutError, ConnectionError, aiohttp.ClientError, RuntimeError):
            pass
        await self._connection_closed()

    async def _connection_closed(self) -> None:
        """Wait a moment for the connection below: over TLS it says its own goodbye after the WebSocket's."""
        connection = self._connection
        for _ in range(_CLOSE_TURNS):
            if connection is None or connection.fileno() == -1:
                return
            await asyncio.sleep(_CLOSE_S / _CLOSE_TURNS)
