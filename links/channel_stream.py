"""One stream of a session on a data channel: what was read and not taken, credit both ways, and how it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from links.channel_messages import FRAGMENT_BYTES, Credit, Data, Head, Message, Reset, cost_of
from protocol.errors import LinkClosed, ProtocolError

WINDOW_COST = 1 << 20
"""What a peer may have on its way to one reader."""


class Owner(Protocol):
    """The session that a stream belongs to (links.channel_session.Session)."""

    @property
    def peer(self) -> str: ...
    async def send_in_turn(self, stream: Stream, part: memoryview, *, frame_end: bool, last: bool) -> None: ...
    def send_now(self, number: int, message: Message, *, lenient: bool = False) -> None: ...
    def forget(self, stream: Stream) -> None: ...


class Stream:
    """One stream; made by a Session. Not for several readers at once."""

    def __init__(self, session: Owner, number: int, frames: bool, accepted: bool) -> None:
        self._session = session
        self.number = number
        self._frames = frames
        self._accepted = accepted
        self._parts: deque[Data] = deque()
        self._head: Head | None = None
        self._credit = self._room = WINDOW_COST
        self._owed = 0
        self._ended = self._sent_last = self._left = False
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self.on_gone: Callable[[], object] = lambda: None
        """Called once when the peer leaves the stream in the middle, or altogether."""

    @property
    def ended(self) -> bool:
        """Whether the peer has said its last on this stream."""
        return self._ended

    @property
    def gone(self) -> bool:
        """Whether it can be used no more."""
        return self._failure is not None

    async def head(self) -> Head:
        """The beginning of the answer. Raises LinkClosed."""
        while self._head is None:
            self._check()
            await self._changed.wait()
        return self._head

    def answer(self, head: Head) -> None:
        """Begin the answer (server side)."""
        self._check()
        self._session.send_now(self.number, head)

    async def send(self, data: bytes, *, frame_end: bool = False, last: bool = False, until_head: bool = False) -> bool:
        """Send in fragments, each when there is credit and room. Raises LinkClosed.

        until_head: stop when the answer begins before all is sent; False is returned then.
        """
        view, at = memoryview(data), 0
        while True:
            part = view[at : at + FRAGMENT_BYTES]
            at += len(part)
            whole = at >= len(view)
            if not await self._has_credit(cost_of(part, last), until_head):
                return False
            await self._session.send_in_turn(self, part, frame_end=frame_end and whole, last=last and whole)
            if whole:
                self._sent_last = last
                return True

    def end(self) -> None:
        """Say that nothing follows, without waiting for anything. Raises LinkClosed."""
        if not self._sent_last:
            self.check_open()
            self._session.send_now(self.number, Data(b"", last=True))
            self._sent_last = True

    async def receive(self) -> Data | None:
        """The next part, None after the last. Raises LinkClosed once what has arrived is read."""
        while not self._parts:
            if self._ended:
                return None
            self._check()
            await self._changed.wait()
        part = self._parts.popleft()
        self._give_back(cost_of(part.data, part.last))
        return part

    def leave(self, reason: str = "not wanted any more") -> None:
        """Done with it: a stream that is whole is forgotten, any other one is reset."""
        if self._left:
            return
        self._left = True
        self._session.forget(self)
        if self._failure is None and not self._whole():
            self._session.send_now(self.number, Reset(reason), lenient=True)
        self._failure = self._failure or reason
        self._parts.clear()
        self._notify()

    def _whole(self) -> bool:
        """Whether the other side needs no word of it: an exchange is over with its answer, frames with either's end."""
        if self._frames:
            return self._ended or self._sent_last
        return self._sent_last if self._accepted else self._ended

    def take(self, message: Message) -> None:
        """A message of the peer. Raises ProtocolError."""
        match message:
            case Data():
                self._take_data(message)
            case Head() if self._head is None:
                self._head = message
            case Credit():
                self._credit = min(self._credit + message.cost, WINDOW_COST)
            case Reset():
                self.fail(f"{self._session.peer} left the stream: {message.reason}")
            case _:
                raise ProtocolError(f"{type(message).__name__} does not belong here", field="kind")
        self._notify()

    def fail(self, why: str) -> None:
        """The peer is gone from this stream."""
        if self._failure is None and not self._left:
            self._failure = why
            self._session.forget(self)
            self._notify()
            self.on_gone()

    def check_open(self) -> None:
        """Raise LinkClosed when nothing can be sent: the peer left, or ended a frame stream, which ends both ways."""
        self._check()
        if self._frames and self._ended:
            raise LinkClosed(f"{self._session.peer} closed the stream")

    def _take_data(self, part: Data) -> None:
        self._room -= cost_of(part.data, part.last)
        if self._room < 0 or self._ended:
            raise ProtocolError("more data than there was room for", field="credit")
        self._parts.append(part)
        self._ended = part.last

    def _give_back(self, cost: int) -> None:
        self._owed += cost
        if self._owed >= WINDOW_COST // 4 and not self._ended and self._failure is None:
            owed, self._owed = self._owed, 0
            self._room += owed
            self._session.send_now(self.number, Credit(owed), lenient=True)

    async def _has_credit(self, cost: int, until_head: bool) -> bool:
        while self._credit < cost:
            if until_head and self._head is not None:
                return False
            self.check_open()
            await self._changed.wait()
        self.check_open()
        self._credit -= cost
        return not (until_head and self._head is not None)

    def _check(self) -> None:
        if self._failure is not None:
            raise LinkClosed(self._failure)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
