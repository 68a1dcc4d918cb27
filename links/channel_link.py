"""A Link and its frame streams over a Session: what HttpLink does over TCP, over one ordered channel of messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress

from links.channel_messages import FRAGMENT_BYTES, Head, Open
from links.channel_session import Session
from links.channel_stream import Stream
from links.http import MAX_ERROR_BODY_BYTES, MAX_REPLY_BYTES, server_seconds
from links.port import MAX_FRAME_BYTES, FrameStream, RejectedStatus, Reply, WireTimes
from links.transfer_log import Sink, Transfer, TransferLog
from protocol.clock import Clock
from protocol.errors import LinkClosed, LinkError, LinkTimeout, ProtocolError, TooLarge
from protocol.events import TransferSample

OPEN_S = 10.0
"""Longest wait for a frame stream to be taken."""


class ChannelLink:
    """A Link over `session`, which it owns: closing the link closes the session.

    Args:
        name: the link's name in samples and messages.
        sink: takes one TransferSample per exchange; must not block.
        max_reply_bytes: longer answers raise LinkError before they are held.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        *,
        sink: Sink = lambda sample: None,
        clock: Clock = time.monotonic,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        self._name = name
        self._session = session
        self._clock = clock
        self._log = TransferLog(name, sink, clock, Transfer)
        self._max_reply_bytes = max_reply_bytes

    @property
    def name(self) -> str:
        return self._name

    def heard_lately(self) -> bool:
        """Whether the session's pings are answered."""
        return self._session.heard_lately()

    def under_way(self) -> TransferSample | None:
        """The oldest transfer that is being sent and has not been answered."""
        return self._log.under_way()

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        """One request, one whole answer. Raises LinkTimeout, LinkClosed or LinkError; any status is an answer."""
        with self._log.transfer(len(body)) as transfer, self._mapped(transfer, path):
            async with asyncio.timeout(deadline_s):
                asked_s = self._clock()
                stream = await self._open(method, path, headers, body)
                opened_s = self._clock()
                try:
                    head = await self._ask(stream, transfer, body)
                    began_s = self._clock()
                    data = await read_all(stream, self._max_reply_bytes, self._name)
                finally:
                    stream.leave()
                self._log.arrived(len(data), began_s)
                server_s = min(server_seconds(head.headers), began_s - opened_s)
                times = WireTimes(
                    connect_s=opened_s - asked_s,
                    send_s=began_s - opened_s - server_s,
                    server_s=server_s,
                    receive_s=self._clock() - began_s,
                )
                return Reply(head.status, dict(head.headers), data, times)

    async def lines(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float
    ) -> AsyncIterator[bytes]:
        """POST, then the answer's body as chunks as they arrive.

        Raises RejectedStatus on a status over 399, LinkTimeout when the first or a next chunk takes longer than
        `deadline_s`, LinkClosed when the peer vanishes in the middle.
        """
        with self._log.transfer(len(body)) as transfer, self._mapped(transfer, path):
            async with asyncio.timeout(deadline_s):
                stream = await self._open("POST", path, headers, body)
            try:
                async with asyncio.timeout(deadline_s):
                    head = await self._ask(stream, transfer, body)
                    if head.status > 399:
                        raise await self._refusal(stream, head, path)
                while True:
                    async with asyncio.timeout(deadline_s):
                        part = await stream.receive()
                    if part is None:
                        break
                    if part.data:
                        yield part.data
            finally:
                stream.leave()

    async def open(self, path: str) -> FrameStream:
        """A frame stream to `path`. Raises RejectedStatus when the peer refuses it."""
        with self._log.transfer(0) as transfer, self._mapped(transfer, path):
            async with asyncio.timeout(OPEN_S):
                stream = await self._session.open(Open("GET", path, frames=True))
                try:
                    head = await stream.head()
                    if head.status > 399:
                        raise await self._refusal(stream, head, path)
                except BaseException:
                    stream.leave()
                    raise
            return ChannelFrames(stream, self._name)

    def idle_s(self) -> float:
        """Seconds since an exchange or frame stream carried anything."""
        return self._session.idle_s()

    async def closed(self) -> str:
        """Returns when the session has ended, with the reason."""
        return await self._session.closed()

    async def close(self) -> None:
        await self._session.close()

    async def _open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Stream:
        sent = {name.lower(): value for name, value in headers.items()}
        if body:
            sent = {"content-type": "application/octet-stream"} | sent | {"content-length": str(len(body))}
        return await self._session.open(Open(method, path, sent))

    async def _ask(self, stream: Stream, transfer: Transfer, body: bytes) -> Head:
        self._log.sending(transfer)
        await stream.send(body, last=True, until_head=True)
        head = await stream.head()
        self._log.answered(transfer, server_seconds(head.headers))
        return head

    async def _refusal(self, stream: Stream, head: Head, path: str) -> RejectedStatus:
        body = await read_all(stream, MAX_ERROR_BODY_BYTES, self._name)
        text = body[:300].decode(errors="replace")
        return RejectedStatus(
            f"{self._name} answered {path} with status {head.status}: {text}",
            status=head.status,
            body=body,
            headers=dict(head.headers),
        )

    @contextmanager
    def _mapped(self, transfer: Transfer, path: str) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            # Another arm answered first, or the client left: that the transfer took at least so long is known anyway.
            self._log.abandoned(transfer)
            raise
        except TimeoutError as err:
            self._log.abandoned(transfer)
            raise LinkTimeout(
                f"{self._name} ({path}) did not answer in time",
                next_step="check the network, or allow a longer deadline",
            ) from err
        except LinkClosed:
            self._log.abandoned(transfer)
            raise
        except ProtocolError as err:
            raise LinkError(f"{self._name} ({path}): {err.message}") from err


