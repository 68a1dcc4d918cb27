"""The agent's text side against the coordinator's: whose model is asked about, and moves that go by token ids."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from agent.cloud_link import CloudLink
from agent.compose_text import TextSide, text_mount
from agent.health import Health
from cloud_stub.text import TextHouse
from engines.catalogue import load_catalogue
from engines.fakes_text import FakeTextEngine
from engines.llama_server import LlamaServerEngine, LlamaServerUrlEngine
from engines.port import Continuation, TextEngine
from engines.store import ModelStore
from engines.wrapping import WrappedContinuation, WrappedTextEngine
from gateway.door_limits import DoorLimits
from gateway.memory import TextMemory
from links.http import HttpLink
from links.http_server import serve
from protocol.clock import wall_now
from protocol.events import HandedOver, RecordingEmit, TextDone, ignore
from protocol.policy import MigrationPolicy, Policy
from protocol.text import TextRequest, Token
from tests.contract.word_server import word_server
from tests.unit.agent.houses import config_for

MODEL = "smollm2-135m"
COUNT = 48
MOVES_SOON = Policy(
    migration=MigrationPolicy(min_tokens=6, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=20.0)
)


class Watched(WrappedTextEngine):
    """A text engine whose requests are kept: every token that it was given to prefill."""

    def __init__(self, inner: TextEngine) -> None:
        super().__init__(inner)
        self.given: list[Token] = []
        self.tokenized = 0

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        self.given.extend(request.prefix)
        return WatchedContinuation(self, await self._inner.prepare(request, deadline_s))


class WatchedContinuation(WrappedContinuation):
    """Keeps what extends the answer."""

    def __init__(self, engine: Watched, inner: Continuation) -> None:
        super().__init__(inner)
        self._engine = engine

    async def extend(self, tokens: Sequence[Token]) -> None:
        self._engine.given.extend(tokens)
        await self._inner.extend(tokens)


@asynccontextmanager
async def device_of(
    engines: dict[str, TextEngine], folder: Path, emit: RecordingEmit, **flags: Any
) -> AsyncIterator[tuple[TextSide, str]]:
    """The agent's text side, served, with a coordinator's text house behind its cloud link."""
    coordinator = TextHouse(engines)
    front = coordinator.front(ignore)
    remote = await serve(
        front.routes, [coordinator.handoff(lambda request: "client")], host="127.0.0.1", port=0, origin_check=False
    )
    config = config_for(folder, **flags)
    cloud = CloudLink(lambda err: None)
    await cloud.point_to(HttpLink("cloud", f"http://127.0.0.1:{remote.port}"))
    store = ModelStore(config.models_dir, load_catalogue())
    health = Health(time.monotonic)
    side = TextSide(config, store, cloud, health, lambda: MOVES_SOON, emit)
    memory = TextMemory(config.memory, folder / "text", store)
    limits = DoorLimits(folder, lambda: MOVES_SOON, emit, time.monotonic, wall_now)
    mount = text_mount(side, memory, limits, lambda: MOVES_SOON, emit, time.monotonic, health)
    server = await serve(mount.routes, origin_check=True)
    try:
        await mount.start()
        await side.learn_cloud()
        yield side, f"http://127.0.0.1:{server.port}"
    finally:
        await mount.stop()
        await server.close()
        await cloud.close()
        await front.stop()
        await coordinator.close()
        await remote.close()


async def test_each_cloud_model_is_a_target_that_is_asked_by_name(tmp_path: Path) -> None:
    engines: dict[str, TextEngine] = {name: FakeTextEngine(vocabulary=f"words of {name}") for name in ("a", "b")}
    async with (
        device_of(engines, tmp_path, RecordingEmit()) as (side, url),
        openai.DefaultAsyncHttpxClient(base_url=url, timeout=20.0) as client,
    ):
        found = {next(iter(target.models)): target for target in side.targets()}
        assert set(found) == {"a", "b"} == side.cloud_models
        for name in ("b", "a"):
            capabilities = await found[name].engine.capabilities()
            assert capabilities.vocabulary == f"words of {name}"
        for name in ("a", "b"):
            body = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "logprobs": True}
            reply = await client.post("/v1/chat/completions", json=body)
            assert (reply.status_code, reply.headers["x-midstream-target"]) == (200, "cloud")
        await side.learn_cloud()
        assert [target.engine for target in side.targets()] == [found[name].engine for name in ("a", "b")]


async def test_an_own_server_of_a_model_that_no_store_knows(tmp_path: Path) -> None:
    """text_engine openai_compat: the device's target is a server by URL."""
    async with word_server() as upstream:
        flags = {"text_engine": "openai_compat", "text_url": upstream, "text_model": "words"}
        async with (
            device_of({}, tmp_path, RecordingEmit(), **flags) as (side, url),
            openai.DefaultAsyncHttpxClient(base_url=url, timeout=20.0) as client,
        ):
            assert (side.models, side.loading(), side.probes(), side.digests()) == (("words",), set(), (), set())
            body = {"model": "words", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.json()["choices"][0]["message"]["content"] == " w0 w1 w2 w3"
            assert reply.headers["x-midstream-target"] == "device"


async def test_a_llama_server_that_runs_elsewhere_is_used_in_place_of_an_own_one(tmp_path: Path) -> None:
    """A server that speaks OpenAI alone is no llama-server: told as a warning, and the link is closed again."""
    async with word_server() as upstream:
        flags = {"text_engine": "llama_server", "text_url": upstream, "text_model": MODEL}
        async with device_of({}, tmp_path, RecordingEmit(), **flags) as (side, _):
            assert (side.models, side.loading()) == ((), set())
            assert [warning.name for warning in side._health.warnings] == ["text_model"]
            assert isinstance(side._make(MODEL, 0), LlamaServerUrlEngine)


async def test_a_move_to_the_same_weights_goes_by_ids(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    """The first answer of a fresh agent, so nothing was asked of the cloud before."""
    path, emit = model_file(MODEL), RecordingEmit()
    there = Watched(LlamaServerEngine(path, model=MODEL, context_tokens=512, threads=1))
    await there.capabilities()
    flags = {"models_dir": str(path.parent.parent), "text_model": MODEL, "text_threads": 1, "context_tokens": 512}
    async with (
        # Slowed, so that the cloud has the time to prepare.
        device_of({MODEL: there}, tmp_path, emit, slowdown=8.0, **flags) as (side, url),
        openai.DefaultAsyncHttpxClient(base_url=url, timeout=50.0) as client,
    ):
        assert [target.name for target in side.targets()] == ["device", "cloud"]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me about the Rhine."}]}
        reply = await client.post("/v1/chat/completions", json={**body, "max_tokens": COUNT, "temperature": 0})
        assert reply.status_code == 200, reply.text
    (moved,) = [event for event in emit.events if isinstance(event, HandedOver)]
    (done,) = [event for event in emit.events if isinstance(event, TextDone)]
    assert (moved.source, moved.target) == ("device", "cloud")
    assert done.sides == (("device", moved.index), ("cloud", done.completion_tokens - moved.index))
    assert [token.index for token in there.given] == list(range(moved.index))
    assert all(token.id is not None for token in there.given), "the cloud prefilled from text"
    assert (
        b"".join(token.data for token in there.given).decode()
        in json.loads(reply.text)["choices"][0]["message"]["content"]
    )
