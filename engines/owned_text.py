"""A TextEngine over one model context with one owner thread: several sequences, real pauses, cancellation anywhere.

What llama-cpp-python and onnxruntime-genai have in common; each adds how a model is described and loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

from engines.chat_template import render
from engines.context_owner import ContextOwner, Generation
from engines.credit import Credit, credit_from
from engines.decoding import DecodingModel
from engines.llama_server import default_threads
from engines.pieces import check_bytes, is_piece, unfinished_bytes
from engines.port import Continuation, EngineLoad
from engines.sampling import Chosen
from engines.slots import Slots
from protocol.clock import Clock
from protocol.errors import BadRequest, ContextOverflow, EngineError, LinkTimeout, MidstreamError, Unsupported
from protocol.text import FinishReason, Message, Prompt, TextCapabilities, TextRequest, Token

EXTEND_S = 600.0
R = TypeVar("R")


@frozen
class Described:
    """What a model says before it is loaded: hash of its vocabulary, chat template, begin and end mark as text."""

    vocabulary: str
    template: str | None
    begin: str
    end: str


class OwnedTextEngine(ABC):
    """TextEngine in this process. A native crash takes the process along: run it in a worker to isolate it.

    Args:
        model_path: the model's file or folder.
        context_tokens: room for prompt and answer of one generation.
        threads: 0 takes all cores but one.
        slots: generations at once; more are refused with Full.
        chat_template: Jinja text for models that carry none.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        context_tokens: int = 2048,
        threads: int = 0,
        slots: int = 2,
        chat_template: str | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._path = Path(model_path)
        self._context_tokens = context_tokens
        self._slots = Slots(slots, clock)
        self._threads = threads or default_threads()
        self._template = chat_template
        self._clock = clock
        self._described: Described | None = None
        self._owner: ContextOwner | None = None
        self._capabilities: TextCapabilities | None = None
        self._loading = asyncio.Lock()
        self._stopped = False

    @abstractmethod
    def _describe(self) -> Described:
        """Read what the model says of itself; blocking. Raises EngineError for what is no model."""

    @abstractmethod
    def _decoding_model(self, should_abort: Callable[[], bool]) -> DecodingModel:
        """Load it; blocking, on the owner's thread. Raises EngineError."""

    async def capabilities(self) -> TextCapabilities:
        await self._ready()
        assert self._capabilities is not None
        return self._capabilities

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        if request.sampling.grammar or request.sampling.json_schema is not None:
            raise Unsupported("this engine knows no grammars", field="grammar", next_step="use the llama_server engine")
        place = self._slots.enter()
        continuation: OwnedContinuation | None = None
        try:
            async with asyncio.timeout(deadline_s):
                owner = await self._ready()
                continuation = OwnedContinuation(
                    owner,
                    request,
                    await self._prompt_ids(request.prompt),
                    context_tokens=self._context_tokens,
                    ids_of=self._prefix_ids,
                    on_close=lambda: self._slots.leave(place),
                    clock=self._clock,
                )
                await continuation.prefill()
        except BaseException as err:
            if continuation is not None:
                await continuation.close()
            self._slots.leave(place)
            if isinstance(err, TimeoutError):
                raise LinkTimeout(f"the prompt was not read within {deadline_s:.1f} s") from err
            raise
        return continuation

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._tokenize(_whole(data), special=False)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        raise Unsupported("this engine serves text, not embeddings", next_step="name an embedding model")

    def load(self) -> EngineLoad:
        return self._slots.load()

    async def close(self) -> None:
        self._stopped = True
        async with self._loading:
            owner, self._owner = self._owner, None
        if owner is not None:
            await asyncio.to_thread(owner.close)

    async def _ready(self) -> ContextOwner:
        async with self._loading:
            if self._stopped:
                raise EngineError(f"the engine of {self._path.name} was closed")
            if self._owner is None:
                await self._load()
            assert self._owner is not None
            return self._owner

    async def _load(self) -> None:
        described = await asyncio.to_thread(self._describe)
        self._template = self._template or described.template
        self._described = described
        owner = await asyncio.to_thread(
            ContextOwner, self._decoding_model, name=self._path.name, slots=self._slots.count
        )
        try:
            await _on(owner, lambda model: model.vocabulary_size)
        except MidstreamError:
            await asyncio.to_thread(owner.close)
            raise
        self._owner = owner
        self._capabilities = TextCapabilities(
            vocabulary=described.vocabulary,
            template=hashlib.sha256(self._template.encode()).hexdigest() if self._template else None,
            context_tokens=self._context_tokens,
            continues="ids",
            grammar=False,
            logprobs=True,
            embeds=False,
        )

    async def _call(self, job: Callable[[DecodingModel], R]) -> R:
        return await _on(await self._ready(), job)

    async def _tokenize(self, data: bytes, *, special: bool) -> tuple[int, ...]:
        return await self._call(lambda model: model.tokenize(data, special=special))

    async def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self._tokenize(prompt.encode("utf-8", "replace"), special=True)
        messages = [part for part in prompt if isinstance(part, Message)]
        if not messages:
            ids = tuple(part for part in prompt if isinstance(part, int))
            size = await self._call(lambda model: model.vocabulary_size)
            if not all(0 <= one < size for one in ids):
                raise BadRequest("the prompt has ids that this model does not know", field="prompt")
            return ids
        if self._template is None:
            raise BadRequest("the model has no chat template", field="messages", next_step="use /v1/completions")
        assert self._described is not None
        text = render(self._template, messages, begin=self._described.begin, end=self._described.end)
        begin = await self._call(lambda model: model.begin_piece.decode("utf-8", "replace"))
        # Tokenising adds the begin mark by itself.
        text = text.removeprefix(begin) if begin else text
        return await self._tokenize(text.encode("utf-8", "replace"), special=True)

    async def _prefix_ids(self, tokens: Sequence[Token]) -> Sequence[int]:
        tokens = [token for token in tokens if token.finish is None or token.data]
        ids = [token.id for token in tokens if token.id is not None]
        if len(ids) == len(tokens):
            own = await self._call(
                lambda model: all(
                    0 <= one < model.vocabulary_size and is_piece(model.piece(one), token)
                    for one, token in zip(ids, tokens, strict=True)
                )
            )
            if own:
                return ids
        check_bytes(tokens)
        return await self._tokenize(_whole(b"".join(token.data for token in tokens)), special=False)


