"""One generation on a llama-server, in process or by URL: prefill, hold, run, pause, resume, hidden tokens.

The server cannot pause a stream, so a pause ends its request and a later one goes on from the ids so far; the server's
prompt cache makes that as cheap as decoding on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from attrs import evolve

from engines.constraints import going_on
from engines.llama_server_wire import Chunk, NativePrompt, Seen, completion_body, read_chunk
from engines.pumped import PumpedContinuation
from engines.vocabulary import Vocabulary
from protocol.clock import Clock
from protocol.errors import ContextOverflow, LinkClosed, MidstreamError, ProtocolError
from protocol.text import FinishReason, Sampling, Token

HOLD_TOKENS = 4
"""Tokens made before start() or past the credit, to bridge short waits without ending the request."""


class NativeServer(Protocol):
    """A llama-server as the stream needs it."""

    def complete(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Chunks of one streamed completion; closing the iterator cancels it there, and nothing else."""
        ...

    async def call(self, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Mapping[str, Any]:
        """One whole exchange, GET when `body` is None. Raises what an error answer means."""
        ...


IdsOf = Callable[[Sequence[Token]], Awaitable[Sequence[int]]]


class ServerContinuation(PumpedContinuation):
    """Continuation over a NativeServer; `prefill()` comes first.

    Args:
        prompt: the prompt in this server's ids, or as a text that it tokenises itself: a question less before the
            first token. How many tokens that is comes back before they are evaluated.
        prefix: the answer so far, from whatever engine.
        ids_of: turns an answer so far into this server's ids.
    """

    extend_s = 600.0

    def __init__(
        self,
        server: NativeServer,
        *,
        prompt: NativePrompt,
        prefix: Sequence[Token],
        sampling: Sampling,
        context_tokens: int,
        vocabulary: Vocabulary | None,
        ids_of: IdsOf,
        on_close: Callable[[ServerContinuation], None],
        clock: Clock,
    ) -> None:
        super().__init__(prefix)
        self._server = server
        self._prompt = tuple(prompt)
        self._so_far: list[str | int] = []
        self._said = bytearray()
        self._made = 0
        self._sampling = sampling
        # A grammar begins anew with every request, so such an answer is made by one, whoever waits.
        self._in_one = bool(sampling.grammar) or sampling.json_schema is not None
        self._context_tokens = context_tokens
        self._vocabulary = vocabulary
        self._ids_of = ids_of
        self._on_close = on_close
        self._clock = clock
        self._held: Token | None = None
        self._counted = 0
        self._predict = 0

    async def _open(self) -> None:
        """Raises ContextOverflow where the prompt is known to be too long before the server has read it."""
        self._held = None
        prefix = await self._ids_of(self._prefix)
        self._so_far, self._made = [*self._prompt, *prefix], len(prefix)
        self._said = bytearray(b"".join(token.data or self._piece(token.id, b"") for token in self._prefix))
        if not any(isinstance(part, str) for part in self._prompt):
            self.prompt_tokens = len(self._prompt)
        self._check_room()
        self._go_on()

    def _left(self) -> None:
        self._on_close(self)

    def spoken(self) -> Token | None:
        """The first token, made with the prefill."""
        return self._ready[0] if self._ready and self._ready[0].finish is None else None

    def _go_on(self) -> None:
        """Make sure that a request runs, unless nothing is left to generate."""
        if self._pump is not None and not self._pump.done():
            return
        room = min(self._sampling.max_tokens - self._next, self._room())
        if room < 1:
            self._put(Token(index=self._next, id=None, data=b"", finish="length", at_s=self._clock()))
            return
        self._predict, self._counted = room, 0
        self._pump = asyncio.create_task(self._run(), name="llama-server-stream")

    def _room(self) -> int:
        """Tokens that still fit into the context; all of it while the server has not counted the prompt."""
        return self._context_tokens - self.prompt_tokens - self._made

    def _check_room(self) -> None:
        if self._room() < 1:
            tokens = self.prompt_tokens + self._made
            raise ContextOverflow(prompt_tokens=tokens, context_tokens=self._context_tokens)

    async def _run(self) -> None:
        try:
            body = completion_body(self._so_far, going_on(self._sampling, bytes(self._said)), self._predict)
            async with aclosing(self._server.complete(body)) as chunks:
                async for raw in chunks:
                    if not await self._take(read_chunk(raw)):
                        return
            if not self._ended:
                raise LinkClosed("llama-server ended the stream before the answer was complete")
        except ContextOverflow as err:
            # The server rounds its context up, and so do its numbers.
            self._failure = ContextOverflow(prompt_tokens=err.prompt_tokens, context_tokens=self._context_tokens)
        except MidstreamError as err:
            self._failure = err
        finally:
            self._news.set()

    def _count_prompt(self, chunk: Chunk) -> None:
        """The server counts a prompt that was sent as a text, before it evaluates it. Raises ContextOverflow."""
        if chunk.evaluated is None:
            raise ProtocolError("llama-server does not tell how long the prompt is", field="tokens_evaluated")
        self.prompt_tokens = max(0, chunk.evaluated - self._made)
        self._check_room()
        self._predict = min(self._predict, self._room())

    async def _take(self, chunk: Chunk) -> bool:
        """Turn a chunk into tokens; False when this request has to end."""
        if self.prompt_tokens == 0:
            self._count_prompt(chunk)
        if self._counted == 0 and chunk.cached is not None and self.cached_tokens == 0:
            self.cached_tokens = min(chunk.cached, self.prompt_tokens)
        hidden = 0 if chunk.predicted is None else chunk.predicted - self._counted - (chunk.seen is not None)
        if chunk.finish is not None:
            return await self._finish(chunk.finish, max(0, hidden))
        if chunk.seen is None:
            return True
        if hidden > 0 and not self._reveal(chunk, chunk.seen, hidden):
            if not self._in_one:
                await self._ask_again(hidden + 1)
                return False
            self._counted += hidden
            self._add(None, chunk.text, chunk.seen)
        if hidden <= 0:
            self._add(chunk.seen.id, self._piece(chunk.seen.id, chunk.text), chunk.seen)
        return self._room_left()

    def _reveal(self, chunk: Chunk, last: Seen, hidden: int) -> bool:
        """Find the tokens of a character that came in one chunk; False when more than one spelling fits."""
        piece = self._piece(last.id, b"")
        if not piece or self._vocabulary is None or not chunk.text.endswith(piece):
            return False
        ids = self._vocabulary.split(chunk.text[: -len(piece)], hidden)
        if ids is None:
            return False
        for one in ids:
            self._add(one, self._vocabulary.piece(one) or b"", None)
        self._add(last.id, piece, last)
        return True

    async def _ask_again(self, count: int) -> None:
        """Generate `count` tokens once more, in one answer that lists every id."""
        count = min(count, self._predict - self._counted)
        sampling = going_on(self._sampling, bytes(self._said))
        body = completion_body(self._so_far, sampling, count, stream=False)
        raw = await self._server.call("/completion", body, 60.0)
        ids = [int(one) for one in raw.get("tokens") or ()][:count]
        whole = str(raw.get("content", "")).encode()
        eos = raw.get("stop_type") == "eos"
        for place, one in enumerate(ids):
            last = place == len(ids) - 1
            if last and eos:
                self._put(Token(index=self._next, id=one, data=b"", finish="stop", at_s=self._clock()))
                return
            self._add(one, self._piece(one, whole if last else b""), None)
        if not ids:
            raise LinkClosed("llama-server lost a token and could not repeat it")

    async def _finish(self, finish: FinishReason, hidden: int) -> bool:
        held, self._held = self._held, None
        if finish == "stop" and held is not None:
            self._put(evolve(held, finish="stop"))
        elif held is not None:
            self._put(evolve(held, finish=finish))
        elif finish == "length" and hidden > 0 and not self._in_one:
            # The answer ends inside a character, whose part was never sent.
            await self._ask_again(hidden)
        else:
            self._put(Token(index=self._next, id=None, data=b"", finish=finish, at_s=self._clock()))
        return False

    def _piece(self, token_id: int | None, shown: bytes) -> bytes:
        """Raw bytes of a token: from the vocabulary where it is known, as the server shows broken bytes as U+FFFD."""
        known = self._vocabulary.piece(token_id) if self._vocabulary and token_id is not None else None
        return shown if known is None else known

    def _add(self, token_id: int | None, data: bytes, seen: Seen | None) -> None:
        """The next token; one without bytes waits, as it may turn out to be the end mark."""
        if self._ended:
            return
        if self._held is not None:
            held, self._held = self._held, None
            self._put(held)
        token = Token(
            index=self._next,
            id=token_id,
            data=data,
            logprob=seen.logprob if seen else None,
            margin=seen.margin if seen else None,
            at_s=self._clock(),
            alternatives=self._alternatives(seen),
        )
        self._next += 1
        self._counted += 1
        if token_id is not None:
            self._so_far.append(token_id)
            self._said += data
            self._made += 1
        if not data:
            self._held = token
        elif self._counted >= self._predict:
            self._put(evolve(token, finish="length"))
        else:
            self._put(token)

    def _alternatives(self, seen: Seen | None) -> tuple[tuple[bytes, float], ...]:
        if seen is None or not self._sampling.logprobs:
            return ()
        return tuple((data, logprob) for _, data, logprob in seen.top[: self._sampling.logprobs])

    def _room_left(self) -> bool:
        """Whether the request may go on: not too many tokens wait that nobody may have yet."""
        if self._ended:
            return False
        if self._in_one:
            return True
        if self._credit is None:
            return len(self._ready) < HOLD_TOKENS
        return self._credit.allows(self._next - HOLD_TOKENS)
