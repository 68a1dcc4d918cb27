"""Every text engine of the house, made ready for the contract suite: name -> asynchronous context manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from attrs import frozen

from engines.fakes_text import FakeTextEngine
from engines.llama_cpp import EmbeddedLlamaCpp, LlamaCppEngine
from engines.llama_server import EmbeddedLlamaServer, LlamaServerEngine, LlamaServerUrlEngine
from engines.onnx_genai import OnnxGenaiEngine
from engines.peer import PeerEngine
from engines.peer_host import HostedStreams, serve_stream
from engines.port import TextEngine
from engines.queued_text import QueuedTextEngine
from engines.slowed_text import SlowedTextEngine
from engines.upstream import UpstreamEngine
from links.http import HttpLink
from links.http_server import serve
from links.memory import MemoryStream, memory_stream_pair
from links.port import FrameRoute, FrameStream, Request
from tests.contract.make_genai_model import BUILT_MODEL
from tests.contract.word_server import word_server

ModelFile = Callable[[str], Path]
HANDOFF_PATH = "/midstream/v1/handoff"


@frozen
class Made:
    """An engine with what the suite has to know about it.

    slots: generations at once. room: how many more may wait for a slot before the next one is refused. by_text: it
    gives text alone: no ids and no tokenizer, counts come at the end, and the end of an answer is a mark of its own.
    """

    engine: TextEngine
    exact: bool
    slots: int = 2
    room: int = 0
    by_text: bool = False


class MemoryPeers:
    """Connections in memory to one host; `cut()` breaks those that are open, `down` refuses new ones."""

    def __init__(self, engine: TextEngine, streams: HostedStreams | None = None) -> None:
        self.engine = engine
        self.streams = streams
        self.down = False
        self.opened: list[MemoryStream] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> FrameStream:
        from protocol.errors import LinkClosed

        if self.down:
            raise LinkClosed("the host is gone")
        here, there = memory_stream_pair()
        self.opened.append(here)
        task = asyncio.create_task(serve_stream(lambda model: self.engine, there, streams=self.streams))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return here

    def cut(self) -> None:
        for stream in self.opened:
            stream.cut()

    async def close(self) -> None:
        for stream in self.opened:
            await stream.close()
        if self._serving:
            await asyncio.wait(self._serving)
        if self.streams is not None:
            await self.streams.close()


@asynccontextmanager
async def websocket_peer(engine: TextEngine) -> AsyncIterator[Callable[[], object]]:
    """Opens frame streams to a real server on loopback that hosts `engine`."""

    async def handle(request: Request, stream: FrameStream) -> None:
        await serve_stream(lambda model: engine, stream)

    server = await serve([], [FrameRoute(HANDOFF_PATH, handle)], host="127.0.0.1", port=0, origin_check=True)
    link = HttpLink("peer", f"http://127.0.0.1:{server.port}")
    try:
        yield lambda: link.open(HANDOFF_PATH)
    finally:
        await link.close()
        await server.close()


@asynccontextmanager
async def fake(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = FakeTextEngine(tokens_per_s=2000, capacity=2, context_tokens=512)
    yield Made(engine, exact=True)
    await engine.close()


@asynccontextmanager
async def slowed(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = SlowedTextEngine(FakeTextEngine(tokens_per_s=2000, capacity=2, context_tokens=512), 1.5)
    yield Made(engine, exact=True)
    await engine.close()


@asynccontextmanager
async def queued(model_file: ModelFile) -> AsyncIterator[Made]:
    inner = FakeTextEngine(tokens_per_s=2000, capacity=2, context_tokens=512)
    engine = QueuedTextEngine(inner, slots=2, wait_target_s=1.0)
    yield Made(engine, exact=True, room=2)
    await engine.close()


@asynccontextmanager
async def openai_compatible(model_file: ModelFile) -> AsyncIterator[Made]:
    async with word_server() as url:
        link = HttpLink("words", url)
        engine = UpstreamEngine(link, "words", max_open=2)
        yield Made(engine, exact=True, by_text=True)
        await engine.close()
        await link.close()


@asynccontextmanager
async def peer_in_memory(model_file: ModelFile) -> AsyncIterator[Made]:
    peers = MemoryPeers(FakeTextEngine(tokens_per_s=2000, capacity=2, context_tokens=512))
    engine = PeerEngine(peers.open)
    yield Made(engine, exact=True)
    await engine.close()
    await peers.close()


@asynccontextmanager
async def peer_that_speaks_early(model_file: ModelFile) -> AsyncIterator[Made]:
    peers = MemoryPeers(FakeTextEngine(tokens_per_s=2000, capacity=2, context_tokens=512, speaks_early=True))
    engine = PeerEngine(peers.open)
    yield Made(engine, exact=True)
    await engine.close()
    await peers.close()


@asynccontextmanager
async def peer_over_websocket(model_file: ModelFile) -> AsyncIterator[Made]:
    fake = FakeTextEngine(tokens_per_s=2000, capacity=2, context_tokens=512)
    async with websocket_peer(fake) as open_stream:
        engine = PeerEngine(open_stream)  # type: ignore[arg-type]
        yield Made(engine, exact=True)
        await engine.close()


@asynccontextmanager
async def llama_server_in_process(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = LlamaServerEngine(model_file("smollm2-135m"), context_tokens=512, slots=2, in_process=True)
    yield Made(engine, exact=False)
    await engine.close()


@asynccontextmanager
async def llama_server_in_worker(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = LlamaServerEngine(model_file("smollm2-135m"), context_tokens=512, slots=2)
    yield Made(engine, exact=False)
    await engine.close()


@asynccontextmanager
async def llama_server_by_url(model_file: ModelFile) -> AsyncIterator[Made]:
    inner = EmbeddedLlamaServer(model_file("smollm2-135m"), context_tokens=512, slots=2, listen_port=0)
    link = HttpLink("llama-server", await inner.url(), keep_idle_s=1.0)
    engine = LlamaServerUrlEngine(link, api_key=await inner.api_key())
    yield Made(engine, exact=False)
    await engine.close()
    await link.close()
    await inner.close()


@asynccontextmanager
async def llama_cpp_in_process(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = EmbeddedLlamaCpp(model_file("smollm2-135m"), context_tokens=512, slots=2)
    yield Made(engine, exact=False)
    await engine.close()


@asynccontextmanager
async def llama_cpp_in_worker(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = LlamaCppEngine(model_file("smollm2-135m"), context_tokens=512, slots=2)
    yield Made(engine, exact=False)
    await engine.close()


@asynccontextmanager
async def onnx_genai_in_process(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = OnnxGenaiEngine(BUILT_MODEL, context_tokens=512, threads=1, slots=2, in_process=True)
    yield Made(engine, exact=True)
    await engine.close()


@asynccontextmanager
async def onnx_genai_in_worker(model_file: ModelFile) -> AsyncIterator[Made]:
    engine = OnnxGenaiEngine(BUILT_MODEL, context_tokens=512, threads=1, slots=2)
    yield Made(engine, exact=True)
    await engine.close()


ENGINES: dict[str, Callable[[ModelFile], AbstractAsyncContextManager[Made]]] = {
    "fake": fake,
    "slowed": slowed,
    "queued": queued,
    "openai-compatible": openai_compatible,
    "peer-memory": peer_in_memory,
    "peer-early": peer_that_speaks_early,
    "peer-websocket": peer_over_websocket,
    "llama-server": llama_server_in_process,
    "llama-server-worker": llama_server_in_worker,
    "llama-server-url": llama_server_by_url,
    "llama-cpp": llama_cpp_in_process,
    "llama-cpp-worker": llama_cpp_in_worker,
    "onnx-genai": onnx_genai_in_process,
    "onnx-genai-worker": onnx_genai_in_worker,
}
