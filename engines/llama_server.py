"""llama.cpp's server as a TextEngine: embedded through xllamacpp, or any llama-server by URL.

The embedded server listens on a Unix socket in a folder of its own (mode 0700), with a key made at each start, and
nowhere else. Its own API is used rather than the binding's callback, which tells no ids without probabilities.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from engines.embedding_windows import joined, windows
from engines.gguf import pools
from engines.llama_server_embed import embed, embeds_texts
from engines.llama_server_local import LocalServer, events, json_object, refused
from engines.llama_server_stream import NativeServer, ServerContinuation
from engines.llama_server_wire import NativePrompt, completion_body, template_messages
from engines.pieces import check_bytes, is_piece, unfinished_bytes
from engines.port import Continuation, EngineLoad
from engines.registry import repair_step
from engines.slots import Slots
from engines.socket_folder import SocketFolder
from engines.text_admission import PREFILL_BATCH_TOKENS
from engines.unix_http import local_request
from engines.vocabulary import Vocabulary, read_vocabulary
from engines.wrapping import WrappedTextEngine
from links.port import Link, RejectedStatus
from profiles.facts import usable_cores
from protocol.clock import Clock
from protocol.errors import BadRequest, EngineError, ProtocolError, Unsupported
from protocol.extras import install_step
from protocol.text import Message, Prompt, Sampling, TextCapabilities, TextRequest, Token

START_S = 30.0
CALL_S = 30.0


def default_threads() -> int:
    """All cores but one: with every core taken, decoding collapses under any other load."""
    return max(1, usable_cores() - 1)


class ServerEngine(ABC):
    """What the embedded server and a server by URL have in common. `slots` bounds the open generations."""

    def __init__(self, *, slots: int, clock: Clock) -> None:
        self._slots = Slots(slots, clock)
        self._clock = clock
        self._running: set[ServerContinuation] = set()
        self._context_limit: int | None = None
        self._embed_tokens: int | None = None
        self._vocabulary: Vocabulary | None = None
        self._capabilities: TextCapabilities | None = None
        self._probing = asyncio.Lock()

    @abstractmethod
    async def _native(self) -> NativeServer:
        """The server, started or asked."""

    async def capabilities(self) -> TextCapabilities:
        native = await self._native()
        async with self._probing:
            if self._capabilities is None:
                found = await probe(native, self._vocabulary)
                # The server rounds its context up; what was asked for is what holds.
                tokens = min(found.context_tokens, self._context_limit or found.context_tokens)
                self._capabilities = evolve(found, context_tokens=tokens)
        return self._capabilities

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        place = self._slots.enter()
        continuation: ServerContinuation | None = None
        try:
            capabilities = self._capabilities or await self.capabilities()
            native = await self._native()
            continuation = ServerContinuation(
                native,
                prompt=await self._native_prompt(native, request.prompt),
                prefix=request.prefix,
                sampling=request.sampling,
                context_tokens=capabilities.context_tokens,
                vocabulary=self._vocabulary,
                ids_of=self._prefix_ids,
                on_close=lambda over: self._leave(place, over),
                clock=self._clock,
            )
            self._running.add(continuation)
            await continuation.prefill(deadline_s)
        except BaseException:
            if continuation is not None:
                await continuation.close()
            self._slots.leave(place)
            raise
        return continuation

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await _tokenize(await self._native(), _text(data), special=False)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        if not (await self.capabilities()).embeds:
            raise Unsupported("this model serves text, not embeddings", next_step="name an embedding model")
        native = await self._native()
        if self._embed_tokens is None:
            return await embed(native, list(texts))
        parts = windows([await _tokenize(native, text, special=True) for text in texts], self._embed_tokens)
        return joined(parts, await embed(native, [part.ids for part in parts]), len(texts))

    def load(self) -> EngineLoad:
        return self._slots.load()

    async def close(self) -> None:
        """Cancel what runs."""
        for continuation in tuple(self._running):
            await continuation.close()

    def _leave(self, place: object, over: ServerContinuation) -> None:
        self._running.discard(over)
        self._slots.leave(place)

    async def _native_prompt(self, native: NativeServer, prompt: Prompt) -> NativePrompt:
        """Ids as given, or a text that the server tokenises when it is asked to complete it."""
        if isinstance(prompt, str):
            # The server refuses a text without anything, but not the begin mark that some models put before it.
            return (prompt,) if prompt else await _tokenize(native, prompt, special=True)
        messages = [part for part in prompt if isinstance(part, Message)]
        if not messages:
            return tuple(part for part in prompt if isinstance(part, int))
        answer = await native.call("/apply-template", {"messages": template_messages(messages)}, CALL_S)
        return (str(answer.get("prompt", "")),)

    async def _prefix_ids(self, tokens: Sequence[Token]) -> Sequence[int]:
        """The answer so far in own ids: as given where they are this vocabulary's, else from the bytes."""
        tokens = [token for token in tokens if token.finish is None or token.data]
        if not tokens:
            return ()
        data = b"".join(token.data for token in tokens)
        ids = [token.id for token in tokens if token.id is not None]
        native = await self._native()
        if len(ids) == len(tokens) and await self._own(native, ids, tokens, data):
            return ids
        check_bytes(tokens)
        return await _tokenize(native, _text(data), special=False)

    async def _own(self, native: NativeServer, ids: Sequence[int], tokens: Sequence[Token], data: bytes) -> bool:
        if self._vocabulary is not None:
            pieces = [self._vocabulary.piece(one) for one in ids]
            return all(is_piece(piece, token) for piece, token in zip(pieces, tokens, strict=True))
        if not all(token.data for token in tokens):
            return False
        shown = await native.call("/detokenize", {"tokens": list(ids)}, CALL_S)
        return bool(str(shown.get("content", "")).encode() == data)


