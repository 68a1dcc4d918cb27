"""TextEngine over a FrameStream: the cloud, another device and a worker process are this one remote twin.

The side that holds the client owns the stream: it grants epochs, one more on every attachment, and takes tokens only
of the current epoch and only if they begin at the next index. Described in docs/handoff-protocol.md.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from attrs import evolve

from engines.peer_connection import PeerConnection
from engines.port import EngineLoad
from links.port import FrameStream
from protocol.clock import Clock
from protocol.errors import BadRequest, EngineError, LinkClosed, LinkError, LinkTimeout, MidstreamError, ProtocolError
from protocol.handoff import (
    Ack,
    Capabilities,
    Embed,
    Extend,
    Finish,
    Frame,
    Framed,
    Prepare,
    Query,
    Ready,
    Refuse,
    Resume,
    Start,
    Stop,
    TokenIds,
    Tokenize,
    Tokens,
    Vectors,
)
from protocol.refusals import as_error
from protocol.text import FinishReason, TextCapabilities, TextRequest, Token, Usage

CALL_S = 30.0
EXTEND_CHUNK_TOKENS = 512
_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}

OpenStream = Callable[[], Awaitable[FrameStream]]
A = TypeVar("A", Capabilities, TokenIds, Vectors, Refuse)


class PeerEngine:
    """Generates at a peer that runs engines.peer_host.

    Args:
        open_stream: opens a connection; called again after a loss.
        model: the model's name at the peer; empty takes the request's.
        vocabulary: hash of the vocabulary that the ids in prefixes come from; None when the sender does not know.
        hop: 0 where the stream has its owner; 1 in a house that passes a foreign request on (hosts refuse those).
        resume_s: how long a started stream tries to reach the peer again after a loss; 0 gives up at once.
        silence_s: a started stream that hears nothing for so long, with credit left, raises LinkTimeout.
        lost: shapes the error of a lost connection (a worker process makes it EngineCrashed).
    """

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        name: str = "peer",
        model: str = "",
        vocabulary: str | None = None,
        hop: int = 0,
        resume_s: float = 1.0,
        silence_s: float = 60.0,
        lost: Callable[[MidstreamError], MidstreamError] = lambda err: err,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.model = model
        self.hop = hop
        self.vocabulary = vocabulary
        self.resume_s = resume_s
        self.silence_s = silence_s
        self.lost = lost
        self.clock = clock
        self._open_stream = open_stream
        self._connection: PeerConnection | None = None
        self._connecting = asyncio.Lock()
        self._open: set[PeerContinuation] = set()
        self._load = EngineLoad(running=0, waiting=0, wait_s=0.0)
        self._round_trips: deque[float] = deque(maxlen=16)
        self._capabilities: TextCapabilities | None = None
        self._parent: PeerEngine | None = None
        self._asked_model = model
        self._closed = False

    def for_model(self, model: str) -> PeerEngine:
        """The same peer, over the same connection, for one of its models; closing it leaves the connection open."""
        view = PeerEngine(
            self._open_stream,
            name=self.name,
            model=model,
            vocabulary=self.vocabulary,
            hop=self.hop,
            resume_s=self.resume_s,
            silence_s=self.silence_s,
            lost=self.lost,
            clock=self.clock,
        )
        view._parent = self
        return view

    @property
    def rtt_s(self) -> float | None:
        """Least of the last round trips seen by acknowledgements (each holds up to one token time); None before any."""
        return min(self._round_trips, default=None)

    async def capabilities(self) -> TextCapabilities:
        if self._capabilities is None:
            await self.refresh()
        assert self._capabilities is not None
        return self._capabilities

    async def refresh(self) -> None:
        """Ask the peer again what it can do and how loaded it is."""
        answer = await self._ask(Query(self._asked_model), Capabilities)
        self._capabilities = answer.capabilities
        self._load = EngineLoad(running=answer.running, waiting=answer.waiting, wait_s=answer.wait_s)

    async def prepare(self, request: TextRequest, deadline_s: float) -> PeerContinuation:
        if self.model:
            request = evolve(request, model=self.model)
        # Without a model of its own, questions are about the model that was asked for last.
        self._asked_model = request.model
        try:
            async with asyncio.timeout(deadline_s):
                continuation = PeerContinuation(self, await self.connection(), request)
                self._open.add(continuation)
                try:
                    await continuation.prepare(deadline_s)
                except BaseException:
                    await continuation.close()
                    raise
        except TimeoutError as err:
            raise LinkTimeout(f"{self.name} was not ready within {deadline_s:.1f} s") from err
        return continuation

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return (await self._ask(Tokenize(self._asked_model, data), TokenIds)).ids

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        vectors = (await self._ask(Embed(self._asked_model, tuple(texts)), Vectors)).vectors
        if len(vectors) != len(texts):
            raise ProtocolError(f"{self.name} sent {len(vectors)} vectors for {len(texts)} texts", field="vectors")
        return vectors

    async def answers(self, within_s: float) -> bool:
        """Whether the other side takes frames at all, whatever its engine does."""
        try:
            async with asyncio.timeout(within_s):
                await self._ask(Resume(0), Refuse)
        except (TimeoutError, LinkTimeout):
            return False
        except MidstreamError:
            return True  # there is no such stream, or the connection's loss is told to whoever needs it
        return True

    def load(self) -> EngineLoad:
        """The peer's load when last heard; at least what runs from here."""
        return evolve(self._load, running=max(self._load.running, len(self._open)))

    async def close(self) -> None:
        self._closed = True
        for continuation in tuple(self._open):
            await continuation.close()
        async with self._connecting:
            connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def connection(self) -> PeerConnection:
        """The open connection, or a new one. Raises LinkError."""
        if self._parent is not None and not self._closed:
            return await self._parent.connection()
        async with self._connecting:
            if self._closed:
                raise EngineError(f"the engine of {self.name} was closed")
            if self._connection is not None and self._connection.lost is None:
                return self._connection
            old, self._connection = self._connection, None
            if old is not None:
                await old.close()
            self._connection = PeerConnection(await self._open_stream())
            return self._connection

    def forget(self, continuation: PeerContinuation) -> None:
        """A continuation closed itself."""
        self._open.discard(continuation)

    def lean(self, tokens: Sequence[Token]) -> tuple[Token, ...]:
        """An answer's tokens as they cross: ids alone where the peer has this vocabulary, so that it knows the rest."""
        theirs = None if self._capabilities is None else self._capabilities.vocabulary
        if theirs is None or theirs != self.vocabulary or any(token.id is None for token in tokens):
            return tuple(tokens)
        return tuple(Token(index=token.index, id=token.id, data=b"") for token in tokens)

    def round_trip(self, seconds: float) -> None:
        """Something came back after so long, the peer's own work taken out."""
        self._round_trips.append(seconds)
        if self._parent is not None:
            self._parent.round_trip(seconds)

    def now_ms(self) -> int:
        """Monotonic milliseconds for acks, never 0."""
        return int(self.clock() * 1000) + 1

    async def _ask(self, question: Frame, answer: type[A]) -> A:
        connection = await self.connection()
        stream = connection.new_stream()
        answered: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

        def on_frame(framed: Framed) -> None:
            if not answered.done():
                answered.set_result(framed.frame)

        def on_lost(err: MidstreamError) -> None:
            if not answered.done():
                answered.set_exception(self.lost(err))

        connection.attach(stream, on_frame, on_lost)
        try:
            connection.post(stream, 1, question)
            async with asyncio.timeout(CALL_S):
                frame = await answered
        except TimeoutError as err:
            raise LinkTimeout(f"{self.name} did not answer within {CALL_S:.0f} s") from err
        finally:
            connection.detach(stream)
            if answered.done() and not answered.cancelled():
                answered.exception()
        if isinstance(frame, Refuse):
            raise as_error(frame)
        if not isinstance(frame, answer):
            raise ProtocolError(f"{self.name} answered with {type(frame).__name__}", field="type")
        return frame


