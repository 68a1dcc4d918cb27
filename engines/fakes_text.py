"""A text engine without a model: the token at an index is a pure function of (prompt, index).

So the continuation from any prefix, on any number of these engines, is the same stream, and a handoff can be checked
for equality. Every ninth and tenth token are the two halves of one two-byte character.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal

from attrs import evolve, frozen

from engines.credit import Credit, credit_from
from engines.port import EngineLoad
from protocol.clock import Clock
from protocol.errors import ContextOverflow, EngineCrashed, Full, MidstreamError
from protocol.text import CallDelta, Message, Prompt, TextCapabilities, TextRequest, Token

Phase = Literal["prepare", "extend", "start", "token"]
Sleep = Callable[[float], Awaitable[None]]

WORDS = (
    "the",
    "river",
    "runs",
    "past",
    "old",
    "mills",
    "and",
    "under",
    "three",
    "stone",
    "bridges",
    "to",
    "sea",
    "slow",
)
FIRST_WORD_ID = 256
END_ID = 2
_HALVES = {8: b"\xc3", 9: b"\xa9"}
_PIECE = re.compile(rb"\s*\S+|\s+")


@frozen
class Failure:
    """What goes wrong: `error` is raised once in `phase`; for phase `token`, instead of the token at `index`.

    With `error` None the engine falls silent there and never speaks again.
    """

    phase: Phase
    error: MidstreamError | None
    index: int = 0


def prompt_bytes(prompt: Prompt) -> bytes:
    """The prompt as the fake's template writes it."""
    if isinstance(prompt, str):
        return prompt.encode()
    parts = [f"<{part.role}>{part.content}" if isinstance(part, Message) else f" {part}" for part in prompt]
    return "\n".join(parts).encode()


def fake_token(prompt: Prompt, index: int, answer_tokens: int) -> Token:
    """The token that every FakeTextEngine makes at `index` of the answer to `prompt`."""
    if index >= answer_tokens:
        return Token(index=index, id=END_ID, data=b"", logprob=-0.01, margin=5.0, finish="stop")
    digest = hashlib.sha256(prompt_bytes(prompt) + index.to_bytes(4, "big")).digest()
    half = _HALVES.get(index % 10)
    word = digest[0] % len(WORDS)
    logprob = -digest[1] / 256
    if half is not None:
        return Token(index=index, id=half[0], data=half, logprob=logprob, margin=digest[2] / 64)
    text = (b" " if index else b"") + WORDS[word].encode()
    return Token(index=index, id=FIRST_WORD_ID + word, data=text, logprob=logprob, margin=digest[2] / 64)


def fake_answer(prompt: Prompt, count: int, answer_tokens: int = 64) -> bytes:
    """The first `count` tokens of the answer as bytes."""
    return b"".join(fake_token(prompt, index, answer_tokens).data for index in range(count))