class EmbeddedLlamaServer(ServerEngine):
    """llama-server inside this process. A native crash takes the process along: LlamaServerEngine isolates it.

    Args as LlamaServerEngine, and
        listen_port: listen on 127.0.0.1 instead of the Unix socket, for LlamaServerUrlEngine; 0 takes a free port.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        context_tokens: int = 2048,
        threads: int = 0,
        slots: int = 2,
        chat_template: str | None = None,
        embeds: bool = False,
        batch_tokens: int = PREFILL_BATCH_TOKENS,
        listen_port: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(slots=slots, clock=clock)
        self._path = Path(model_path)
        self._context_limit = context_tokens
        self._embed_tokens = batch_tokens
        taken = threads or default_threads()
        self._settings = (context_tokens, taken, slots, chat_template, embeds, batch_tokens, listen_port)
        self._embedded: Embedded | None = None
        self._loading = asyncio.Lock()
        self._stopped = False

    async def url(self) -> str:
        """Where the server listens; with `listen_port` an http address."""
        return (await self._load()).address

    async def api_key(self) -> str:
        """What the server wants as a bearer token; made anew at every start."""
        return (await self._load()).key

    async def close(self) -> None:
        self._stopped = True
        await super().close()
        async with self._loading:
            embedded, self._embedded = self._embedded, None
        if embedded is not None:
            await asyncio.to_thread(embedded.stop)

    async def _native(self) -> NativeServer:
        return await self._load()

    async def _load(self) -> Embedded:
        async with self._loading:
            if self._stopped:
                raise EngineError(f"the engine of {self._path.name} was closed")
            if self._embedded is None:
                # The server starts even from a broken file with a bare message, so the file is read here first.
                self._vocabulary = await asyncio.to_thread(read_vocabulary, self._path)
                self._embedded = await asyncio.to_thread(Embedded, self._path, *self._settings)
                await self._embedded.begun()
            return self._embedded


class LlamaServerUrlEngine(ServerEngine):
    """Any llama-server at the other end of a Link.

    Args:
        link: its base URL is the server's.
        model_file: the same GGUF file here, where there is one: then ids may cross to other engines of that model.
        slots: generations that this engine runs at once; None asks the server.
    """

    def __init__(
        self,
        link: Link,
        *,
        api_key: str | None = None,
        model_file: Path | None = None,
        slots: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(slots=slots or 1, clock=clock)
        self._ask_slots = slots is None
        self._server = _Remote(link, api_key)
        self._model_file = model_file
        self._known = asyncio.Lock()
        self._asked = False

    async def _native(self) -> NativeServer:
        async with self._known:
            if not self._asked:
                if self._model_file is not None and self._vocabulary is None:
                    self._vocabulary = await asyncio.to_thread(read_vocabulary, self._model_file)
                if self._ask_slots:
                    props = await self._server.call("/props", None, CALL_S)
                    self._slots.count = max(1, int(props.get("total_slots") or 1))
                self._asked = True
        return self._server


class LlamaServerEngine(WrappedTextEngine):
    """A GGUF model on an embedded llama-server, in a child process unless `in_process`.

    Args:
        model_path: the GGUF file.
        model: name of the model in messages.
        context_tokens: room for prompt and answer of one generation (the server's n_ctx is this times `slots`).
        threads: 0 takes all cores but one.
        slots: generations at once; more are refused with Full.
        chat_template: Jinja text for files that carry none.
        batch_tokens: prompt tokens per batch, which is what a cancelled prefill still runs; see prefill_batch.
        in_process: run here; a native crash then ends this process.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        model: str = "",
        context_tokens: int = 2048,
        threads: int = 0,
        slots: int = 2,
        chat_template: str | None = None,
        embeds: bool = False,
        batch_tokens: int = PREFILL_BATCH_TOKENS,
        in_process: bool = False,
    ) -> None:
        from engines.llama_server_child import ChildLlamaServer

        self.model = model or Path(model_path).stem
        settings: dict[str, Any] = {
            "context_tokens": context_tokens,
            "threads": threads,
            "slots": slots,
            "chat_template": chat_template,
            "embeds": embeds,
            "batch_tokens": batch_tokens,
        }
        if in_process:
            super().__init__(EmbeddedLlamaServer(model_path, **settings))
        else:
            super().__init__(ChildLlamaServer(model_path, name=self.model, **settings))


