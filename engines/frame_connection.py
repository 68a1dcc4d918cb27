"""The asking end of one stream of tensor frames: many requests in flight, answers in any order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from attrs import define, evolve, field, frozen

from engines.aside import aside
from engines.frame_meter import Sent, UpMeter
from engines.frame_parts import LARGE_BYTES, Incoming, Outgoing, pack, views_of
from engines.frame_sender import FrameSender
from engines.port import TensorAnswer
from links.port import CountingStream, FrameStream, WireTimes
from protocol import zstd
from protocol.clock import Clock
from protocol.errors import LinkClosed, LinkError, LinkTimeout, MidstreamError, ProtocolError
from protocol.events import TransferSample
from protocol.handoff_frames import Refuse
from protocol.refusals import as_error
from protocol.tensor_frames import (
    MAX_REQUEST,
    NO_REQUEST,
    WAITED,
    ZSTD,
    Answer,
    Ask,
    BrokenFrame,
    Cancel,
    Credit,
    Data,
    Hello,
    Received,
    TensorFramed,
    decode,
)
from protocol.tensors import Tensor

CREDIT_BYTES = 4 << 20
"""Answer data on the way and not yet used: enough for 100 Mbit/s at 300 ms, and what a slow device must hold."""

CREDIT_STEP = 4
"""A new grant is sent once it is worth one part in this many of the credit."""

GREETING_S = 10.0

MAX_HERE_BYTES = 64 << 10
"""More data than this is packed and unpacked in a thread."""

OnAnswer = Callable[[TensorAnswer, Callable[[], None]], None]
"""Takes a whole answer and calls the second argument, from any thread, when its memory is free again. In a lane it may
block: nothing more is read meanwhile."""


@frozen
class Sink:
    """Where samples go, under which link's name."""

    link: str
    add: Callable[[TransferSample], None]
    clock: Clock

    def sample(self, sent: Sent, *, complete: bool = True) -> TransferSample:
        """Hand a way up to the sink and return it."""
        found = TransferSample(
            at_s=self.clock(),
            link=self.link,
            direction="up",
            size_bytes=sent.size_bytes,
            seconds=sent.seconds,
            idle_before_s=sent.idle_before_s,
            complete=complete,
            moved_bytes=None if complete else sent.moved_bytes,
        )
        self.add(found)
        return found

    def down(self, size_bytes: int, seconds: float) -> TransferSample:
        """The same for a way down."""
        found = TransferSample(
            at_s=self.clock(), link=self.link, direction="down", size_bytes=size_bytes, seconds=seconds
        )
        self.add(found)
        return found


@define(eq=False)
class _Asked:
    """One request in flight."""

    on_answer: OnAnswer
    done: asyncio.Future[TensorAnswer]
    asked_s: float
    up_bytes: int = 0
    encode_s: float = 0.0
    posted_s: float = 0.0
    arrived_s: float = 0.0
    answer: Answer | None = None
    incoming: Incoming | None = None
    head_s: float = 0.0
    read_at: int = 0
    transfers: list[TransferSample] = field(factory=list)


