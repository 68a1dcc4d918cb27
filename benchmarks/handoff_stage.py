"""The stage of the handoff bench: engines in processes that can be killed, a shaped link, what each side made."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from attrs import define, evolve, field, frozen

from benchmarks.handoff_again import Heard, HeardLlamaServer, forget
from engines.peer import PeerEngine
from engines.peer_host import HostedStreams, serve_stream
from engines.port import Continuation, EngineLoad, TextEngine
from engines.worker import WorkerEngine
from engines.wrapping import WrappedContinuation, WrappedTextEngine
from links.http import HttpLink
from links.http_server import serve
from links.port import FrameRoute, FrameStream, Request
from links.shaped import Loss, ShaperProxy
from protocol.handoff import Extend, Prepare, encode_body
from protocol.handoff_headers import HandoffReader, header_bytes
from protocol.text import Sampling, TextCapabilities, TextRequest, Token

PATH = "/handoff"
CONTEXT_TOKENS = 512
PREPARE_S = 30.0
RESUME_S = 0.5
LOSS_RATIO = 0.01
RETRANSMIT_S = 0.2
"""Least time after which TCP sends a lost segment again (RFC 6298 as Linux sets it); a round trip comes on top."""

Binding = Literal["llama_server", "llama_cpp"]
Phase = Literal["prepare", "extend", "cut-over", "after"]


@define
class Generation:
    """What one continuation of an engine was given, and what it made."""

    prefix: list[Token]
    made: list[Token] = field(factory=list)

    @property
    def at(self) -> int:
        """Index of the first token it makes."""
        return len(self.prefix)


class Actor:
    """One engine with one model in a process of its own: a TextEngine that records, dies and comes back."""

    slots = 2

    def __init__(self, binding: Binding, model: str, file: Path) -> None:
        self.name = f"{binding}:{model}"
        self.model = model
        self.tokens_per_s = 0.0
        self.vocabulary: str | None = None
        self.generations: list[Generation] = []
        self._given: list[Heard] = []
        self._binding = binding
        self._file = file
        self._engine = self._make()
        self._killed = False

    def _make(self) -> WorkerEngine | HeardLlamaServer:
        sizes = {"context_tokens": CONTEXT_TOKENS, "threads": 1, "slots": self.slots}
        if self._binding == "llama_server":
            return HeardLlamaServer(self._file, name=self.name, **sizes)
        settings = {"model_path": str(self._file), **sizes}
        return WorkerEngine("engines.llama_cpp:EmbeddedLlamaCpp", settings, name=self.name)

    @property
    def heard(self) -> list[Heard]:
        """What its engine was given to read since it forgot."""
        return self._engine.heard if isinstance(self._engine, HeardLlamaServer) else self._given

    async def forget(self) -> None:
        """Have nothing of any answer in the engine's cache."""
        await forget(self)
        self.heard.clear()

    def kill(self) -> None:
        """SIGKILL its process."""
        if (process_id := self._engine.process_id) is not None and not self._killed:
            os.kill(process_id, signal.SIGKILL)
            self._killed = True

    async def revive(self) -> None:
        """A new process after a kill, loaded and warm."""
        if self._killed:
            await self._engine.close()
            self._engine, self._killed = self._make(), False
            await self.warm()

    async def warm(self) -> None:
        """Load the model and make a token."""
        self.vocabulary = (await self._engine.capabilities()).vocabulary
        await self.run("warm up", 2)
        self.generations.clear()

    async def run(self, prompt: str, max_tokens: int) -> tuple[list[Token], float]:
        """A whole answer as fast as it goes: (tokens, tokens per second)."""
        request = TextRequest(self.model, prompt, Sampling(max_tokens=max_tokens))
        continuation = await self.prepare(request, PREPARE_S)
        tokens: list[Token] = []
        began_s = time.monotonic()
        try:
            async for token in continuation.start(0, max_tokens + 1):
                tokens.append(token)
                continuation.acknowledge(token.index)
                if len(tokens) == 1:
                    began_s = time.monotonic()
        finally:
            await continuation.close()
        return tokens, max(0, len(tokens) - 1) / max(1e-9, time.monotonic() - began_s)

    async def capabilities(self) -> TextCapabilities:
        return await self._engine.capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        continuation = await self._engine.prepare(request, deadline_s)
        self.given(request, request.prefix)
        return _Recorded(self, request, continuation)

    def given(self, request: TextRequest, answer: Sequence[Token]) -> None:
        """Its engine has read the request's prompt and this much of the answer."""
        if isinstance(request.prompt, str):
            prompt: str | tuple[int, ...] = request.prompt
        else:
            prompt = tuple(part for part in request.prompt if isinstance(part, int))
        self._given.append(Heard(self._engine.process_id, prompt, tuple(answer)))

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._engine.tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return await self._engine.embed(texts)

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def close(self) -> None:
        await self._engine.close()


class _Recorded(WrappedContinuation):
    """Continuation of an Actor."""

    def __init__(self, actor: Actor, request: TextRequest, inner: Continuation) -> None:
        super().__init__(inner)
        self._actor, self._request = actor, request
        self._generation = Generation(list(request.prefix))

    def spoken(self) -> Token | None:
        """Nothing: every token is to be recorded as it is read."""
        return None

    async def extend(self, tokens: Sequence[Token]) -> None:
        await self._inner.extend(tokens)
        self._generation.prefix.extend(tokens)
        self._actor.given(self._request, self._generation.prefix)

    async def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        self._actor.generations.append(self._generation)
        async for token in self._inner.start(at, ahead_tokens):
            self._generation.made.append(token)
            yield token