async def probe(native: NativeServer, vocabulary: Vocabulary | None) -> TextCapabilities:
    """What the server can do, from its properties, one answer of one token under a grammar, and one embedding."""
    props = await native.call("/props", None, CALL_S)
    try:
        context_tokens = int(props["default_generation_settings"]["n_ctx"])
    except (KeyError, TypeError, ValueError) as err:
        raise ProtocolError("llama-server does not tell its context size", field="n_ctx") from err
    template = props.get("chat_template")
    grammar = logprobs = False
    ids = True
    try:
        body = completion_body(
            await _tokenize(native, "a", special=True), Sampling(grammar='root ::= "a"', logprobs=1), 1
        )
        answer = await native.call("/completion", {**body, "stream": False}, CALL_S)
        grammar = answer.get("content") == "a"
        logprobs = bool(answer.get("completion_probabilities"))
        ids = bool(answer.get("tokens"))
    except EngineError:
        pass  # an embedding model generates nothing
    if not ids:
        raise EngineError("this llama-server does not return token ids", next_step="use a newer llama-server")
    return TextCapabilities(
        vocabulary=vocabulary.digest if vocabulary else None,
        template=hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        context_tokens=context_tokens,
        continues="ids",
        grammar=grammar,
        logprobs=logprobs,
        embeds=await embeds_texts(native),
    )


async def _tokenize(native: NativeServer, text: str, *, special: bool) -> tuple[int, ...]:
    body = {"content": text, "add_special": special, "parse_special": special}
    answer = await native.call("/tokenize", body, CALL_S)
    try:
        return tuple(int(one) for one in answer["tokens"])
    except (KeyError, TypeError, ValueError) as err:
        raise ProtocolError("llama-server sent tokens that are none", field="tokens") from err


def _text(data: bytes) -> str:
    if unfinished_bytes(data):
        raise BadRequest("the text ends inside a character", field="prefix", next_step="cut at a character boundary")
    return data.decode("utf-8", "replace")


class _Remote:
    """NativeServer over a Link."""

    def __init__(self, link: Link, api_key: str | None) -> None:
        self._link = link
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def complete(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        chunks = self._link.lines("/completion", self._headers, json.dumps(body).encode(), CALL_S)
        try:
            async for chunk in events(chunks):
                yield chunk
        except RejectedStatus as err:
            raise refused(err.status, err.body) from err

    async def call(self, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Mapping[str, Any]:
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        reply = await self._link.exchange(path, self._headers, data, deadline_s, method)
        if reply.status > 399:
            raise refused(reply.status, reply.body)
        return json_object(reply.body)


class Embedded(LocalServer):
    """NativeServer in this process: the only user of xllamacpp. `threads` is above 0."""

    def __init__(
        self,
        model: Path,
        context_tokens: int,
        threads: int,
        slots: int,
        chat_template: str | None,
        embeds: bool,
        batch_tokens: int,
        listen_port: int | None,
    ) -> None:
        try:
            import xllamacpp
        except ImportError as err:
            problem = f"xllamacpp cannot be imported: {err}"
            raise EngineError(problem, next_step=repair_step(problem, install_step("llama"))) from err
        self._folder = SocketFolder("midstream-llama-")
        key = secrets.token_urlsafe(24)
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel = context_tokens * slots, slots
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_batch = params.n_ubatch = batch_tokens
        params.hostnames = [self._folder.path("llama.sock") if listen_port is None else "127.0.0.1"]
        params.port, params.api_keys = listen_port or 0, [key]
        params.n_threads_http = slots + 3
        params.verbosity, params.ui, params.fit_params, params.cache_ram_mib = 0, False, False, 0
        params.embedding = embeds
        if embeds and not pools(model):
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        if chat_template:
            params.chat_template = chat_template
        try:
            self._server = xllamacpp.Server(params)
        except (RuntimeError, ValueError, OSError) as err:
            self._folder.remove()
            raise EngineError(
                f"llama.cpp cannot load {model.name}", next_step="check the file with `midstream models verify`"
            ) from err
        super().__init__(str(self._server.listening_address), key)

    async def begun(self) -> None:
        """Wait until the server's own loop takes work: a stop that overtakes its start would never return, and hold
        the interpreter's lock meanwhile. The slots are asked for since their answer comes from that loop.
        """
        try:
            async with asyncio.timeout(START_S), local_request(self.address, "/slots", None, self.key) as reply:
                await reply.body()
        except TimeoutError as err:
            raise EngineError("llama-server does not begin to work", next_step="restart this process") from err

    def stop(self) -> None:
        """Blocking; waits for the batch that runs."""
        self._server = None
        self._folder.remove()


__all__ = [
    "EmbeddedLlamaServer",
    "LlamaServerEngine",
    "LlamaServerUrlEngine",
    "probe",
]