async def read_all(stream: Stream, limit: int, peer: str) -> bytes:
    """The whole body. Raises LinkError before more than `limit` bytes are held."""
    data = bytearray()
    while (part := await stream.receive()) is not None:
        data += part.data
        if len(data) > limit:
            raise LinkError(f"{peer} answers with more than the {limit} bytes that are taken")
    return bytes(data)


class ChannelFrames:
    """A FrameStream on one stream of a session, the same for client and server."""

    def __init__(self, stream: Stream, peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self._sending = asyncio.Lock()
        self._partial = bytearray()
        self._closed = False

    async def send(self, frame: bytes) -> None:
        """Waits until the peer has room and the channel's buffer is low. Raises TooLarge, LinkClosed."""
        if len(frame) > MAX_FRAME_BYTES:
            raise TooLarge(f"a frame has {len(frame)} bytes, at most {MAX_FRAME_BYTES} are sent")
        async with self._sending:
            self._check()
            try:
                await self._stream.send(frame, frame_end=True)
            except asyncio.CancelledError:
                if len(frame) > FRAGMENT_BYTES:
                    # Part of the frame may be on its way: what follows would be read as its rest.
                    self._stream.leave("cancelled in the middle of a frame")
                raise

    async def receive(self) -> bytes | None:
        """The next frame, None after an orderly end. Raises LinkClosed; LinkError for a frame that is too long."""
        while True:
            part = await self._stream.receive()
            if part is None:
                if self._partial:
                    raise LinkClosed(f"{self._peer} left in the middle of a frame")
                return None
            self._partial += part.data
            if len(self._partial) > MAX_FRAME_BYTES:
                self._stream.leave("a frame is too long")
                raise LinkError(f"{self._peer} sent a frame of more than {MAX_FRAME_BYTES} bytes")
            if part.frame_end:
                frame = bytes(self._partial)
                self._partial.clear()
                return frame

    async def close(self) -> None:
        """The peer reads what was sent and then the end; nothing more is read here."""
        if self._closed:
            return
        self._closed = True
        with suppress(LinkClosed):
            self._stream.end()
        self._stream.leave()

    def _check(self) -> None:
        if self._closed:
            raise LinkClosed(f"the frame stream to {self._peer} has been closed")
        self._stream.check_open()
