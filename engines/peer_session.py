"""The host's end of one handoff stream: prepare, extend, generate, keep what is not acknowledged, attach again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence

from attrs import evolve

from engines.port import Continuation, SpokenContinuation, TextEngine
from links.port import FrameStream
from protocol.clock import Clock
from protocol.errors import BadRequest, EngineError, Full, LinkTimeout, MidstreamError
from protocol.events import HandoffServed
from protocol.handoff import Ack, Extend, Finish, Frame, Framed, Prepare, Ready, Refuse, Start, Tokens
from protocol.handoff_headers import HandoffReader, HandoffWriter
from protocol.refusals import refusal
from protocol.text import Token, Usage

MAX_AHEAD_TOKENS = 4096
MAX_WAITING_COMMANDS = 64
MAX_PREPARE_S = 300.0
MAX_RUN_TOKENS = 256
"""Tokens per frame when a slow link has let many gather."""

_log = logging.getLogger("midstream.engines.peer")


class Attachment:
    """One connection as its streams see it: whole frames, one at a time."""

    def __init__(self, frames: FrameStream) -> None:
        self.frames = frames
        self._reader, self._writer = HandoffReader(), HandoffWriter()
        self._turn = asyncio.Lock()

    async def receive(self) -> Framed | None:
        """The next frame, None at the end. Raises LinkError, ProtocolError."""
        data = await self.frames.receive()
        return None if data is None else self._reader.decode(data)

    async def send(self, stream: bytes, epoch: int, frame: Frame) -> None:
        """Waits for room. Raises LinkError; a frame that cannot be sent leaves the connection as it was."""
        async with self._turn:
            # Headers refer to what was sent before, so they are made in the order of sending.
            await self.frames.send(self._writer.encode(stream, epoch, frame))
            self._writer.sent()


class HostedStream:
    """One stream. All its frames go out in `_send_all`; all its work on the engine is done in `_work`.

    Args:
        keep_s: how long it outlives its connection, and the end of its generation.
        idle_s: how long it may stay prepared without a start.
        on_end: called once, when it is over.
    """

    def __init__(
        self,
        stream: bytes,
        epoch: int,
        engine: TextEngine,
        prepare: Prepare,
        attachment: Attachment,
        *,
        keep_s: float,
        idle_s: float,
        on_end: Callable[[HostedStream], None],
        clock: Clock,
    ) -> None:
        self.stream = stream
        self.epoch = epoch
        self.attachment: Attachment | None = attachment
        self._engine = engine
        self._prepare = prepare
        self._keep_s = keep_s
        self._idle_s = idle_s
        self._on_end = on_end
        self._clock = clock
        self._commands: asyncio.Queue[Extend | Start] = asyncio.Queue(MAX_WAITING_COMMANDS)
        self._continuation: Continuation | None = None
        self._strips_ids = False
        self._made_to = len(prepare.request.prefix)
        self._early_to = self._made_to
        self._early_ack: Ack | None = None
        self._kept: deque[Token] = deque()
        self._send_next = self._made_to
        self._acknowledged = self._made_to - 1
        self._echo_ms = 0
        self._notices: deque[Frame] = deque()
        self._last: Frame | None = None
        self._outgoing = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self._begun_s = clock()
        self._first = self._made_to
        self._tasks = [
            asyncio.create_task(self._work(), name="hosted-work"),
            asyncio.create_task(self._send_all(), name="hosted-send"),
        ]

    def command(self, frame: Extend | Start) -> None:
        """Queue work; a flood ends the stream."""
        try:
            self._commands.put_nowait(frame)
        except asyncio.QueueFull:
            self._conclude(refusal(Full("too many frames wait on this stream", retry_after_s=1.0)))

    def acknowledge(self, frame: Ack) -> None:
        """Credit for the engine; what is acknowledged is forgotten."""
        self._echo_ms = max(0, frame.sent_ms)
        if self._made_to <= frame.index < self._early_to:
            # Of the token that went out with Ready, which the engine has not handed over yet.
            self._early_ack = frame
        if frame.index >= self._made_to or frame.index <= self._acknowledged:
            return
        self._acknowledged = frame.index
        self._forget_below(frame.index + 1)
        if self._continuation is not None:
            self._continuation.acknowledge(frame.index)
        self._outgoing.set()

    def resume(self, epoch: int, after: int, attachment: Attachment) -> None:
        """Go on over another connection, from index `after`. Raises BadRequest when that cannot be."""
        if epoch <= self.epoch:
            raise BadRequest(f"epoch {epoch} is not newer than {self.epoch}", field="epoch")
        oldest = self._kept[0].index if self._kept else self._made_to
        newest = max(self._made_to, self._early_to)
        if not oldest <= after <= newest:
            raise BadRequest(f"tokens from {oldest} to {newest} are here, not {after}", field="next")
        self.epoch, self.attachment = epoch, attachment
        self._forget_below(after)
        self._send_next = after
        self._notices = deque(notice for notice in self._notices if not isinstance(notice, Tokens))
        self._stop_timer()
        self._outgoing.set()

    def detach(self) -> None:
        """The connection is gone: wait for another one, a bounded time."""
        self.attachment = None
        self._expire_after(self._keep_s)

    async def end(self) -> None:
        """Cancel whatever runs and free it; idempotent."""
        if self._over:
            return
        self._over = True
        self._stop_timer()
        current = asyncio.current_task()
        others = [task for task in self._tasks if task is not current]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        if self._continuation is not None:
            await self._continuation.close()
        self._on_end(self)

    def served(self) -> HandoffServed:
        """What became of it, once it is over."""
        last, now_s = self._last, self._clock()
        status = last.code if isinstance(last, Refuse) else "stopped" if last is None else "ok"
        return HandoffServed(
            at_s=now_s,
            traceparent=self._prepare.traceparent,
            model=self._prepare.request.model,
            status=status,
            prompt_tokens=self._continuation.prompt_tokens if self._continuation is not None else 0,
            first=self._first,
            tokens=self._made_to - self._first,
            total_s=now_s - self._begun_s,
        )

    async def _work(self) -> None:
        try:
            await self._admit()
            start = await self._await_start()
            await self._generate(start)
        except MidstreamError as err:
            self._conclude(refusal(err))
        except Exception:  # noqa: BLE001 - a bug in an engine must reach the peer as an answer, and the log in full
            _log.exception("a hosted stream failed")
            self._conclude(refusal(EngineError("the peer's engine failed")))

    async def _admit(self) -> None:
        prepare, began_s = self._prepare, self._clock()
        mine = (await self._engine.capabilities()).vocabulary
        self._strips_ids = prepare.vocabulary is not None and prepare.vocabulary != mine
        request = evolve(prepare.request, prefix=tuple(self._known(prepare.request.prefix)))
        queue_s = self._engine.load().wait_s
        deadline_s = min(max(prepare.deadline_s, 0.0), MAX_PREPARE_S)
        self._continuation = await self._engine.prepare(request, deadline_s)
        self._notify_ready(mine, min(queue_s, self._clock() - began_s), self._clock() - began_s)

    async def _await_start(self) -> Start:
        assert self._continuation is not None
        mine = (await self._engine.capabilities()).vocabulary
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    frame = await self._commands.get()
            except TimeoutError as err:
                raise LinkTimeout(f"no start within {self._idle_s:.0f} s") from err
            began_s = self._clock()
            if isinstance(frame, Start):
                if frame.at != self._made_to:
                    raise BadRequest(f"start at {frame.at}, but the prefix has {self._made_to} tokens", field="at")
                self._first = frame.at
                return frame
            if frame.first != self._made_to:
                raise BadRequest(f"extend at {frame.first}, but the prefix has {self._made_to} tokens", field="first")
            await self._continuation.extend(self._known(frame.tokens))
            self._made_to += len(frame.tokens)
            self._acknowledged = self._made_to - 1
            self._notify_ready(mine, 0.0, self._clock() - began_s)

    async def _generate(self, start: Start) -> None:
        continuation = self._continuation
        assert continuation is not None
        ahead_tokens = min(max(1, start.ahead_tokens), MAX_AHEAD_TOKENS)
        marks = 0
        async with contextlib.aclosing(continuation.start(start.at, ahead_tokens)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                if token.index != self._made_to:
                    raise EngineError(f"the engine made token {token.index} where {self._made_to} belongs")
                self._kept.append(token)
                self._made_to += 1
                self._outgoing.set()
                if self._early_ack is not None:
                    ack, self._early_ack = self._early_ack, None
                    self.acknowledge(ack)
                if token.finish is not None:
                    marks = 0 if token.data else 1
                    usage = Usage(continuation.prompt_tokens, self._made_to - marks, continuation.cached_tokens)
                    self._conclude(Finish(self._made_to - marks, token.finish, usage))
                    return
        raise EngineError("the engine ended the answer without a finish mark")

    async def _send_all(self) -> None:
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            attachment = self.attachment
            if attachment is None:
                continue
            try:
                await self._send_waiting(attachment)
            except MidstreamError:
                # The reader of that connection sees the loss too and detaches; tokens stay until then.
                continue
            if self._last is not None and (isinstance(self._last, Refuse) or not self._kept):
                await self.end()
                return

    async def _send_waiting(self, attachment: Attachment) -> None:
        while self._notices:
            await attachment.send(self.stream, self.epoch, self._notices[0])
            self._notices.popleft()
        while run := self._run():
            epoch, echo_ms, self._echo_ms = self.epoch, self._echo_ms, 0
            await attachment.send(self.stream, epoch, Tokens(run[0].index, run, echo_ms))
            if epoch == self.epoch:
                self._send_next = max(self._send_next, run[-1].index + 1)
                if self._last is not None and self._send_next == self._made_to:
                    await attachment.send(self.stream, epoch, self._last)
            else:
                return
        if isinstance(self._last, Refuse):
            await attachment.send(self.stream, self.epoch, self._last)

    def _run(self) -> tuple[Token, ...]:
        """The tokens to send next, empty when all went out in this epoch."""
        if not self._kept:
            return ()
        skip = max(0, self._send_next - self._kept[0].index)
        count = min(len(self._kept) - skip, MAX_RUN_TOKENS)
        return tuple(self._kept[skip + place] for place in range(count))

    def _notify_ready(self, vocabulary: str | None, queue_s: float, prefill_s: float) -> None:
        assert self._continuation is not None
        prompt, cached = self._continuation.prompt_tokens, self._continuation.cached_tokens
        self._notices.append(Ready(self._made_to, vocabulary, queue_s, prefill_s, prompt, cached))
        self._send_next = self._early_to = self._made_to
        token = self._continuation.spoken() if isinstance(self._continuation, SpokenContinuation) else None
        if token is not None and self._prepare.early:
            self._notices.append(Tokens(token.index, (token,)))
            self._send_next = self._early_to = token.index + 1
        self._outgoing.set()

    def _known(self, tokens: Sequence[Token]) -> Sequence[Token]:
        if not self._strips_ids:
            return tokens
        if any(not token.data for token in tokens):
            raise BadRequest("the answer so far came as ids of another vocabulary alone", field="vocabulary")
        return [evolve(token, id=None) for token in tokens]

    def _conclude(self, last: Frame) -> None:
        self._last = self._last or last
        self._outgoing.set()
        self._expire_after(self._keep_s)

    def _forget_below(self, index: int) -> None:
        while self._kept and self._kept[0].index < index:
            self._kept.popleft()

    def _expire_after(self, seconds: float) -> None:
        self._stop_timer()
        if not self._over:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._ending = asyncio.create_task(self.end(), name="hosted-end")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
