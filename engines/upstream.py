"""Any model server (vLLM, Ollama, llama-server, a vendor) as a TextEngine: a wire codec over a Link.

Such a server prefills and generates in one request, so `prepare` opens the stream and waits for its first content:
refusals and overload show before anything was promised. Tokens are its chunks, or the pieces of its logprobs where it
sends those. A stream that ends without a finish reason raises LinkClosed, whatever came before.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol, runtime_checkable

from attrs import evolve

from engines.port import Continuation, EngineLoad
from engines.pumped import PumpedContinuation
from links.port import Link, RejectedStatus
from protocol.clock import Clock
from protocol.errors import (
    BadRequest,
    Full,
    LinkClosed,
    LinkTimeout,
    MidstreamError,
    ProtocolError,
    Unsupported,
)
from protocol.openai_upstream import OpenAICodec
from protocol.text import FinishReason, Message, Sampling, TextCapabilities, TextRequest, Token, Usage
from protocol.trace import HEADER
from protocol.upstream import UpstreamCodec, UpstreamDelta, UpstreamPiece, WireCall

CALL_S = 30.0
BUFFERED_TOKENS = 64
_COUNTING = (Message("user", "Count."),)
_COUNTED = Token(0, None, b"One, two, three, four, five,")
_TOOL = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}


@runtime_checkable
class TenantLinks(Protocol):
    """A Link that asks with another key for each tenant."""

    def for_tenant(self, tenant: str) -> Link:
        """The same server, asked with the tenant's own keys where it has some."""
        ...


