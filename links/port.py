"""Ports of this room: Link, FrameStream, MessageChannel (data), ControlChannel (MQTT), Browser, and what servers mount.

Adapters raise LinkError only. The identity (TLS) and the sink for transfer samples are constructor arguments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from attrs import field, frozen

from protocol.errors import LinkError

MAX_FRAME_BYTES = 1 << 20
"""Largest frame on a FrameStream; longer ones are refused before they are allocated."""


class RejectedStatus(LinkError):
    """The peer answered with a status over 399 where a stream or a file was asked for.

    Args:
        status: the HTTP status.
        body: the first bytes of the answer's body (64 KiB at the most).
        headers: the answer's headers, names in lower case.
    """

    code = "upstream_rejected"

    def __init__(
        self, message: str, *, status: int, body: bytes, headers: Mapping[str, str] | None = None, next_step: str = ""
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status
        self.body = body
        self.headers: Mapping[str, str] = headers or {}


class ClockNotSet(LinkError):
    """A certificate is not valid yet, or no longer, at this machine's time: set the clock, then retry."""

    code = "clock"


@frozen
class WireTimes:
    """Where the seconds of one exchange went; together they are all of it. All zero: this link does not measure them.

    connect_s: until the first byte left: a free connection, the name looked up, TLS. send_s: the way up, and the first
    byte's way down. server_s: what the peer says it took (`server-timing: app;dur`). receive_s: the rest of the answer.
    """

    connect_s: float = 0.0
    send_s: float = 0.0
    server_s: float = 0.0
    receive_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.connect_s + self.send_s + self.server_s + self.receive_s


@frozen
class Reply:
    """A whole answer. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    times: WireTimes = field(factory=WireTimes)


class FrameStream(Protocol):
    """Ordered frames of at most MAX_FRAME_BYTES, both ways."""

    async def send(self, frame: bytes) -> None:
        """Waits for room; raises LinkClosed when the peer is gone."""
        ...

    async def receive(self) -> bytes | None:
        """The next frame, or None when the peer closed in order. Raises LinkClosed when it vanished."""
        ...

    async def close(self) -> None: ...


class MessageChannel(Protocol):
    """Ordered, whole messages to one peer and back, whatever carries them."""

    @property
    def buffered_bytes(self) -> int:
        """Taken by `send` and not handed to the network yet."""
        ...

    def listen(self, on_message: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        """Messages from now on, on the event loop; `on_closed` says why there will be no more."""
        ...

    def send(self, message: bytes) -> None:
        """Never waits. Raises LinkClosed."""
        ...

    async def room(self) -> None:
        """Returns when the buffer is low enough for the next message. Raises LinkClosed."""
        ...

    async def close(self) -> None:
        """Always bounded in time; leaves no task and no socket."""
        ...


@runtime_checkable
class CountingStream(Protocol):
    """A FrameStream that knows how far its bytes have come."""

    def acknowledged(self) -> int | None:
        """Bytes that the peer's system has acknowledged since the stream was opened; None where nobody counts."""
        ...


class Link(Protocol):
    """A client's way to one peer."""

    @property
    def name(self) -> str: ...

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        """One request, one whole answer, within `deadline_s` seconds from now."""
        ...

    def lines(self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float) -> AsyncIterator[bytes]:
        """POST, then the answer's body as chunks as they arrive. Raises RejectedStatus on a status over 399.

        `deadline_s` bounds the wait for the first chunk and then for each next one.
        """
        ...

    async def open(self, path: str) -> FrameStream:
        """A frame stream (WebSocket by default)."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class DoubledLink(Protocol):
    """A Link of which there can be another one, to the same peer with the same identity."""

    def again(self) -> Link:
        """A link of its own, for another event loop, without samples."""
        ...


@runtime_checkable
class ProvenLink(Protocol):
    """A Link that asks its far end for signs of life by itself, and ends when there are none."""

    def heard_lately(self) -> bool:
        """Whether the far end has just shown that it is there, whatever became of the requests to it."""
        ...


@frozen
class Delivery:
    """One MQTT message."""

    topic: str
    payload: bytes
    retained: bool = False


Handler = Callable[[Delivery], None]
Unsubscribe = Callable[[], Awaitable[None]]
ControlState = Literal["down", "up", "refused", "duplicate", "clock"]


class ControlChannel(Protocol):
    """Publish and subscribe. The will is given at construction. Handlers run on the event loop and may not block."""

    async def publish(
        self, topic: str, payload: bytes, retain: bool = False, expires_in_s: float | None = None
    ) -> None:
        """Returns when the message is safely queued; it is sent when the channel is up."""
        ...

    async def subscribe(self, pattern: str, handler: Handler) -> Unsubscribe: ...

    def watch(self, on_state: Callable[[ControlState], None]) -> Callable[[], None]:
        """Be told of the state now and at each change; returns the way to stop."""
        ...

    def dial_now(self) -> None:
        """Do not wait any longer before the next attempt: the network has just come back."""
        ...

    async def close(self, last: Delivery | None = None) -> None:
        """Publish `last` (a goodbye), then disconnect in order."""
        ...


@frozen
class Found:
    """A DNS-SD service instance: candidate addresses only, never a proof of presence."""

    instance: str
    addresses: tuple[str, ...]
    port: int
    txt: Mapping[str, str] = field(factory=dict)


class Browser(Protocol):
    """Finds and advertises DNS-SD services on the configured interfaces."""

    async def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        """What answered within `seconds`."""
        ...

    async def advertise(self, service_type: str, instance: str, port: int, txt: Mapping[str, str]) -> str:
        """Announce; returns the instance name in use (a conflict renames it)."""
        ...

    async def close(self) -> None: ...


@frozen
class Request:
    """A request at a server. Header names are lower case; `peer` is the device id of a verified client certificate.

    peer_der: that certificate, DER. remote: the client's address, None where there is none (a Unix socket).
    """

    method: str
    path: str
    headers: Mapping[str, str]
    params: Mapping[str, str] = field(factory=dict)
    query: Mapping[str, str] = field(factory=dict)
    body: bytes = field(default=b"", repr=False)
    peer: str | None = None
    peer_der: bytes | None = field(default=None, repr=False)
    remote: str | None = None


@frozen
class Response:
    """An answer. An async iterator as body is streamed; it is closed (aclose) when the client leaves."""

    status: int = 200
    headers: Mapping[str, str] = field(factory=dict)
    body: bytes | AsyncIterator[bytes] = field(default=b"", repr=False)


@frozen
class Route:
    """A handler for one method and path; `{name}` in the path becomes `params["name"]`.

    The handler's task is cancelled when the client leaves. MidstreamErrors that escape become the house's error
    body, unless the way shapes its own.
    """

    method: str
    path: str
    handle: Callable[[Request], Awaitable[Response]]
    max_body_bytes: int = 16 << 20


@frozen
class FrameRoute:
    """A WebSocket endpoint: the handler owns the stream until it returns. work: False for streams that stand open
    without anything to do most of the time; they keep no device awake."""

    path: str
    handle: Callable[[Request, FrameStream], Awaitable[None]]
    work: bool = True


@frozen
class Mount:
    """What a way hands to a house: routes to serve, and symmetric start and stop."""

    routes: Sequence[Route]
    frame_routes: Sequence[FrameRoute]
    start: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]