class FakeTextEngine:
    """TextEngine for tests and demos without a model.

    Args:
        tokens_per_s, prefill_tokens_per_s: speed, kept by `sleep`; None does not wait at all.
        answer_tokens: the answer ends by itself ("stop") after that many tokens.
        says: pieces of the answer in place of made-up words, each bytes or a piece of a tool call.
        grammar, images, tools: what capabilities say; a request is answered all the same.
        capacity: more open generations than this are refused with Full.
        failures: see Failure; more can be added with `fail()` while it runs.
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        tokens_per_s: float | None = None,
        prefill_tokens_per_s: float | None = None,
        answer_tokens: int = 64,
        context_tokens: int = 4096,
        capacity: int = 8,
        vocabulary: str | None = "fake-vocabulary",
        continues: Literal["ids", "text", "no"] = "ids",
        logprobs: bool = True,
        says: Sequence[bytes | CallDelta] | None = None,
        grammar: bool = False,
        images: bool = False,
        tools: bool = False,
        retry_after_s: float = 1.0,
        speaks_early: bool = False,
        failures: Sequence[Failure] = (),
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.answer_tokens = answer_tokens if says is None else len(says)
        self._says = says
        self.clock = clock
        self.prepared: list[TextRequest] = []
        self.speaks_early = speaks_early
        self.closed_count = 0
        self.generated_count = 0
        self._token_s = 0.0 if tokens_per_s is None else 1.0 / tokens_per_s
        self._prefill_s = 0.0 if prefill_tokens_per_s is None else 1.0 / prefill_tokens_per_s
        self._capacity = capacity
        self._retry_after_s = retry_after_s
        self._failures = list(failures)
        self._sleep = sleep
        self._running: set[FakeContinuation] = set()
        self._killed = asyncio.Event()
        self._capabilities = TextCapabilities(
            vocabulary=vocabulary,
            template="fake",
            context_tokens=context_tokens,
            continues=continues,
            grammar=grammar,
            logprobs=logprobs,
            embeds=True,
            images=images,
            tools=tools,
        )

    def fail(self, phase: Phase, error: MidstreamError | None, index: int = 0) -> None:
        """Let the next passage of `phase` go wrong; see Failure."""
        self._failures.append(Failure(phase, error, index))

    def kill(self) -> None:
        """Die as a process would: every open and every later call raises EngineCrashed until `revive()`."""
        self._killed.set()

    def revive(self) -> None:
        """Work again after `kill()`; generations open at the kill stay dead."""
        self._killed = asyncio.Event()

    async def capabilities(self) -> TextCapabilities:
        return self._capabilities

    async def prepare(self, request: TextRequest, deadline_s: float) -> FakeContinuation:
        if len(self._running) >= self._capacity:
            raise Full(f"{self.name} runs {len(self._running)} requests already", retry_after_s=self._retry_after_s)
        prompt_tokens = len(_pieces(prompt_bytes(request.prompt)))
        used_tokens = prompt_tokens + len(request.prefix)
        if used_tokens >= self._capabilities.context_tokens:
            raise ContextOverflow(prompt_tokens=used_tokens, context_tokens=self._capabilities.context_tokens)
        continuation = FakeContinuation(self, request, prompt_tokens, self._killed)
        self._running.add(continuation)
        self.prepared.append(request)
        try:
            await self.pass_phase("prepare", self._killed, self._prefill_s * used_tokens)
        except BaseException:
            await continuation.close()
            raise
        return continuation

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return tuple(
            FIRST_WORD_ID + int.from_bytes(hashlib.sha256(piece).digest()[:2], "big") for piece in _pieces(data)
        )

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return [_embedding(text) for text in texts]

    def load(self) -> EngineLoad:
        running = len(self._running)
        return EngineLoad(running=running, waiting=0, wait_s=self._retry_after_s if running >= self._capacity else 0.0)

    async def close(self) -> None:
        for continuation in tuple(self._running):
            await continuation.close()

    def token_s(self, tokens: int) -> float:
        """Seconds that `tokens` decoded tokens take."""
        return self._token_s * tokens

    def prefill_s(self, tokens: int) -> float:
        """Seconds that `tokens` prefilled tokens take."""
        return self._prefill_s * tokens

    def said(self, prompt: Prompt, index: int) -> Token:
        """The token at `index`."""
        made = fake_token(prompt, index, self.answer_tokens)
        if self._says is None or index >= len(self._says):
            return made
        piece = self._says[index]
        if isinstance(piece, CallDelta):
            return evolve(made, id=None, data=b"", call=piece)
        return evolve(made, id=None, data=piece)

    def forget(self, continuation: FakeContinuation) -> None:
        """A continuation closed itself."""
        if continuation in self._running:
            self._running.discard(continuation)
            self.closed_count += 1

    async def pass_phase(self, phase: Phase, killed: asyncio.Event, seconds: float, index: int = 0) -> None:
        """Spend `seconds` in `phase`, or fail there as told."""
        await self._wait(killed, seconds)
        for failure in self._failures:
            if failure.phase == phase and (phase != "token" or failure.index == index):
                self._failures.remove(failure)
                if failure.error is not None:
                    raise failure.error
                await self._wait(killed, math.inf)

    async def _wait(self, killed: asyncio.Event, seconds: float) -> None:
        if seconds == math.inf:
            await killed.wait()
        elif seconds > 0:
            await self._sleep(seconds)
        if killed.is_set():
            raise EngineCrashed(f"{self.name} was killed")


class FakeContinuation:
    """Continuation of a FakeTextEngine."""

    def __init__(self, engine: FakeTextEngine, request: TextRequest, prompt_tokens: int, killed: asyncio.Event) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._engine = engine
        self._request = request
        self._next = len(request.prefix)
        self._killed = killed
        self._credit: Credit | None = None
        self._closed = False

    async def extend(self, tokens: Sequence[Token]) -> None:
        if self._credit is not None:
            raise RuntimeError("extend() after start()")
        await self._engine.pass_phase("extend", self._killed, self._engine.prefill_s(len(tokens)))
        self._next += len(tokens)

    def spoken(self) -> Token | None:
        """The first token, where the engine was told to have it with the prefill."""
        engine = self._engine
        if not engine.speaks_early or self._next >= self._request.sampling.max_tokens:
            return None
        made = self._made(self._next)
        return made if made.finish is None else None

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        self._credit = credit_from(self._credit, at, self._next, ahead_tokens)
        return self._tokens(at, self._credit)

    def acknowledge(self, index: int) -> None:
        if self._credit is not None:
            self._credit.acknowledge(index)

    async def close(self) -> None:
        self._closed = True
        if self._credit is not None:
            self._credit.close()
        self._engine.forget(self)

    async def _tokens(self, at: int, credit: Credit) -> AsyncIterator[Token]:
        engine = self._engine
        try:
            await engine.pass_phase("start", self._killed, 0.0)
            index = at
            while not self._closed:
                token = await self._token(index, credit)
                if token is None:
                    return
                yield token
                if token.finish is not None:
                    return
                index += 1
        finally:
            engine.forget(self)

    async def _token(self, index: int, credit: Credit) -> Token | None:
        engine, max_tokens = self._engine, self._request.sampling.max_tokens
        if index >= max_tokens:
            return Token(index=index, id=None, data=b"", finish="length", at_s=engine.clock())
        await credit.wait(index)
        await engine.pass_phase("token", self._killed, engine.token_s(1), index)
        if self._closed:
            return None
        engine.generated_count += 1
        return self._made(index)

    def _made(self, index: int) -> Token:
        engine, sampling = self._engine, self._request.sampling
        made = engine.said(self._request.prompt, index)
        finish = made.finish or ("length" if index + 1 == sampling.max_tokens else None)
        alternatives = ((made.data, made.logprob or 0.0),) if sampling.logprobs else ()
        return evolve(made, at_s=engine.clock(), finish=finish, alternatives=alternatives)


def _pieces(data: bytes) -> list[bytes]:
    return _PIECE.findall(data) or [b""]


def _embedding(text: str) -> tuple[float, ...]:
    """A unit vector of 16 numbers, the same for the same text."""
    digest = hashlib.sha256(text.encode()).digest()
    raw = [byte - 127.5 for byte in digest[:16]]
    norm = math.sqrt(sum(value * value for value in raw))
    return tuple(value / norm for value in raw)
