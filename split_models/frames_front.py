"""The front door for pipelined requests: tensor frames over a frame stream, beside OIP over HTTP (split_models.front).

The same service answers, so admission and errors are the same. A request that is cancelled or whose stream ends leaves
the queue. What one stream may have here at once is bounded and told in the first frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from functools import partial

from attrs import define, field, frozen

from engines.aside import aside
from engines.frame_connection import MAX_HERE_BYTES
from engines.frame_parts import Incoming, Outgoing, pack, views_of
from engines.frame_sender import FrameSender
from links.port import FrameRoute, FrameStream, Request
from protocol import zstd
from protocol.clock import Clock
from protocol.errors import BadRequest, Full, LinkError, MidstreamError, ProtocolError
from protocol.oip import MAX_BODY_BYTES, InferRequest
from protocol.refusals import refusal
from protocol.tensor_frames import (
    NO_REQUEST,
    TENSOR_FRAMES_PATH,
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
    TensorHead,
    decode,
    encode,
    heads_of,
)
from protocol.trace import RANDOM_BYTES, entered, parsed, within
from split_models.front import MAX_DEADLINE_S
from split_models.service import Served, Service

log = logging.getLogger("midstream.split")

RETRY_AFTER_S = 0.2
"""Told to a stream that is over its bounds, which an honest asker never is."""

LAST_WORD_S = 1.0
"""For telling why a stream ends: who broke the protocol may not read any more."""


@frozen
class StreamLimits:
    """What one stream may have here at once: requests, bytes of them, and bytes of answers that have not left yet."""

    requests: int = 1_024
    max_bytes: int = MAX_BODY_BYTES
    max_answer_bytes: int = 4 * MAX_BODY_BYTES


class FramesFront:
    """Serves each frame stream until it ends; `route` is what a house mounts."""

    def __init__(self, service: Service, limits: StreamLimits | None = None) -> None:
        self._service = service
        self._limits = limits or StreamLimits()
        self.route = FrameRoute(TENSOR_FRAMES_PATH, self.handle)

    async def handle(self, request: Request, stream: FrameStream) -> None:
        """One stream, from its first frame to its end."""
        await _Stream(self._service, stream, self._limits).serve()


@define(eq=False)
class _Held:
    """One request here: its data while it arrives, then the task that answers it, then its answer on the way out."""

    ask: Ask
    incoming: Incoming
    began_s: float
    size_bytes: int
    answer_bytes: int = 0
    task: asyncio.Task[None] | None = field(default=None)


class _Stream:
    def __init__(self, service: Service, stream: FrameStream, limits: StreamLimits) -> None:
        self._service = service
        self._clock: Clock = service.clock
        self._stream = stream
        self._limits = limits
        self._sender = FrameSender(stream, credit_bytes=0)
        self._held: dict[int, _Held] = {}
        self._asked_bytes = 0
        self._answer_bytes = 0

    async def serve(self) -> None:
        limits, features = self._limits, ZSTD if zstd.available() else 0
        self._sender.say(NO_REQUEST, Hello(limits.requests, limits.max_bytes, at_us=self._now_us(), features=features))
        writing = asyncio.create_task(self._write(), name="tensor-frames-write")
        broken: ProtocolError | None = None
        try:
            while (data := await self._stream.receive()) is not None:
                self._read(data)
        except LinkError as err:
            log.debug("a stream of tensor frames ended: %s", err)
        except ProtocolError as err:
            log.info("a stream of tensor frames broke the protocol: %s", err)
            broken = err
        finally:
            tasks = [held.task for held in self._held.values() if held.task is not None]
            for task in [*tasks, writing]:
                task.cancel()
            await asyncio.gather(*tasks, writing, return_exceptions=True)
        if broken is not None:
            await self._last_word(broken)

    async def _write(self) -> None:
        try:
            await self._sender.run()
        except LinkError as err:
            log.debug("a stream of tensor frames cannot be written: %s", err)
        except MidstreamError as err:
            log.info("a stream of tensor frames is ended: %s", err)
            await self._last_word(err)
        await self._stream.close()  # which ends the reader too

    async def _last_word(self, err: MidstreamError) -> None:
        with contextlib.suppress(LinkError, TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._stream.send(encode(NO_REQUEST, refusal(err)))

    def _read(self, data: bytes) -> None:
        try:
            framed = decode(data)
        except BrokenFrame as err:
            self._forget(err.request)
            self._sender.say(err.request, refusal(err))
            return
        frame = framed.frame
        if isinstance(frame, Ask):
            self._ask(framed, frame)
        elif isinstance(frame, Data):
            held = self._held.get(framed.request)
            if held is not None and held.task is None:
                self._add(framed, held, frame.data)
        elif isinstance(frame, Cancel):
            self._forget(framed.request)
        elif isinstance(frame, Hello):
            self._sender.grant(frame.credit_bytes)
            self._sender.say(NO_REQUEST, Received(self._now_us()))
        elif isinstance(frame, Credit):
            self._sender.grant(frame.total_bytes)
        else:
            raise ProtocolError(f"a server takes no {type(frame).__name__}", field="type")

    def _ask(self, framed: TensorFramed, ask: Ask) -> None:
        incoming = Incoming(ask.tensors, ask.packed_bytes)
        if framed.request in self._held or framed.request == NO_REQUEST:
            raise ProtocolError(f"request {framed.request} is in flight already", field="request")
        if not self._fits(incoming.room_bytes):
            self._sender.say(
                framed.request, refusal(Full("this stream has too much in flight", retry_after_s=RETRY_AFTER_S))
            )
            return
        held = _Held(ask, incoming, self._clock(), incoming.room_bytes)
        self._held[framed.request] = held
        self._asked_bytes += held.size_bytes
        self._add(framed, held, ask.data)

    def _fits(self, size_bytes: int) -> bool:
        """One request always fits, whatever its size; answers that nobody reads keep further ones out."""
        limits = self._limits
        if not self._held:
            return True
        return (
            len(self._held) < limits.requests
            and self._asked_bytes + size_bytes <= limits.max_bytes
            and self._answer_bytes <= limits.max_answer_bytes
        )

    def _add(self, framed: TensorFramed, held: _Held, data: bytes | memoryview) -> None:
        try:
            if not held.incoming.add(data, framed.flags):
                return
            if not held.incoming.heads:
                raise BadRequest("a request needs at least one input", field="inputs")
        except MidstreamError as err:
            self._refuse(framed.request, err)
            return
        received = Received(self._now_us())
        # Before the news of its arrival: an answer that is there at once leaves together with it.
        held.task = asyncio.create_task(self._answer(framed.request, held), name="tensor-frames-answer")
        self._sender.say(framed.request, received)

    async def _answer(self, request: int, held: _Held) -> None:
        try:
            served, told, views = await self._served(held)
        except MidstreamError as err:
            self._refuse(request, err)
            return
        except Exception:
            log.exception("a request over tensor frames failed")
            self._refuse(request, MidstreamError("internal error", next_step="see the log of the server"))
            return
        if self._held.get(request) is not held:
            return  # it was given up meanwhile
        packed_bytes = len(views[0]) if held.ask.packed_bytes else 0
        wait_us, compute_us = round(1e6 * served.wait_s), round(1e6 * served.compute_s)
        held.answer_bytes = sum(map(len, views))
        self._answer_bytes += held.answer_bytes

        def head(data: bytes | memoryview) -> Answer:
            return Answer(served.digest, wait_us, compute_us, told, packed_bytes, data)

        self._sender.post(Outgoing(request, head, views, timed=True, on_end=partial(self._left, request, held)))

    async def _served(self, held: _Held) -> tuple[Served, tuple[TensorHead, ...], deque[memoryview]]:
        ask = held.ask
        large = bool(ask.packed_bytes) and held.incoming.size_bytes > MAX_HERE_BYTES
        self._service.find(ask.model)  # before any work on data that is for nobody
        inputs = await aside(held.incoming.tensors, large)
        left_s = ask.deadline_ms / 1000 - (self._clock() - held.began_s)
        asked = InferRequest(model=ask.model, inputs=inputs, id=ask.id[:128], binary=True)
        span = entered(ask.id, os.urandom(RANDOM_BYTES)) if parsed(ask.id) is not None else None
        with within(span):
            served = await self._service.infer(asked, min(MAX_DEADLINE_S, max(0.001, left_s)))
        told = heads_of(served.outputs)
        if not ask.packed_bytes:
            return served, told, views_of(served.outputs)
        packed = await aside(partial(pack, served.outputs), sum(head.size_bytes for head in told) > MAX_HERE_BYTES)
        return served, told, deque([memoryview(packed)])

    def _refuse(self, request: int, error: MidstreamError) -> None:
        self._drop(request)
        self._sender.say(request, refusal(error))

    def _forget(self, request: int) -> None:
        """The asker left: whatever stage its request is in, it ends now."""
        held = self._drop(request)
        self._sender.drop(request)
        if held is not None and held.task is not None:
            held.task.cancel()

    def _left(self, request: int, held: _Held, sent_bytes: int) -> None:
        if self._held.get(request) is held:  # a number that was given up may be in use again
            self._drop(request)

    def _drop(self, request: int) -> _Held | None:
        held = self._held.pop(request, None)
        if held is not None:
            self._asked_bytes -= held.size_bytes
            self._answer_bytes -= held.answer_bytes
        return held

    def _now_us(self) -> int:
        return round(1e6 * self._clock())