class Watched(WrappedTextEngine):
    """A target as the stream owner sees it: tells when it enters a phase of being moved to.

    tells_vocabulary: False hides it, as a server that takes text alone does.
    """

    def __init__(self, inner: TextEngine, on_phase: Callable[[Phase], None], tells_vocabulary: bool = True) -> None:
        super().__init__(inner)
        self.on_phase = on_phase
        self._tells_vocabulary = tells_vocabulary

    async def capabilities(self) -> TextCapabilities:
        found = await self._inner.capabilities()
        return found if self._tells_vocabulary else evolve(found, vocabulary=None, continues="text")

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        if request.prefix:
            self.on_phase("prepare")
        return _Watched(self, bool(request.prefix), await self._inner.prepare(request, deadline_s))

    async def close(self) -> None:
        """The actor closes its engine."""


class _Watched(WrappedContinuation):
    def __init__(self, watched: Watched, takes_over: bool, inner: Continuation) -> None:
        super().__init__(inner)
        self._watched, self._takes_over = watched, takes_over

    def spoken(self) -> Token | None:
        """Nothing: the target is seen from its start on."""
        return None

    async def extend(self, tokens: Sequence[Token]) -> None:
        self._watched.on_phase("extend")
        await self._inner.extend(tokens)

    async def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        if self._takes_over:
            self._watched.on_phase("cut-over")
        async for token in self._inner.start(at, ahead_tokens):
            if self._takes_over and token.index == at + 3:
                self._watched.on_phase("after")
            yield token


@frozen
class Batch:
    """Tokens of an answer that went to a target in one frame: their text, and the bytes of the frame as it crossed.

    header_bytes: what of them is the header of this very frame. request_bytes: what of them is the request that came
    with them (prompt, sampling), 0 for an extension.
    """

    tokens: tuple[Token, ...]
    frame_bytes: int
    header_bytes: int
    request_bytes: int = 0
    text: bytes = b""


class Counted:
    """A FrameStream that remembers the batches of answer tokens that were sent over it."""

    def __init__(self, inner: FrameStream, batches: list[Batch]) -> None:
        self._inner, self._batches = inner, batches
        self._reader = HandoffReader()
        self.receive, self.close = inner.receive, inner.close

    async def send(self, frame: bytes) -> None:
        decoded, header = self._reader.decode(frame).frame, header_bytes(frame)
        if isinstance(decoded, Extend):
            self._batches.append(Batch(decoded.tokens, len(frame), header))
        elif isinstance(decoded, Prepare) and decoded.request.prefix:
            bare = evolve(decoded, request=evolve(decoded.request, prefix=()))
            request_bytes = len(encode_body(bare)[1]) - len(encode_body(Extend(0, ()))[1])
            self._batches.append(Batch(decoded.request.prefix, len(frame), header, request_bytes))
        await self._inner.send(frame)


@define
class Stage:
    """Engines, the server that hosts them, and a shaped link to it. `batches`: what crossed by handoff."""

    actors: dict[str, Actor]
    hosted: HostedStreams
    proxy: ShaperProxy
    link: HttpLink
    draw: random.Random
    batches: list[Batch] = field(factory=list)
    stalls: int = 0

    async def open(self) -> FrameStream:
        """A counted connection to the host."""
        return Counted(await self.link.open(PATH), self.batches)

    def peer(self, actor: Actor, vocabulary: str | None) -> PeerEngine:
        """The actor as reached over the link."""
        return PeerEngine(self.open, name="cloud", model=actor.name, vocabulary=vocabulary, resume_s=RESUME_S)

    def shape(self, rtt_s: float) -> None:
        """Round trip and loss from now on."""
        self.proxy.set_delay(rtt_s / 2)
        self.proxy.set_loss(Loss(LOSS_RATIO, RETRANSMIT_S + rtt_s, self.draw.random))

    async def stall(self, after_s: float, seconds: float) -> None:
        """Nothing passes for a while."""
        await asyncio.sleep(after_s)
        self.stalls += 1
        self.proxy.set_rate(0.0)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.proxy.set_rate(float("inf"))

    async def mend(self) -> None:
        """Everything that was killed or cut works again, and nothing waits for the owner of an answer that is over."""
        self.proxy.restore()
        self.proxy.set_rate(float("inf"))
        await self.hosted.close()
        for actor in self.actors.values():
            await actor.revive()


@asynccontextmanager
async def stage(actors: Sequence[Actor], draw: random.Random) -> AsyncIterator[Stage]:
    """Load all actors and open the stage; everything is closed at the end, also what was killed."""
    by_name = {actor.name: actor for actor in actors}
    streams = HostedStreams(keep_s=2.0)

    async def handle(request: Request, stream: FrameStream) -> None:
        await serve_stream(lambda model: by_name[model], stream, streams=streams)

    server = await serve([], [FrameRoute(PATH, handle)], host="127.0.0.1", port=0)
    proxy = ShaperProxy("127.0.0.1", server.port)
    await proxy.start()
    link = HttpLink("cloud", f"http://127.0.0.1:{proxy.port}")
    try:
        for actor in actors:
            await actor.warm()
        yield Stage(by_name, streams, proxy, link, draw)
    finally:
        await link.close()
        await proxy.close()
        await streams.close()
        await server.close(grace_s=0.01)
        for actor in actors:
            await actor.close()