class Room:
    """How many requests, and bytes of them, the far end takes at once; who comes first goes first."""

    def __init__(self, requests: int, size_bytes: int) -> None:
        self._requests = max(1, requests)
        self._bytes = size_bytes
        self._taken = 0
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Wait for room. A request larger than all of it goes alone, and the far end judges it."""
        if not self._waiting and self._fits(size_bytes):
            self._enter(size_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (size_bytes, turn)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size_bytes)
            else:
                with contextlib.suppress(ValueError):  # its turn came in the same moment, and was passed on
                    self._waiting.remove(place)
                self._admit()
            raise

    def give(self, size_bytes: int) -> None:
        """A request is over."""
        self._taken -= 1
        self._taken_bytes -= size_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._enter(size_bytes)
                turn.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        if self._taken == 0:
            return True
        return self._taken < self._requests and self._taken_bytes + size_bytes <= self._bytes

    def _enter(self, size_bytes: int) -> None:
        self._taken += 1
        self._taken_bytes += size_bytes


class FrameConnection:
    """Asks over one open stream, for one event loop; `lost` is set once it cannot be used any more."""

    def __init__(self, stream: FrameStream, sink: Sink, credit_bytes: int = CREDIT_BYTES) -> None:
        self._stream = stream
        self._counting = stream if isinstance(stream, CountingStream) else None
        self._sink = sink
        self._clock = sink.clock
        self._credit_bytes = credit_bytes
        self._granted = credit_bytes
        self._frames = 0
        self._read_bytes = 0
        self._held_bytes = 0
        self._sender = FrameSender(stream)
        self._meter = UpMeter()
        self._asked: dict[int, _Asked] = {}
        self._room: Room | None = None
        self._features = 0
        self._greeted_s = 0.0
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._tasks: list[asyncio.Task[None]] = []
        self.lost: MidstreamError | None = None

    async def greet(self) -> None:
        """Exchange first frames. Raises LinkError, ProtocolError."""
        self._greeted_s = self._clock()
        self._sender.say(NO_REQUEST, Hello(credit_bytes=self._credit_bytes, at_us=_us(self._greeted_s)))
        self._tasks.append(asyncio.create_task(self._write(), name="tensor-frames-write"))
        try:
            async with asyncio.timeout(GREETING_S):
                data = await self._stream.receive()
        except TimeoutError as err:
            raise LinkTimeout(f"{self._sink.link} opened a stream of tensor frames and said nothing") from err
        if data is None:
            raise self.lost or LinkClosed(f"{self._sink.link} closed the stream of tensor frames at once")
        frame = decode(data).frame
        if isinstance(frame, Refuse):
            raise as_error(frame)
        if not isinstance(frame, Hello):
            raise ProtocolError(f"the first frame is a {type(frame).__name__}", field="type")
        self._meter.heard(self._clock(), frame.at_us / 1e6)
        self._features = frame.features
        self._room = Room(frame.max_requests, frame.max_bytes)
        self._tasks.append(asyncio.create_task(self._read(), name="tensor-frames-read"))

    @property
    def packs(self) -> bool:
        """Whether packed data may be sent: both sides have zstd."""
        return bool(self._features & ZSTD) and zstd.available()

    async def ask(
        self, ask: Ask, inputs: Sequence[Tensor], ends_s: float, on_answer: OnAnswer, *, packed: bool = False
    ) -> TensorAnswer:
        """One request, one answer. Cancelling it (a time-out too) takes it back at the far end."""
        assert self._room is not None
        began_s = self._clock()
        if packed and self.packs:
            large = sum(tensor.size_bytes for tensor in inputs) > MAX_HERE_BYTES
            views = deque([memoryview(await aside(partial(pack, inputs), large))])
            ask = evolve(ask, packed_bytes=len(views[0]))
        else:
            views = views_of(inputs)
        size_bytes, encode_s = sum(map(len, views)), self._clock() - began_s
        asked = _Asked(on_answer, self._loop.create_future(), began_s, size_bytes, encode_s)
        room_bytes = max(size_bytes, sum(tensor.size_bytes for tensor in inputs))  # as Incoming.room_bytes there
        await self._room.take(room_bytes)
        try:
            return await self._exchange(ask, asked, views, ends_s)
        finally:
            self._room.give(room_bytes)

    def under_way(self) -> TransferSample | None:
        """The oldest request whose arrival is not known yet; `seconds` is its age."""
        sent = self._meter.under_way(self._clock(), self._moved())
        if sent is None:
            return None
        return TransferSample(
            at_s=self._clock(), link=self._sink.link, direction="up", size_bytes=sent.size_bytes,
            seconds=sent.seconds, idle_before_s=sent.idle_before_s, complete=False, moved_bytes=sent.moved_bytes,
        )  # fmt: skip

    def sign_of_life(self) -> tuple[int, int | None]:
        """Frames read so far, and bytes of ours that the far end's system has taken: what does not change is dead."""
        return self._frames, self._moved()

    def abandon(self, error: LinkError) -> None:
        """Nothing comes through any more: requests in flight end with `error`, the next one opens another stream."""
        self._lose(error)

    async def close(self) -> None:
        """Requests in flight end with LinkClosed."""
        self._lose(LinkClosed("the stream of tensor frames was closed here"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stream.close()

    async def _exchange(self, ask: Ask, asked: _Asked, views: deque[memoryview], ends_s: float) -> TensorAnswer:
        if self.lost is not None:
            raise self.lost
        request = self._number()
        self._asked[request] = asked

        def head(data: bytes | memoryview) -> Ask:
            deadline_ms = max(1, round(1000 * (ends_s - self._clock())))
            return Ask(ask.model, ask.id, deadline_ms, ask.tensors, ask.packed_bytes, data)

        message = Outgoing(
            request,
            head,
            views,
            on_begin=lambda at: self._meter.began(request, asked.up_bytes, self._clock(), at),
            on_end=lambda at: self._meter.ended(request, at),
        )
        asked.posted_s = self._clock()
        self._sender.post(message)
        try:
            return await asked.done
        finally:
            if self._asked.pop(request, None) is not None:
                self._take_back(request, message)

    def _take_back(self, request: int, message: Outgoing) -> None:
        """An unanswered request is given up: unsent it is forgotten, sent it is cancelled over there."""
        self._sender.drop(request)
        gone = self._meter.given_up(request, self._clock(), self._moved())
        if gone is not None:
            self._sink.sample(gone, complete=False)
        if message.begun and self.lost is None:
            self._sender.say(request, Cancel())

    def _moved(self) -> int | None:
        return self._counting.acknowledged() if self._counting is not None else None

    def _number(self) -> int:
        while True:
            self._count = self._count % MAX_REQUEST + 1
            if self._count not in self._asked:
                return self._count

    async def _write(self) -> None:
        try:
            await self._sender.run()
        except MidstreamError as err:
            self._lose(err)

    async def _read(self) -> None:
        try:
            while (data := await self._stream.receive()) is not None:
                self._read_bytes_of(data)
        except MidstreamError as err:
            self._lose(err)
        else:
            self._lose(LinkClosed(f"{self._sink.link} ended the stream of tensor frames"))

    def _read_bytes_of(self, data: bytes) -> None:
        self._frames += 1
        try:
            framed = decode(data)
        except BrokenFrame as err:
            self._fail(err.request, err)
            return
        frame = framed.frame
        if isinstance(frame, Received):
            self._arrived(framed.request, frame)
        elif isinstance(frame, Answer | Data):
            self._take_part(framed, frame)
        elif isinstance(frame, Refuse):
            if framed.request == NO_REQUEST:
                raise as_error(frame)
            self._fail(framed.request, as_error(frame))
        else:
            raise ProtocolError(f"an asker takes no {type(frame).__name__}", field="type")

    def _arrived(self, request: int, frame: Received) -> None:
        if request == NO_REQUEST:
            self._meter.greeted(self._greeted_s, self._clock(), frame.at_us / 1e6)
            return
        sent = self._meter.arrived(request, self._clock(), frame.at_us / 1e6)
        asked = self._asked.get(request)
        if sent is not None:
            sample = self._sink.sample(sent)
            if asked is not None:
                asked.arrived_s = self._clock()
                asked.transfers.append(sample)

    def _take_part(self, framed: TensorFramed, frame: Answer | Data) -> None:
        self._read_bytes += len(frame.data)
        asked = self._asked.get(framed.request)
        if asked is not None:
            try:
                if isinstance(frame, Answer):
                    asked.answer, asked.incoming = frame, Incoming(frame.tensors, frame.packed_bytes)
                    asked.head_s, asked.read_at = self._clock(), self._read_bytes
                if asked.incoming is None:
                    raise ProtocolError("data before the answer's head", field="data")
                if asked.incoming.add(frame.data, framed.flags):
                    self._complete(framed.request, asked, bool(framed.flags & WAITED))
            except MidstreamError as err:
                self._fail(framed.request, err)
        self._grant()

    def _complete(self, request: int, asked: _Asked, waited: bool) -> None:
        assert asked.answer is not None and asked.incoming is not None
        answer, incoming = asked.answer, asked.incoming
        came_s = self._clock()
        if incoming.total_bytes >= LARGE_BYTES and not waited:
            asked.transfers.append(self._sink.down(self._read_bytes - asked.read_at, max(1e-6, came_s - asked.head_s)))
        outputs = incoming.tensors()
        del self._asked[request]
        whole = TensorAnswer(
            outputs=outputs,
            digest=answer.digest,
            wait_s=answer.wait_us / 1e6,
            compute_s=answer.compute_us / 1e6,
            transfers=tuple(asked.transfers),
            encode_s=asked.encode_s,
            decode_s=self._clock() - came_s,
            up_bytes=asked.up_bytes,
            down_bytes=incoming.total_bytes,
            wire=_wire(asked, came_s),
        )
        self._held_bytes += incoming.total_bytes
        asked.on_answer(whole, lambda: self._free(incoming.total_bytes))
        if not asked.done.done():
            asked.done.set_result(whole)

    def _free(self, size_bytes: int) -> None:
        """At once on the loop's own thread, even from within `on_answer`; from another one in its next turn."""
        if threading.get_ident() == self._thread:
            self._freed(size_bytes)
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._freed, size_bytes)

    def _freed(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes
        self._grant()

    def _grant(self) -> None:
        """Answers that are whole and not yet used take credit away, answers that still arrive do not."""
        total = self._read_bytes + max(0, self._credit_bytes - self._held_bytes)
        worth = total - self._granted
        if self.lost is None and (
            worth >= self._credit_bytes // CREDIT_STEP or (worth > 0 and self._granted <= self._read_bytes)
        ):
            self._granted = total
            self._sender.say(NO_REQUEST, Credit(total))

    def _fail(self, request: int, error: MidstreamError) -> None:
        asked = self._asked.pop(request, None)
        self._sender.drop(request)
        self._meter.given_up(request, self._clock())
        if asked is not None and not asked.done.done():
            asked.done.set_exception(error)

    def _lose(self, error: MidstreamError) -> None:
        if self.lost is not None:
            return
        self.lost = error if isinstance(error, LinkError | ProtocolError) else LinkClosed(str(error))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for request in list(self._asked):
            self._fail(request, self.lost)


def _wire(asked: _Asked, came_s: float) -> WireTimes:
    """The request's seconds as links tell them: room for it, the way up, the far end's work, the way down.

    What its own queue here takes before the first byte counts as the way up: the wire was busy with others.
    """
    assert asked.answer is not None
    arrived_s = asked.arrived_s or asked.head_s
    server_s = min((asked.answer.wait_us + asked.answer.compute_us) / 1e6, max(0.0, came_s - arrived_s))
    return WireTimes(
        connect_s=max(0.0, asked.posted_s - asked.asked_s - asked.encode_s),
        send_s=max(0.0, arrived_s - asked.posted_s),
        server_s=server_s,
        receive_s=max(0.0, came_s - arrived_s - server_s),
    )


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
