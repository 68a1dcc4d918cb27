"""The unmodified openai client against the text way behind the real HTTP server, with a fake and with a real GGUF."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from attrs import frozen

from engines.fakes_text import FakeTextEngine
from engines.llama_server import LlamaServerEngine
from engines.port import TextEngine
from gateway.targets import Target
from tests.route import openai_scenarios
from tests.route.text_house import house

T = TypeVar("T")


@frozen
class Served:
    """A house on a loop of its own thread, with one engine behind it."""

    base_url: str
    model: str
    engine: TextEngine
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the house's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def idle(self) -> bool:
        """Nothing generates."""
        return self.engine.load().running == 0


@pytest.fixture(scope="module", params=["fake", "smollm2-135m"])
def served(request: pytest.FixtureRequest, model_file: Callable[[str], Path]) -> Iterator[Served]:
    """One house per engine for the whole module: loading a real model takes a while."""
    model = str(request.param)
    path = None if model == "fake" else model_file(model)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="asyncio_house")
    thread.start()
    stop = asyncio.Event()
    ready: asyncio.Future[Served] = loop.create_future()

    async def live() -> None:
        engine: TextEngine = (
            FakeTextEngine(answer_tokens=500, tokens_per_s=300)
            if path is None
            else LlamaServerEngine(path, model=model, context_tokens=1024, embeds=True)
        )
        try:
            # Its worker process and sockets live as long as the module, so they begin before the first test.
            await engine.capabilities()
            async with house([Target("device", True, engine, frozenset({model}))]) as one:
                ready.set_result(Served(one.base_url, model, engine, loop))
                await stop.wait()
        finally:
            await engine.close()

    async def wait() -> Served:
        return await ready

    running = asyncio.run_coroutine_threadsafe(live(), loop)
    yield asyncio.run_coroutine_threadsafe(wait(), loop).result(30)
    loop.call_soon_threadsafe(stop.set)
    running.result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("scenario", openai_scenarios.SCENARIOS, ids=lambda one: one.__name__)
async def test_openai_client(served: Served, scenario: Callable[..., Awaitable[None]]) -> None:
    await scenario(served.base_url, None, served.model)


@pytest.mark.parametrize("scenario", openai_scenarios.REAL_SCENARIOS, ids=lambda one: one.__name__)
async def test_openai_client_with_a_real_model(served: Served, scenario: Callable[..., Awaitable[None]]) -> None:
    if served.model == "fake":
        pytest.skip("the fake cannot be held to a schema")
    await scenario(served.base_url, None, served.model)


async def test_openai_client_cancel(served: Served) -> None:
    await openai_scenarios.cancelling_frees_the_engine(served.base_url, None, served.model, served.idle)
