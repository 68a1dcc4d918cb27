"""The one data link to the coordinator that both ways hold, whichever address it leads to at the moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from links.port import CountingStream, DoubledLink, FrameStream, Link, ProvenLink, RejectedStatus, Reply
from protocol.errors import LinkClosed, LinkError, LinkTimeout

# One slow answer says little; several in a row say that nobody is there.
TIMEOUTS_BEFORE_TROUBLE = 3


class AvailableLink(Link, Protocol):
    """A Link that says whether its far end is there."""

    @property
    def available(self) -> bool: ...


class CloudLink:
    """A Link over a replaceable one, named `cloud` for the direct way to the coordinator, `webrtc` for the other.

    `available` is what discovery last proved, until an exchange shows otherwise; then `on_trouble` is called once, so
    that the coordinator is searched for again.
    """

    def __init__(self, on_trouble: Callable[[LinkError], None], name: str = "cloud") -> None:
        self._on_trouble = on_trouble
        self._name = name
        self._link: Link | None = None
        self._timeouts = 0
        self.available = False

    @property
    def name(self) -> str:
        return self._name

    async def point_to(self, link: Link) -> None:
        """Use `link` from now on and close the one before; what ran over that ends with LinkClosed."""
        old, self._link = self._link, link
        self.mark_available()
        if old is not None:
            await old.close()

    def mark_available(self) -> None:
        """The coordinator was just reached and identified."""
        self.available = True
        self._timeouts = 0

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        try:
            reply = await self._current().exchange(path, headers, body, deadline_s, method)
        except LinkError as err:
            self._note(err)
            raise
        self._timeouts = 0
        return reply

    async def lines(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float
    ) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._current().lines(path, headers, body, deadline_s):
                self._timeouts = 0
                yield chunk
        except LinkError as err:
            self._note(err)
            raise

    async def open(self, path: str) -> FrameStream:
        try:
            link = self._current()
            return _Watched(await link.open(path), lambda error: self._note_frames(link, error))
        except LinkError as err:
            self._note(err)
            raise

    def _note_frames(self, link: Link, error: LinkError | None) -> None:
        if self._link is not link:
            return
        if error is None:
            self._timeouts = 0
        else:
            self._note(error)

    def again(self) -> Link:
        """Another link to where this one leads now, for another event loop. From any thread; raises LinkError."""
        link = self._current()
        if not isinstance(link, DoubledLink):
            raise LinkError(f"there is one link of the kind of {self._name} at a time")
        return link.again()

    async def close(self) -> None:
        link, self._link = self._link, None
        self.available = False
        if link is not None:
            await link.close()

    def _current(self) -> Link:
        if self._link is None:
            raise LinkClosed("no coordinator is connected", next_step="the device answers alone until one is found")
        return self._link

    def _note(self, error: LinkError) -> None:
        if isinstance(error, RejectedStatus):
            return  # an answer, after all
        if isinstance(error, LinkTimeout):
            link: object = self._link
            if isinstance(link, ProvenLink) and link.heard_lately():
                return  # the far end is slow, not gone: another connection to it would change nothing
            self._timeouts += 1
            if self._timeouts < TIMEOUTS_BEFORE_TROUBLE:
                return
        if self.available:
            self.available = False
            self._on_trouble(error)


class EitherLink:
    """A Link over the first of several that is there: for what needs a way to the coordinator, whichever it is."""

    def __init__(self, links: Sequence[AvailableLink]) -> None:
        self._links = tuple(links)

    @property
    def name(self) -> str:
        return self._first().name

    @property
    def available(self) -> bool:
        """Whether any of them is there."""
        return any(link.available for link in self._links)

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        return await self._first().exchange(path, headers, body, deadline_s, method)

    def lines(self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float) -> AsyncIterator[bytes]:
        return self._first().lines(path, headers, body, deadline_s)

    async def open(self, path: str) -> FrameStream:
        return await self._first().open(path)

    async def close(self) -> None:
        """The links belong to others."""

    def _first(self) -> AvailableLink:
        return next((link for link in self._links if link.available), self._links[0])


class _Watched:
    """A FrameStream that reports how it broke, and None for each frame that came."""

    def __init__(self, stream: FrameStream, note: Callable[[LinkError | None], None]) -> None:
        self._stream = stream
        self._note = note

    async def send(self, frame: bytes) -> None:
        try:
            await self._stream.send(frame)
        except LinkError as err:
            self._note(err)
            raise

    async def receive(self) -> bytes | None:
        try:
            frame = await self._stream.receive()
        except LinkError as err:
            self._note(err)
            raise
        if frame is not None:
            self._note(None)
        return frame

    async def close(self) -> None:
        await self._stream.close()

    def acknowledged(self) -> int | None:
        return self._stream.acknowledged() if isinstance(self._stream, CountingStream) else None
