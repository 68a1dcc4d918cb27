"""Many streams over one ordered channel of messages: credit per stream, turns, liveness, an orderly end.

A data channel tells its reader nothing but messages: it has no flow control towards the reader, and closing it drops
what is under way (RFC 8831, section 6.7). So each stream has a credit that its reader renews, the end of a stream is a
message, and a session ends when the other side has seen the goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from attrs import frozen

from links.channel_messages import (
    FRAGMENT_BYTES,
    Bye,
    Credit,
    Data,
    Head,
    Message,
    Open,
    Ping,
    Pong,
    Reset,
    cost_of,
    decode_message,
    encode_data,
    encode_message,
)
from links.port import MessageChannel
from protocol.clock import Clock
from protocol.errors import LinkClosed, ProtocolError

log = logging.getLogger("midstream.links.channel")

WINDOW_COST = 1 << 20
"""What a peer may have on its way to one reader."""

MAX_BUFFERED_BYTES = 4 << 20
"""A peer that asks for answers and does not take them is left when this much waits for it."""

FIRST_ROUND_TRIP_S = 0.05
LEAST_PROBE_S = 0.02
PROBE_STEP_S = 0.005
PROBES_AT_ONCE = 4
MAX_PROBES = 12


@frozen
class SessionSettings:
    """ping_s: between pings. silent_s: a peer that says nothing for so long is gone. bye_s: longest wait for the other
    side's goodbye. streams: open at once; twice as many are accepted, since the sides do not see an end together.
    """

    ping_s: float = 5.0
    silent_s: float = 15.0
    streams: int = 64
    bye_s: float = 2.0


class Stream:
    """One stream; made by a Session. Not for several readers at once."""

    def __init__(self, session: Session, number: int, frames: bool, accepted: bool) -> None:
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


Accept = Callable[[Stream, Open], None]


class Session:
    """All streams with one peer. Make it on the event loop; it runs from its making to `close`, or the peer's end.

    Args:
        peer: the peer's name in messages.
        accept: takes the streams that the peer opens (server side); without it the peer may open none.
        on_round_trip: seconds of a ping's round trip that had nothing before it in the buffer.
    """

    def __init__(
        self,
        channel: MessageChannel,
        peer: str,
        *,
        accept: Accept | None = None,
        settings: SessionSettings = SessionSettings(),
        clock: Clock = time.monotonic,
        on_round_trip: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.peer = peer
        self._channel = channel
        self._accept = accept
        self._settings = settings
        self._clock = clock
        self._on_round_trip = on_round_trip
        self._streams: dict[int, Stream] = {}
        self._highest = 0
        self._turn = asyncio.Lock()
        self._heard_s = self._used_s = clock()
        self._pings = 0
        self._pinged_s: float | None = None
        self._round_trip_s = FIRST_ROUND_TRIP_S
        self._proven = True
        self._sent_since = False
        self._probes = 0
        self._probe: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self._bye_seen = asyncio.Event()
        self._freed = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self.why = ""
        """Why it ended; empty while it lives."""
        channel.listen(self._on_message, self._end)
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"channel to {peer}")

    def idle_s(self) -> float:
        """Seconds since a stream carried anything."""
        return self._clock() - self._used_s

    async def open(self, opening: Open) -> Stream:
        """Begin a stream, when one more may be open. Raises LinkClosed, ProtocolError for headers that are too long."""
        while len(self._streams) >= self._settings.streams and not self.why:
            self._freed.clear()
            await self._freed.wait()
        if self.why:
            raise LinkClosed(f"the link to {self.peer} is down: {self.why}")
        message = encode_message(self._highest + 1, opening)
        self._channel.send(message)
        self._highest += 1
        stream = self._streams[self._highest] = Stream(self, self._highest, opening.frames, False)
        self._prove_later()
        return stream

    async def closed(self) -> str:
        """Returns when the session has ended and its channel is closed, with the reason."""
        await self._gone.wait()
        if self._closing is not None:
            await asyncio.shield(self._closing)
        await asyncio.gather(self._watching, return_exceptions=True)
        return self.why

    async def close(self) -> None:
        """Say goodbye after everything that was sent, wait a bounded time for the other side's, close the channel."""
        if not self.why:
            with contextlib.suppress(LinkClosed, TimeoutError):
                self._channel.send(encode_message(0, Bye()))
                async with asyncio.timeout(self._settings.bye_s):
                    await self._bye_seen.wait()
        self._end("closed here")
        await self.closed()

    async def send_in_turn(self, stream: Stream, part: memoryview, *, frame_end: bool, last: bool) -> None:
        """One fragment when it is this stream's turn and there is room: streams that send at once take turns."""
        async with self._turn:
            await self._channel.room()
            stream.check_open()
            self._channel.send(encode_data(stream.number, part, frame_end=frame_end, last=last))
        self._prove_later()

    def send_now(self, number: int, message: Message, *, lenient: bool = False) -> None:
        """A small message past the queue. lenient: a session that has ended takes it in silence."""
        if self._channel.buffered_bytes > MAX_BUFFERED_BYTES:
            self._end(f"{self.peer} does not take what it asked for")
        try:
            if self.why:
                raise LinkClosed(self.why)
            self._channel.send(encode_message(number, message))
            if number:
                self._prove_later()
        except LinkClosed:
            if not lenient:
                raise

    def forget(self, stream: Stream) -> None:
        """The stream takes no more messages."""
        self._streams.pop(stream.number, None)
        self._freed.set()

    def _on_message(self, raw: bytes) -> None:
        if self.why:
            return
        self._heard_s = self._clock()
        try:
            self._take(*decode_message(raw))
        except ProtocolError as err:
            log.warning("%s broke the protocol of the channel: %s", self.peer, err)
            self._end(f"{self.peer} broke the protocol: {err.message}")

    def _take(self, number: int, message: Message) -> None:
        match message:
            case Open():
                self._take_open(number, message)
            case Ping():
                self.send_now(0, Pong(message.number), lenient=True)
            case Pong():
                self._take_pong(message)
            case Bye(answered=False):
                self.send_now(0, Bye(answered=True), lenient=True)
                self._end(f"{self.peer} left")
            case Bye():
                self._bye_seen.set()
            case _:
                self._take_for_stream(number, message)

    def _take_open(self, number: int, opening: Open) -> None:
        if self._accept is None or number <= self._highest:
            raise ProtocolError(f"stream {number} may not be opened", field="stream")
        self._highest = number
        if len(self._streams) >= 2 * self._settings.streams:
            self.send_now(number, Reset("too many streams at once"), lenient=True)
            return
        stream = self._streams[number] = Stream(self, number, opening.frames, True)
        self._accept(stream, opening)

    def _take_for_stream(self, number: int, message: Message) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            self._used_s = self._heard_s
            stream.take(message)
        elif number > self._highest:
            raise ProtocolError(f"stream {number} was never opened", field="stream")
        # else: on its way when the stream was left

    def _take_pong(self, pong: Pong) -> None:
        sent_s, self._pinged_s = self._pinged_s, None
        if pong.number != self._pings:
            return
        self._proven = not self._sent_since
        if sent_s is not None:
            seconds = self._clock() - sent_s
            # Near the least: what waits in queues says nothing of how soon an answer may come.
            self._round_trip_s = min(seconds, self._round_trip_s + (seconds - self._round_trip_s) / 16)
            self._on_round_trip(seconds)

    def _prove_later(self) -> None:
        """See to it that the last of what was sent is known to have arrived.

        SCTP finds a loss at the end of what was sent by its timer alone, after a second at the least; messages that
        follow let it find the gap after three of them (RFC 9260, section 7.2.4; as RFC 8985's tail loss probe does).
        """
        self._used_s = self._clock()
        self._proven, self._sent_since, self._probes = False, True, 0
        if self._probe is None and not self.why:
            self._probe = asyncio.get_running_loop().call_later(self._probe_pause_s(), self._prove)

    def _prove(self) -> None:
        self._probe = None
        if self.why or self._proven or self._probes >= MAX_PROBES:
            return
        pause_s = self._probe_pause_s()
        if self._sent_since:
            self._sent_since = False  # what was sent lately proves what was before it
        else:
            self._ping()
            self._probes += 1
            pause_s = pause_s if self._probes % PROBES_AT_ONCE == 0 else PROBE_STEP_S
        self._probe = asyncio.get_running_loop().call_later(pause_s, self._prove)

    def _probe_pause_s(self) -> float:
        return max(LEAST_PROBE_S, 2 * self._round_trip_s)

    async def _watch(self) -> None:
        """Ping, and end the session of a peer that has fallen silent."""
        settings = self._settings
        while True:
            began_s = self._clock()
            self._ping()
            await asyncio.sleep(settings.ping_s)
            late_s = self._clock() - began_s - settings.ping_s
            if late_s > settings.ping_s:
                # Nobody could have been heard: this loop itself stood still.
                self._heard_s += late_s
            silent_s = self._clock() - self._heard_s
            if silent_s > settings.silent_s:
                self._end(f"{self.peer} said nothing for {silent_s:.0f} s")
                return

    def _ping(self) -> None:
        alone = self._probes == 0 and self._channel.buffered_bytes == 0
        self._pings += 1
        self._sent_since = False
        self._pinged_s = self._clock() if alone else None
        self.send_now(0, Ping(self._pings), lenient=True)

    def _end(self, why: str) -> None:
        if self.why:
            return
        self.why = why
        for stream in list(self._streams.values()):
            stream.fail(why)
        if self._probe is not None:
            self._probe.cancel()
        if asyncio.current_task() is not self._watching:
            self._watching.cancel()
        self._closing = asyncio.get_running_loop().create_task(self._channel.close(), name=f"close {self.peer}")
        for event in (self._gone, self._bye_seen, self._freed):
            event.set()
