"""Two ends of a WebRTC data channel on loopback, in one process, and an in-memory channel of the same kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from links.webrtc import WebRtcChannel, answer, offer
from links.webrtc_settings import WebRtcSettings
from protocol.errors import LinkClosed

LOOPBACK = WebRtcSettings(addresses=("127.0.0.1",), connect_s=10.0)


async def connected(settings: WebRtcSettings = LOOPBACK) -> tuple[WebRtcChannel, WebRtcChannel]:
    """Both ends, open: of the side that offered, of the side that answered."""
    here = await offer(settings)
    there = await answer(settings, here.sdp)
    await here.accept(there.sdp)
    ours, theirs = await asyncio.gather(here.connected(), there.connected())
    return ours, theirs


class MemoryChannel:
    """A MessageChannel in memory. `held` keeps back what is sent; `high` messages fit before `room` waits."""

    def __init__(self, high: int = 8) -> None:
        self.other: MemoryChannel | None = None
        self.held = False
        self.sent: list[bytes] = []
        self.waiting: list[bytes] = []
        self.closed = False
        self.most_waiting = 0
        self._high = high
        self._room = asyncio.Event()
        self._on_message: Callable[[bytes], None] = lambda message: None
        self._on_closed: Callable[[str], None] = lambda why: None

    @property
    def buffered_bytes(self) -> int:
        return sum(map(len, self.waiting))

    def listen(self, on_message: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        self._on_message, self._on_closed = on_message, on_closed

    def send(self, message: bytes) -> None:
        if self.closed:
            raise LinkClosed("closed")
        self.sent.append(message)
        self.waiting.append(message)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        asyncio.get_running_loop().call_soon(self.flush)

    async def room(self) -> None:
        while len(self.waiting) >= self._high:
            if self.closed:
                raise LinkClosed("closed")
            self._room.clear()
            await self._room.wait()

    async def close(self) -> None:
        if not self.held:
            self.flush()
        for end in (self, self.other):
            if end is not None and not end.closed:
                end.closed = True
                end._room.set()
                end._on_closed("closed")

    def flush(self) -> None:
        """Hand over one message, unless it is held back."""
        if self.held or not self.waiting or self.other is None:
            return
        self.other.deliver(self.waiting.pop(0))
        self._room.set()
        if self.waiting:
            asyncio.get_running_loop().call_soon(self.flush)

    def deliver(self, message: bytes) -> None:
        self._on_message(message)


def memory_channels(high: int = 8) -> tuple[MemoryChannel, MemoryChannel]:
    ours, theirs = MemoryChannel(high), MemoryChannel(high)
    ours.other, theirs.other = theirs, ours
    return ours, theirs


class LossyPath(asyncio.DatagramProtocol):
    """The one path between two ends: a UDP relay on loopback that drops what `drops` says.

    Candidates in the descriptions are replaced by the relay's own two ports, so that neither end knows the other's.
    """

    def __init__(self, drops: Callable[[bytes], bool]) -> None:
        self._drops = drops
        self._sides: list[asyncio.DatagramTransport] = []
        self._ports: list[int] = []
        self.dropped = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for side in (0, 1):
            transport, _ = await loop.create_datagram_endpoint(
                lambda side=side: _Side(self, side),  # type: ignore[misc]
                local_addr=("127.0.0.1", 0),
            )
            self._sides.append(transport)

    def stand_for(self, sdp: str, side: int) -> str:
        """`sdp` as the other end shall see it: reached through us."""
        line = next(line for line in sdp.splitlines() if line.startswith("a=candidate:"))
        port = line.split()[5]
        self._ports.insert(side, int(port))
        return sdp.replace(f" {port} ", f" {self._sides[side].get_extra_info('sockname')[1]} ")

    def relay(self, data: bytes, side: int) -> None:
        """A datagram for the end that `side` stands for, from the other one."""
        if self._drops(data):
            self.dropped += 1
        elif side < len(self._ports):
            self._sides[1 - side].sendto(data, ("127.0.0.1", self._ports[side]))

    def close(self) -> None:
        for side in self._sides:
            side.close()


class _Side(asyncio.DatagramProtocol):
    def __init__(self, path: LossyPath, side: int) -> None:
        self._path = path
        self._side = side

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._path.relay(data, self._side)


async def connected_over(path: LossyPath) -> tuple[WebRtcChannel, WebRtcChannel]:
    """Both ends, with `path` (started) between them."""
    here = await offer(LOOPBACK)
    there = await answer(LOOPBACK, path.stand_for(here.sdp, 0))
    await here.accept(path.stand_for(there.sdp, 1))
    ours, theirs = await asyncio.gather(here.connected(), there.connected())
    return ours, theirs
