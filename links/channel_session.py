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
from collections.abc import Callable

from attrs import frozen

from links.channel_messages import (
    Bye,
    Message,
    Open,
    Ping,
    Pong,
    Reset,
    decode_message,
    encode_data,
    encode_message,
)
from links.channel_stream import Stream
from links.port import MessageChannel
from protocol.clock import Clock
from protocol.errors import LinkClosed, ProtocolError

log = logging.getLogger("midstream.links.channel")

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
        self._sent_bytes = 0
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
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"channel to {peer}")
        channel.listen(self._on_message, self._end)  # what came before is handed over at once, and may be the end

    def idle_s(self) -> float:
        """Seconds since a stream carried anything."""
        return self._clock() - self._used_s

    def heard_lately(self) -> bool:
        """Whether it lives and the peer said something since the ping before the last."""
        return not self.why and self._clock() - self._heard_s <= 2 * self._settings.ping_s

    async def open(self, opening: Open) -> Stream:
        """Begin a stream, when one more may be open. Raises LinkClosed, ProtocolError for headers that are too long."""
        while len(self._streams) >= self._settings.streams and not self.why:
            self._freed.clear()
            await self._freed.wait()
        if self.why:
            raise LinkClosed(f"the link to {self.peer} is down: {self.why}")
        message = encode_message(self._highest + 1, opening)
        self._put(message)
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
                self._put(encode_message(0, Bye()))
                async with asyncio.timeout(self._settings.bye_s):
                    await self._bye_seen.wait()
        self._end("closed here")
        await self.closed()

    async def send_in_turn(self, stream: Stream, part: memoryview, *, frame_end: bool, last: bool) -> None:
        """One fragment when it is this stream's turn and there is room: streams that send at once take turns."""
        async with self._turn:
            await self._channel.room()
            stream.check_open()
            self._put(encode_data(stream.number, part, frame_end=frame_end, last=last))
        self._prove_later()

    def _put(self, message: bytes) -> None:
        self._channel.send(message)
        self._sent_bytes += len(message)

    def send_now(self, number: int, message: Message, *, lenient: bool = False) -> None:
        """A small message past the queue. lenient: a session that has ended takes it in silence."""
        if self._channel.buffered_bytes > MAX_BUFFERED_BYTES:
            self._end(f"{self.peer} does not take what it asked for")
        try:
            if self.why:
                raise LinkClosed(self.why)
            self._put(encode_message(number, message))
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
        settings, waiting_bytes, left_bytes = self._settings, 0, 0
        while True:
            began_s = self._clock()
            self._ping()
            await asyncio.sleep(settings.ping_s)
            late_s = self._clock() - began_s - settings.ping_s
            if late_s > settings.ping_s:
                # Nobody could have been heard: this loop itself stood still.
                self._heard_s += late_s
            before_bytes, waiting_bytes = waiting_bytes, self._channel.buffered_bytes
            gone_bytes, left_bytes = left_bytes, self._sent_bytes - waiting_bytes
            if before_bytes > 0 and left_bytes > gone_bytes:
                # On a slow link our ping waits behind what was sent; what leaves a full buffer was confirmed to SCTP.
                self._heard_s = self._clock()
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
