"""The only aiortc: a message channel to one peer over a WebRTC data channel, made by one offer and one answer.

One reliable, ordered channel, numbered 0 on both sides, so that nothing has to be announced. Descriptions are whole:
all candidates are gathered first. No STUN or TURN server is contacted unless the settings name it; the library's own
default would ask a public one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Literal

from links.webrtc_settings import WebRtcSettings, check, installed, missing
from protocol.errors import LinkClosed, LinkError, LinkTimeout, ProtocolError
from protocol.signalling import check_description

log = logging.getLogger("midstream.links.webrtc")

HIGH_BYTES = 64 << 10
"""With more than this in the buffer a sender waits: what waits here is in the way of every other stream."""

LOW_BYTES = 16 << 10
"""Senders go on when no more than this is left."""

SLOW_START_BYTES = 128 << 10
"""Where the window stops to double. The library would go on to the peer's whole announced window of 1 MiB, past what a
socket's usual buffer holds (212,992 bytes with the kernel's own overhead), and lose the end of the first big transfer.
"""

FLUSH_S = 1.0
CLOSE_S = 5.0
MAX_EARLY = 256
"""Messages kept that came before anybody listened."""

Kind = Literal["offer", "answer"]


class WebRtcChannel:
    """A MessageChannel over an open data channel (links.port)."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._channel = connection.channel
        self._drained = asyncio.Event()
        self._on_closed: Callable[[str], None] = lambda why: None
        self._channel.bufferedAmountLowThreshold = LOW_BYTES
        self._channel.on("bufferedamountlow", self._drained.set)
        connection.on_lost = self._lost

    @property
    def path(self) -> str:
        """What kinds of addresses the two ends use: `host`, `srflx` (behind a NAT) or `relay` (by TURN)."""
        return self._connection.path()

    @property
    def peer_host(self) -> str:
        """The address that the peer is reached at, empty when not known."""
        return self._connection.peer_host()

    @property
    def buffered_bytes(self) -> int:
        return int(self._channel.bufferedAmount)

    def listen(self, on_message: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        self._on_closed = on_closed
        self._connection.deliver_to(on_message)
        if self._connection.lost is not None:
            on_closed(self._connection.lost)

    def send(self, message: bytes) -> None:
        if self._connection.lost is not None or self._channel.readyState != "open":
            raise LinkClosed(self._connection.lost or "the data channel is closed")
        self._channel.send(message)

    async def room(self) -> None:
        while self.buffered_bytes > HIGH_BYTES:
            self._drained.clear()
            if self._connection.lost is not None:
                raise LinkClosed(self._connection.lost)
            await self._drained.wait()

    async def close(self) -> None:
        """Let what was sent leave, for a moment, then close everything."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while self.buffered_bytes > 0 and self._connection.lost is None:
                    await asyncio.sleep(0.01)
        await self._connection.close()

    def _lost(self, why: str) -> None:
        self._drained.set()
        self._on_closed(why)


class Negotiation:
    """One side of a connection that is being made. `sdp` is what the other side has to be told."""

    def __init__(self, connection: _Connection, sdp: str) -> None:
        self._connection = connection
        self.sdp = sdp

    async def accept(self, answer: str) -> None:
        """Take the other side's answer to our offer. Raises ProtocolError."""
        await self._connection.set_remote(answer, "answer")

    async def connected(self) -> WebRtcChannel:
        """The open channel. Raises LinkTimeout when no path is found in time, LinkError when there is none."""
        await self._connection.opened()
        return WebRtcChannel(self._connection)

    async def close(self) -> None:
        """Give up; harmless after `connected` was refused."""
        await self._connection.close()


async def offer(settings: WebRtcSettings) -> Negotiation:
    """Gather this side's addresses and offer a connection. Raises ConfigError without the extra, LinkError."""
    connection = await _connection(settings)
    return await _described(connection, settings)


async def answer(settings: WebRtcSettings, offered: str) -> Negotiation:
    """Answer an offer. Raises ProtocolError for one that cannot be used, ConfigError, LinkError."""
    connection = await _connection(settings)
    try:
        await connection.set_remote(offered, "offer")
    except BaseException:
        await connection.close()
        raise
    return await _described(connection, settings)


async def _described(connection: _Connection, settings: WebRtcSettings) -> Negotiation:
    try:
        return Negotiation(connection, await connection.describe())
    except BaseException:
        await connection.close()
        raise


async def _connection(settings: WebRtcSettings) -> _Connection:
    if not installed():
        raise missing()
    # A tenth of a second and more on a small device, which the event loop must not feel.
    library = await asyncio.to_thread(_library)
    return _Connection(library, check(settings))


def _library() -> Any:
    import aiortc

    return aiortc


class _Connection:
    """A peer connection with its one channel."""

    def __init__(self, library: Any, settings: WebRtcSettings) -> None:
        self._library = library
        self._settings = settings
        self._open = asyncio.Event()
        self._early: list[bytes] = []
        self._on_message: Callable[[bytes], None] | None = None
        self.lost: str | None = None
        self.on_lost: Callable[[str], None] = lambda why: None
        servers = [
            library.RTCIceServer(urls=url, username=settings.username, credential=settings.credential)
            for url in settings.servers
        ]
        self._peer = library.RTCPeerConnection(library.RTCConfiguration(iceServers=servers))
        self.channel = self._peer.createDataChannel("midstream", negotiated=True, id=0)
        self.channel.on("message", self._message)
        self.channel.on("open", self._open.set)
        self.channel.on("close", lambda: self._fail("the peer closed the data channel"))
        self._peer.on("connectionstatechange", self._state_changed)
        self._keep_to_addresses()

    async def describe(self) -> str:
        """Our description with every candidate that could be gathered in time."""
        await self._peer.setLocalDescription()
        sdp: str = self._peer.localDescription.sdp
        if "\na=candidate:" not in sdp:
            raise LinkError(
                "this machine has no address that WebRTC may use", next_step="check webrtc_addresses and the network"
            )
        return sdp

    async def set_remote(self, sdp: str, kind: Kind) -> None:
        check_description(sdp)
        try:
            await self._peer.setRemoteDescription(self._library.RTCSessionDescription(sdp=sdp, type=kind))
        except Exception as err:  # the parser raises whatever it stumbles over
            raise ProtocolError(f"the {kind} cannot be used: {type(err).__name__}", field="sdp") from err

    async def opened(self) -> None:
        try:
            async with asyncio.timeout(self._settings.connect_s):
                await self._open.wait()
        except TimeoutError as err:
            raise LinkTimeout(
                f"no path to the peer was found in {self._settings.connect_s:.0f} s",
                next_step="allow UDP between the two, or name a TURN server (webrtc_servers)",
            ) from err
        if self.lost is None:
            self._keep_slow_start_short()
        else:
            raise LinkError(f"no path to the peer: {self.lost}", next_step="name a TURN server (webrtc_servers)")

    def deliver_to(self, on_message: Callable[[bytes], None]) -> None:
        """Messages go there from now on, those that came before anybody listened first."""
        self._on_message = on_message
        early, self._early = self._early, []
        for message in early:
            on_message(message)

    def path(self) -> str:
        try:
            pair = self._ice()._nominated[1]
            return f"{pair.local_candidate.type}-{pair.remote_candidate.type}"
        except (AttributeError, KeyError):
            return ""

    def peer_host(self) -> str:
        try:
            return str(self._ice()._nominated[1].remote_addr[0])
        except (AttributeError, KeyError, IndexError):
            return ""

    async def close(self) -> None:
        """Close the connection and its sockets; bounded."""
        self._fail("closed here")
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._peer.close()
        except Exception as err:  # noqa: BLE001 - whatever the library does, closing must end
            log.warning("a WebRTC connection did not close in order: %s", err or type(err).__name__)
        # Its tasks end in the next turns of the loop.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _message(self, message: bytes | str) -> None:
        # Text is none of ours; as bytes the reader refuses it.
        raw = message if isinstance(message, bytes) else message.encode()
        if self._on_message is not None:
            self._on_message(raw)
        elif len(self._early) < MAX_EARLY:
            self._early.append(raw)
        else:
            self._fail("the peer sends before anybody listens")

    def _state_changed(self) -> None:
        if self._peer.connectionState in ("failed", "closed"):
            self._fail("the path to the peer was lost" if self._open.is_set() else "none of the addresses answered")

    def _fail(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self._open.set()
            self.on_lost(why)

    def _ice(self) -> Any:
        return self._peer.sctp.transport.transport.iceGatherer._connection

    def _keep_slow_start_short(self) -> None:
        association = self._peer.sctp
        held = getattr(association, "_ssthresh", None)  # no public name; without it the transfer is slower, not wrong
        if held is not None:
            association._ssthresh = min(held, SLOW_START_BYTES)

    def _keep_to_addresses(self) -> None:
        """Gather on the allowed addresses only; the library has no setting for that."""
        ice, settings = self._ice(), self._settings
        gather = ice.get_component_candidates

        async def gather_allowed(component: int, addresses: list[str], **_: object) -> Any:
            chosen = list(settings.addresses) or addresses
            return await gather(component=component, addresses=chosen, timeout=settings.gather_s)

        ice.get_component_candidates = gather_allowed
