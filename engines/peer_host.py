"""Serves text engines over frame streams: the host's half of the handoff protocol (docs/handoff-protocol.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from attrs import define, field

from engines.peer_session import Attachment, HostedStream
from engines.port import TextEngine
from links.port import FrameStream
from protocol.clock import Clock
from protocol.errors import BadRequest, Full, LinkError, MidstreamError, NotAllowed, NotFound, ProtocolError
from protocol.events import Emit, ignore
from protocol.handoff import (
    NO_STREAM,
    Ack,
    Capabilities,
    Embed,
    Extend,
    Frame,
    Framed,
    Prepare,
    Query,
    Resume,
    Start,
    Stop,
    TokenIds,
    Tokenize,
    Vectors,
)
from protocol.refusals import refusal

MAX_STREAMS_PER_CONNECTION = 32
MAX_QUESTIONS = 8
MAX_STREAMS = 256

EngineFor = Callable[[str], TextEngine]
Admit = Callable[[Prepare], None]


@define(eq=False)
class HostedStreams:
    """The streams of one host. They outlive their connections by `keep_s`, so it is shared by all of them.

    keep_s: how long a stream waits for its owner to come back. idle_s: longest time between prepare and start.
    """

    keep_s: float = 10.0
    idle_s: float = 120.0
    clock: Clock = time.monotonic
    open: dict[bytes, tuple[str, HostedStream]] = field(factory=dict)

    async def close(self) -> None:
        """End every stream."""
        for _, stream in tuple(self.open.values()):
            await stream.end()


async def serve_stream(
    engine_for: EngineFor,
    stream: FrameStream,
    admit: Admit | None = None,
    *,
    streams: HostedStreams | None = None,
    owner: str = "",
    emit: Emit = ignore,
) -> None:
    """Serve one connection until it ends, then close it.

    Args:
        engine_for: the engine of a model name; raises NotFound.
        admit: raises NotAllowed or Full for a Prepare that may not run; None admits all.
        streams: shared by the connections of a host, so that a stream survives the loss of one; None ends all
            streams with this connection.
        owner: who is at the other end; only the same owner may resume a stream.
        emit: told of each stream that is over.
    """
    shared = streams is not None
    connection = _Connection(engine_for, stream, admit, streams or HostedStreams(), owner, emit)
    lost = True
    try:
        lost = not await connection.serve()
    finally:
        await connection.finish(keep=shared and lost)


class _Connection:
    def __init__(
        self, engine_for: EngineFor, frames: FrameStream, admit: Admit | None, streams: HostedStreams, owner: str,
        emit: Emit,
    ) -> None:  # fmt: skip
        self._engine_for = engine_for
        self._attachment = Attachment(frames)
        self._admit = admit
        self._streams = streams
        self._owner = owner
        self._emit = emit
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> bool:
        """Take frames until the end; True when the peer left in order or broke the protocol."""
        try:
            while (framed := await self._attachment.receive()) is not None:
                await self._take(framed)
        except LinkError:
            return False
        except ProtocolError as err:
            await self._say(NO_STREAM, 0, refusal(err))
        return True

    async def finish(self, *, keep: bool) -> None:
        for task in tuple(self._answering):
            task.cancel()
        for _, hosted in tuple(self._streams.open.values()):
            if hosted.attachment is self._attachment:
                if keep:
                    hosted.detach()
                else:
                    await hosted.end()
        await self._attachment.frames.close()

    async def _take(self, framed: Framed) -> None:
        frame, known = framed.frame, self._streams.open.get(framed.stream)
        if isinstance(frame, Prepare):
            await self._refusing(framed, self._prepare(framed, frame))
        elif isinstance(frame, Resume):
            await self._refusing(framed, self._resume(framed, frame))
        elif isinstance(frame, Query | Tokenize | Embed):
            await self._ask(framed)
        elif known is None or framed.epoch != known[1].epoch or known[1].attachment is not self._attachment:
            # Late frames of a stream that is over or has moved to another connection.
            return
        elif isinstance(frame, Extend | Start):
            known[1].command(frame)
        elif isinstance(frame, Ack):
            known[1].acknowledge(frame)
        elif isinstance(frame, Stop):
            await known[1].end()
        else:
            raise ProtocolError(f"a host takes no {type(frame).__name__}", field="type")

    async def _prepare(self, framed: Framed, frame: Prepare) -> None:
        streams = self._streams
        if frame.hop > 0:
            raise NotAllowed("this request was passed on already", next_step="ask a peer that runs the model itself")
        if framed.stream in streams.open or framed.stream == NO_STREAM:
            raise BadRequest("this stream id is taken", field="stream")
        mine = sum(hosted.attachment is self._attachment for _, hosted in streams.open.values())
        if mine >= MAX_STREAMS_PER_CONNECTION or len(streams.open) >= MAX_STREAMS:
            raise Full(f"{len(streams.open)} streams are open here", retry_after_s=1.0)
        if self._admit is not None:
            self._admit(frame)
        engine = self._engine_for(frame.request.model)
        hosted = HostedStream(
            framed.stream,
            framed.epoch,
            engine,
            frame,
            self._attachment,
            keep_s=streams.keep_s,
            idle_s=streams.idle_s,
            on_end=lambda over: self._forget(over),
            clock=streams.clock,
        )
        streams.open[framed.stream] = (self._owner, hosted)

    async def _resume(self, framed: Framed, frame: Resume) -> None:
        owner, hosted = self._streams.open.get(framed.stream, ("", None))
        if hosted is None or owner != self._owner:
            raise NotFound("no such stream is kept here", field="stream")
        hosted.resume(framed.epoch, frame.next, self._attachment)

    def _forget(self, hosted: HostedStream) -> None:
        self._streams.open.pop(hosted.stream, None)
        self._emit(hosted.served())

    async def _refusing(self, framed: Framed, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except MidstreamError as err:
            await self._say(framed.stream, framed.epoch, refusal(err))

    async def _ask(self, framed: Framed) -> None:
        if len(self._answering) >= MAX_QUESTIONS:
            await self._say(framed.stream, framed.epoch, refusal(Full("too many questions wait", retry_after_s=1.0)))
            return
        task = asyncio.create_task(self._answer(framed), name="peer-answer")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, framed: Framed) -> None:
        try:
            answer = await self._answer_to(framed.frame)
        except MidstreamError as err:
            answer = refusal(err)
        await self._say(framed.stream, framed.epoch, answer)

    async def _answer_to(self, frame: Frame) -> Frame:
        if isinstance(frame, Tokenize):
            return TokenIds(await self._engine_for(frame.model).tokenize(frame.data))
        if isinstance(frame, Embed):
            vectors = await self._engine_for(frame.model).embed(frame.texts)
            return Vectors(tuple(tuple(vector) for vector in vectors))
        assert isinstance(frame, Query)
        engine = self._engine_for(frame.model)
        capabilities, load = await engine.capabilities(), engine.load()
        return Capabilities(capabilities, running=load.running, waiting=load.waiting, wait_s=load.wait_s)

    async def _say(self, stream: bytes, epoch: int, frame: Frame) -> None:
        """Send, unless the connection is gone: its reader finds out by itself."""
        try:
            await self._attachment.send(stream, epoch, frame)
        except LinkError:
            return
        except MidstreamError as err:
            await self._say(stream, epoch, refusal(err))