class UpstreamEngine:
    """TextEngine over chat and text completions.

    Args:
        link: its base URL is the server's, without the codec's paths.
        model: name at the server.
        codec: the server's wire form.
        continues: whether an answer can be continued; None: as the codec says, or else the server is asked at first
            use (a few short requests).
        context_tokens: what the model's context holds, where the server's model list does not say.
        max_open: more generations at once are refused with Full.
        silence_s: longest wait for the next chunk.
    """

    def __init__(
        self,
        link: Link,
        model: str,
        api_key: str | None = None,
        *,
        codec: UpstreamCodec | None = None,
        continues: Literal["text", "no"] | None = None,
        context_tokens: int = 32_768,
        max_open: int = 16,
        silence_s: float = 30.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.model = model
        self.codec: UpstreamCodec = codec or OpenAICodec()
        self._link = link
        self._by_tenant = link if isinstance(link, TenantLinks) else None
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers.update(self.codec.authorize(api_key))
        self._continues: Literal["text", "no"] | None = continues
        self._context_tokens = context_tokens
        self._max_open = max_open
        self._silence_s = silence_s
        self._clock = clock
        self._open: set[object] = set()
        self._capabilities: TextCapabilities | None = None
        self._probing = asyncio.Lock()

    async def capabilities(self) -> TextCapabilities:
        async with self._probing:
            if self._capabilities is None:
                self._capabilities = await self._probe()
        return self._capabilities

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        self._check(request)
        continuation = UpstreamContinuation(self, request)
        self._open.add(continuation)
        try:
            await continuation.prefill(deadline_s)
        except BaseException:
            await continuation.close()
            raise
        return continuation

    def _check(self, request: TextRequest) -> None:
        if len(self._open) >= self._max_open:
            raise Full(f"{len(self._open)} requests to {self._link.name} are open", retry_after_s=1.0)
        if request.sampling.grammar or request.sampling.json_schema is not None:
            raise Unsupported("grammars cannot be sent to this server", field="grammar")

    async def relayed(self, request: TextRequest, stop: Sequence[str], deadline_s: float) -> bytes:
        """The whole answer in the server's own bytes. Raises what a reply over 399 stands for."""
        self._check(request)
        call = self.codec.call(self.model, request, stream=False, stop=stop)
        place = object()
        self._open.add(place)
        try:
            headers = {**self._headers, **call.headers, **_traced(request)}
            reply = await self._link_for(request).exchange(call.path, headers, call.body, deadline_s)
        finally:
            self._open.discard(place)
        if reply.status > 399:
            raise self.codec.error(reply.status, reply.headers, reply.body)
        return reply.body

    async def relayed_lines(self, request: TextRequest, stop: Sequence[str]) -> AsyncIterator[bytes]:
        """The streamed answer in the server's own bytes, as they come."""
        self._check(request)
        call = self.codec.call(self.model, request, stream=True, stop=stop)
        chunks: Any = self._lines(call, request)
        place = object()
        self._open.add(place)
        try:
            async for chunk in chunks:
                yield chunk
        except RejectedStatus as err:
            raise self.codec.error(err.status, err.headers, err.body) from err
        finally:
            self._open.discard(place)
            await chunks.aclose()

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        raise Unsupported("this server does not share its tokenizer", next_step="count with another engine")

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        if not self.codec.embeddings_path:
            raise Unsupported(f"{self._link.name} makes no embeddings", next_step="use another target", field="model")
        answer = await self._call(self.codec.embeddings_path, {"model": self.model, "input": list(texts)})
        try:
            vectors = [tuple(float(value) for value in one["embedding"]) for one in answer["data"]]
        except (KeyError, TypeError, ValueError) as err:
            raise ProtocolError(f"{self._link.name} sent embeddings that are none", field="data") from err
        if len(vectors) != len(texts) or not all(vectors):
            raise ProtocolError(f"{self._link.name} sent no vector for some text", field="data")
        return vectors

    def load(self) -> EngineLoad:
        running = len(self._open)
        return EngineLoad(running, 0, 1.0 if running >= self._max_open else 0.0)

    async def close(self) -> None:
        for continuation in tuple(self._open):
            if isinstance(continuation, UpstreamContinuation):
                await continuation.close()

    def forget(self, continuation: UpstreamContinuation) -> None:
        """A continuation closed itself."""
        self._open.discard(continuation)

    @property
    def clock(self) -> Clock:
        return self._clock

    async def call(self, request: TextRequest) -> WireCall:
        """One streamed request. Raises Unsupported when an answer cannot be continued there."""
        if request.prefix and (await self.capabilities()).continues == "no":
            raise Unsupported(f"{self._link.name} cannot continue an answer", next_step="start the answer there")
        return self.codec.call(self.model, request, stream=True)

    async def deltas(self, call: WireCall, request: TextRequest) -> AsyncIterator[UpstreamDelta]:
        """What the chunks of one stream say, until it says that it ended or is over."""
        reader = self.codec.reader(request)
        try:
            async with aclosing(self._lines(call, request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    for delta in reader.feed(chunk):
                        yield delta
                    if reader.ended:
                        return
        except RejectedStatus as err:
            raise self.codec.error(err.status, err.headers, err.body) from err

    def _lines(self, call: WireCall, request: TextRequest) -> AsyncIterator[bytes]:
        headers = {**self._headers, "accept": "text/event-stream", **call.headers, **_traced(request)}
        return self._link_for(request).lines(call.path, headers, call.body, self._silence_s)

    def _link_for(self, request: TextRequest) -> Link:
        return self._link if self._by_tenant is None else self._by_tenant.for_tenant(request.tenant)

    async def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        reply = await self._link.exchange(path, self._headers, data, CALL_S, method)
        if reply.status > 399:
            raise self.codec.error(reply.status, reply.headers, reply.body)
        try:
            return json.loads(reply.body)
        except ValueError as err:
            raise ProtocolError(f"{self._link.name} sent something that is not JSON", field="body") from err

    async def _probe(self) -> TextCapabilities:
        known = self.codec.features
        if known is not None:
            return self._told(self._continues or known.continues, known.logprobs, known.tools, known.images)
        continues, logprobs = self._continues, False
        try:
            plain = await self._short(logprobs=True)
            logprobs = bool(plain.pieces)
        except (BadRequest, Unsupported):
            plain = await self._short()
        if continues is None:
            continues = await self._probe_continuing(plain)
        told = self._told(continues, logprobs, await self._takes_tools(), True)
        return evolve(told, context_tokens=await self._probe_context(), embeds=await self._probe_embeds())

    def _told(self, continues: Literal["text", "no"], logprobs: bool, tools: bool, images: bool) -> TextCapabilities:
        return TextCapabilities(
            vocabulary=None,
            template=None,
            context_tokens=self._context_tokens,
            continues=continues,
            grammar=False,
            logprobs=logprobs,
            embeds=bool(self.codec.embeddings_path) and "embed" in self.model.lower(),
            images=images,
            tools=tools,
        )

    async def _probe_continuing(self, plain: UpstreamDelta) -> Literal["text", "no"]:
        """A continued turn has fewer prompt tokens than a new one, or counts on; an ignored wish does neither.

        llama-server continues every last turn of the assistant, asked or not, and says it again in whole answers.
        """
        try:
            continued = await self._short(prefix=(_COUNTED,))
        except MidstreamError as err:
            if isinstance(err, Full | LinkClosed | LinkTimeout):
                raise
            return "no"
        if plain.usage and continued.usage and continued.usage.prompt_tokens < plain.usage.prompt_tokens:
            return "text"
        made = continued.text.removeprefix(_COUNTED.data.decode())
        return "text" if made.strip().lower().startswith("six") else "no"

    async def _takes_tools(self) -> bool:
        """Servers without a tool parser refuse them."""
        try:
            await self._short(tools=True)
        except (BadRequest, Unsupported, ProtocolError):
            return False
        return True

    async def _probe_embeds(self) -> bool:
        """One short text; a server without embeddings, or without them for this model, refuses it."""
        try:
            await self.embed(("a",))
        except MidstreamError as err:
            if isinstance(err, Full | LinkClosed):
                raise
            return False
        return True

    async def _short(
        self, *, logprobs: bool = False, prefix: tuple[Token, ...] = (), tools: bool = False
    ) -> UpstreamDelta:
        """Two tokens after a conversation that counts; with `prefix` its last turn is continued."""
        said = () if prefix else (Message("assistant", _COUNTED.data.decode()),)
        sampling = Sampling(max_tokens=2 + len(prefix), logprobs=1 if logprobs else 0)
        request = TextRequest(self.model, (*_COUNTING, *said), sampling, prefix=prefix, tools=(_TOOL,) if tools else ())
        call = self.codec.call(self.model, request, stream=False)
        reply = await self._link.exchange(call.path, {**self._headers, **call.headers}, call.body, CALL_S)
        if reply.status > 399:
            raise self.codec.error(reply.status, reply.headers, reply.body)
        return self.codec.whole(reply.body)

    async def _probe_context(self) -> int:
        try:
            listed = (await self._call(self.codec.models_path, None))["data"]
            mine = next(one for one in listed if one.get("id") == self.model)
            found = mine.get("max_model_len") or mine.get("context_window") or (mine.get("meta") or {}).get("n_ctx")
            return int(found) if found else self._context_tokens
        except (MidstreamError, KeyError, TypeError, ValueError, AttributeError, StopIteration):
            return self._context_tokens


class UpstreamContinuation(PumpedContinuation):
    """One stream of a model server. usage: the server's own count, once the stream ended."""

    extend_s = 300.0

    def __init__(self, engine: UpstreamEngine, request: TextRequest) -> None:
        super().__init__(request.prefix)
        self.usage: Usage | None = None
        self._engine = engine
        self._request = request
        self._room = asyncio.Event()

    async def _open(self) -> None:
        if self._next < self._request.sampling.max_tokens:
            request = evolve(self._request, prefix=tuple(self._prefix))
            call = await self._engine.call(request)
            self._pump = asyncio.create_task(self._run(call, request), name="upstream")
        else:
            self._end("length")

    def _left(self) -> None:
        self._engine.forget(self)

    def _taken(self) -> None:
        self._room.set()

    async def _run(self, call: WireCall, request: TextRequest) -> None:
        finish: FinishReason | None = None
        try:
            async with aclosing(self._engine.deltas(call, request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.usage is not None:
                        self._count(delta.usage)
                    finish = finish or delta.finish
                    for piece in _pieces(delta):
                        await self._add(
                            piece.data,
                            logprob=piece.logprob,
                            alternatives=piece.alternatives if self._request.sampling.logprobs else (),
                        )
                    for call_piece in delta.calls:
                        await self._add(b"", call=call_piece)
        except LinkClosed as err:
            # After the finish reason only usage and [DONE] are missing.
            self._failure = None if finish else err
        except MidstreamError as err:
            self._failure = err
        if finish is not None:
            self._end(finish)
        elif self._failure is None:
            self._failure = LinkClosed("the server ended the stream without a finish reason")
        self._news.set()

    async def _add(self, data: bytes, **more: Any) -> None:
        while len(self._ready) >= BUFFERED_TOKENS:
            self._room.clear()
            await self._room.wait()
        self._put(Token(index=self._next, id=None, data=data, at_s=self._engine.clock(), **more))
        self._next += 1

    def _end(self, finish: FinishReason) -> None:
        self._put(Token(index=self._next, id=None, data=b"", finish=finish, at_s=self._engine.clock()))

    def _count(self, usage: Usage) -> None:
        self.usage = usage
        self.prompt_tokens, self.cached_tokens = usage.prompt_tokens, usage.cached_tokens


def _traced(request: TextRequest) -> dict[str, str]:
    return {HEADER: request.traceparent} if request.traceparent else {}


def _pieces(delta: UpstreamDelta) -> Sequence[UpstreamPiece]:
    """The chunk's tokens when they spell its text, else the text as one token."""
    if delta.pieces and b"".join(piece.data for piece in delta.pieces).decode("utf-8", "replace") == delta.text:
        return delta.pieces
    return (UpstreamPiece(delta.text.encode("utf-8", "replace"), None),) if delta.text else ()