class PeerContinuation:
    """Continuation at a peer."""

    def __init__(self, engine: PeerEngine, connection: PeerConnection, request: TextRequest) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.usage: Usage | None = None
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self._engine = engine
        self._connection = connection
        self._request = request
        self._stream = connection.new_stream()
        self._epoch = 1
        self._next = len(request.prefix)
        self._prefilled_to = -1
        self._acknowledged = self._next - 1
        self._at = self._next
        self._ahead_tokens = 1
        self._started = False
        self._closed = False
        self._arrived: deque[Token] = deque()
        self._early: tuple[Token, ...] = ()
        self._news = asyncio.Event()
        self._error: MidstreamError | None = None
        self._lost: MidstreamError | None = None
        self._finished = False
        connection.attach(self._stream, self._take, self._on_lost)

    async def prepare(self, deadline_s: float) -> None:
        """Ask for admission and wait until the peer is ready; the caller bounds the time."""
        engine = self._engine
        request = evolve(self._request, prefix=engine.lean(self._request.prefix))
        asked_s = engine.clock()
        self._post(
            Prepare(
                request,
                deadline_s,
                vocabulary=engine.vocabulary,
                hop=engine.hop,
                traceparent=request.traceparent,
                early=True,
            )
        )
        await self._ready(self._next)
        # What the peer did not spend on it was the way there and back.
        engine.round_trip(max(0.0, engine.clock() - asked_s - self.prefill_s))

    async def extend(self, tokens: Sequence[Token]) -> None:
        """Returns when the peer has read what was sent before, so that a start need not wait for a round trip more."""
        if self._started:
            raise RuntimeError("extend() after start()")
        self._early = ()
        before = self._next
        for at in range(0, len(tokens), EXTEND_CHUNK_TOKENS):
            part = tuple(tokens[at : at + EXTEND_CHUNK_TOKENS])
            if part[0].index != self._next:
                raise BadRequest(f"token {part[0].index} stands where {self._next} belongs", field="tokens")
            self._next += len(part)
            self._post(Extend(part[0].index, self._engine.lean(part)))
        self._acknowledged = self._next - 1
        try:
            async with asyncio.timeout(self._engine.silence_s):
                await self._ready(before)
        except TimeoutError as err:
            raise LinkTimeout(f"{self._engine.name} did not read the answer so far") from err

    def spoken(self) -> Token | None:
        """The token that came with Ready."""
        return self._early[0] if self._early else None

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        if self._started:
            raise RuntimeError("start() is called once")
        if at != self._next:
            raise BadRequest(f"start at {at}, but the prefix has {self._next} tokens", field="at")
        self._started, self._at, self._ahead_tokens = True, at, max(1, ahead_tokens)
        self._arrive(self._early)
        if self._lost is None and self._error is None:
            self._post(Start(at, self._ahead_tokens))
        return self._tokens()

    def acknowledge(self, index: int) -> None:
        if index <= self._acknowledged or self._closed:
            return
        self._acknowledged = min(index, self._next - 1)
        if self._lost is None and not self._finished:
            self._post(Ack(self._acknowledged, self._engine.now_ms()))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lost is None and self._error is None:
            if self._finished:
                self._post(Ack(self._next - 1, self._engine.now_ms()))
            else:
                self._post(Stop(self._next))
        self._connection.detach(self._stream)
        self._engine.forget(self)
        self._news.set()

    async def _tokens(self) -> AsyncIterator[Token]:
        try:
            while not self._closed:
                while self._arrived:
                    token = self._arrived.popleft()
                    yield token
                    if token.finish is not None or self._closed:
                        return
                if self._error is not None:
                    raise self._error
                if self._lost is not None:
                    await self._resume()
                    continue
                if self._finished:
                    raise ProtocolError(f"{self._engine.name} ended the answer without a finish mark", field="finish")
                await self._wait()
        finally:
            await self.close()

    async def _wait(self) -> None:
        """Until something arrives; silence counts only while the peer has credit to send."""
        waits = self._next - self._acknowledged > self._ahead_tokens
        self._news.clear()
        try:
            async with asyncio.timeout(None if waits else self._engine.silence_s):
                await self._news.wait()
        except TimeoutError as err:
            raise LinkTimeout(f"{self._engine.name} said nothing for {self._engine.silence_s:.0f} s") from err

    async def _resume(self) -> None:
        """Attach again under a new epoch, or raise what the connection was lost by."""
        assert self._lost is not None
        lost, engine = self._engine.lost(self._lost), self._engine
        if engine.resume_s <= 0:
            raise lost
        try:
            async with asyncio.timeout(engine.resume_s):
                self._connection = await engine.connection()
        except (LinkError, TimeoutError) as err:
            raise lost from err
        self._epoch += 1
        self._lost = None
        self._connection.attach(self._stream, self._take, self._on_lost)
        self._post(Resume(self._next))
        # The first Start and the last Ack may have died with the old connection; both may be repeated.
        self._post(Start(self._at, self._ahead_tokens))
        self._post(Ack(self._acknowledged, engine.now_ms()))

    async def _ready(self, to: int) -> None:
        while self._prefilled_to < to:
            if self._error is not None:
                raise self._error
            if self._lost is not None:
                raise self._engine.lost(self._lost)
            if self._closed:
                raise LinkClosed("the continuation was closed")
            self._news.clear()
            await self._news.wait()

    def _post(self, frame: Frame) -> None:
        try:
            self._connection.post(self._stream, self._epoch, frame)
        except MidstreamError as err:
            self._on_lost(err)

    def _on_lost(self, err: MidstreamError) -> None:
        if isinstance(err, LinkError):
            self._lost = err
        else:
            self._error = err
        self._news.set()

    def _take(self, framed: Framed) -> None:
        """A frame from the peer. Stale epochs and runs that do not begin at the next index are dropped."""
        if framed.epoch != self._epoch or self._closed:
            return
        frame = framed.frame
        if isinstance(frame, Tokens):
            self._take_tokens(frame)
        elif isinstance(frame, Ready):
            self._prefilled_to = max(self._prefilled_to, frame.prefilled_to)
            self.prompt_tokens, self.cached_tokens = frame.prompt_tokens, frame.cached_tokens
            self.queue_s, self.prefill_s = frame.queue_s, frame.prefill_s
        elif isinstance(frame, Refuse):
            self._error = as_error(frame)
        elif isinstance(frame, Finish):
            self._take_finish(frame)
        self._news.set()

    def _take_tokens(self, frame: Tokens) -> None:
        if frame.echo_ms:
            self._engine.round_trip(max(0.0, (self._engine.now_ms() - frame.echo_ms) / 1000))
        if frame.first != self._next or self._finished:
            return
        if not self._started:
            self._take_early(frame.tokens)
            return
        if self._next + len(frame.tokens) - 1 - self._acknowledged > self._ahead_tokens + 1:
            self._error = ProtocolError(f"{self._engine.name} sent tokens beyond its credit", field="tokens")
            return
        self._arrive(frame.tokens)

    def _take_early(self, tokens: tuple[Token, ...]) -> None:
        """One token may come with Ready; it counts from start() on, and extend() forgets it."""
        if len(tokens) != 1 or tokens[0].finish is not None:
            self._error = ProtocolError(f"{self._engine.name} sent tokens before the start", field="tokens")
            return
        self._early = tokens

    def _arrive(self, tokens: Sequence[Token]) -> None:
        now_s = self._engine.clock()
        self._arrived.extend(evolve(token, at_s=now_s) for token in tokens)
        self._next += len(tokens)
        self._finished = self._finished or any(token.finish is not None for token in tokens)

    def _take_finish(self, frame: Finish) -> None:
        self.usage = frame.usage
        if not self._finished:
            self._finished = True
            self._arrived.append(Token(index=self._next, id=None, data=b"", finish=_FINISHES.get(frame.reason, "stop")))