class OwnedContinuation:
    """Continuation over a ContextOwner; `prefill()` comes first."""

    def __init__(
        self,
        owner: ContextOwner,
        request: TextRequest,
        prompt_ids: Sequence[int],
        *,
        context_tokens: int,
        ids_of: Callable[[Sequence[Token]], Any],
        on_close: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.prompt_tokens = len(prompt_ids)
        self.cached_tokens = 0
        self._owner = owner
        self._sampling = request.sampling
        self._prefix = list(request.prefix)
        self._prompt_ids = tuple(prompt_ids)
        self._ids_of = ids_of
        self._context_tokens = context_tokens
        self._on_close = on_close
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._generation: Generation | None = None
        self._next = 0
        self._limit = 0
        self._ready: deque[Token] = deque()
        self._turn = 0
        self._prefilled = False
        self._news = asyncio.Event()
        self._failure: MidstreamError | None = None
        self._credit: Credit | None = None
        self._closed = False

    async def prefill(self) -> None:
        """Evaluate prompt and answer so far, and make the first token.

        A longer answer begins a new sequence, which finds the old one's cache.
        """
        ids = [*self._prompt_ids, *await self._ids_of(self._prefix)]
        if not ids:
            raise BadRequest("the prompt is empty", field="prompt")
        if len(ids) >= self._context_tokens:
            raise ContextOverflow(prompt_tokens=len(ids), context_tokens=self._context_tokens)
        if self._closed:
            raise EngineError("the continuation was closed")
        if self._generation is not None:
            self._owner.remove(self._generation)
        self._next = len(self._prefix)
        self._limit = max(0, min(self._sampling.max_tokens - self._next, self._context_tokens - len(ids)))
        self._prefilled = False
        self._ready.clear()
        # What the sequence before still says is of no interest.
        self._turn += 1
        turn = self._turn
        self._generation = Generation(
            ids,
            self._sampling,
            self._limit,
            on_prefilled=lambda cached: self._tell(turn, self._take_prefilled, cached),
            on_token=lambda chosen, piece, ends: self._tell(turn, self._take_token, chosen, piece, ends),
            on_failed=lambda err: self._tell(turn, self._take_failure, err),
        )
        self._generation.allowed = 1
        self._owner.add(self._generation)
        while not ((self._prefilled and (self._ready or not self._limit)) or self._failure):
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure

    async def extend(self, tokens: Sequence[Token]) -> None:
        if self._credit is not None:
            raise RuntimeError("extend() after start()")
        self._prefix.extend(tokens)
        try:
            async with asyncio.timeout(EXTEND_S):
                await self.prefill()
        except TimeoutError as err:
            raise LinkTimeout("the answer so far was not read in time") from err

    def spoken(self) -> Token | None:
        """The first token, made with the prefill."""
        return self._ready[0] if self._ready and self._ready[0].finish is None else None

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        self._credit = credit_from(self._credit, at, len(self._prefix), ahead_tokens)
        self._ahead_tokens = max(1, ahead_tokens)
        self._allow()
        return self._tokens()

    def acknowledge(self, index: int) -> None:
        if self._credit is not None:
            self._credit.acknowledge(index)
            self._allow()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._generation is not None:
            self._owner.remove(self._generation)
        self._news.set()
        self._on_close()

    async def _tokens(self) -> AsyncIterator[Token]:
        try:
            if self._limit == 0:
                yield Token(index=self._next, id=None, data=b"", finish="length", at_s=self._clock())
                return
            while not self._closed:
                while self._ready and not self._closed:
                    token = self._ready.popleft()
                    yield token
                    if token.finish is not None:
                        return
                if self._failure is not None:
                    raise self._failure
                self._news.clear()
                if not self._ready and not self._closed:
                    await self._news.wait()
        finally:
            await self.close()

    def _allow(self) -> None:
        if self._credit is not None and self._generation is not None:
            done = self._credit.acknowledged + 1 - len(self._prefix)
            self._owner.allow(self._generation, done + self._ahead_tokens)

    def _tell(self, turn: int, take: Callable[..., None], *arguments: object) -> None:
        """From the owner's thread to the loop."""
        try:
            self._loop.call_soon_threadsafe(self._hear, turn, take, arguments)
        except RuntimeError:
            # The loop is gone, and with it whoever waited.
            return

    def _hear(self, turn: int, take: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if turn == self._turn:
            take(*arguments)

    def _take_prefilled(self, cached: int) -> None:
        self._prefilled = True
        self.cached_tokens = min(cached, self.prompt_tokens)
        self._news.set()

    def _take_failure(self, err: MidstreamError) -> None:
        self._failure = err
        self._news.set()

    def _take_token(self, chosen: Chosen, piece: bytes, ends: bool) -> None:
        if self._closed:
            return
        finish: FinishReason | None = "stop" if ends else None
        if not ends and self._next + 1 - len(self._prefix) >= self._limit:
            finish = "length"
        token = Token(
            index=self._next,
            id=chosen.id,
            data=piece,
            logprob=chosen.logprob,
            margin=chosen.margin,
            at_s=self._clock(),
            finish=finish,
            alternatives=chosen.top_pieces,
        )
        self._next += 1
        self._ready.append(token)
        self._news.set()


async def _on(owner: ContextOwner, job: Callable[[DecodingModel], R]) -> R:
    """Run `job` on the owner's thread."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[R] = loop.create_future()

    def settle(result: Any, err: MidstreamError | None) -> None:
        if answered.done():
            return
        if err is not None:
            answered.set_exception(err)
        else:
            answered.set_result(result)

    def done(result: Any, err: MidstreamError | None) -> None:
        try:
            loop.call_soon_threadsafe(settle, result, err)
        except RuntimeError:
            # The loop is gone, and with it whoever waited.
            return

    owner.call(job, done)
    return await answered


def _whole(data: bytes) -> bytes:
    if unfinished_bytes(data):
        raise BadRequest("the text ends inside a character", field="prefix", next_step="cut at a character boundary")
    return data.decode("utf-8", "replace").encode()
