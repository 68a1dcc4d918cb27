"""The truth of usage at the doors of both whole houses, over a provider that counts more tokens than it shows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from benchmarks.fake_upstream import Ledger, serve_upstream
from cloud_stub.compose import CoordinatorHouse
from gateway.providers import Providers, read_providers
from links.http import HttpLink
from links.tls import client_context
from tests.route.coordinator_house import settings
from tests.unit.agent.houses import RunningHouse, config_for

SHOWN, COUNTED = 3, 60
WORDS = f"n=a tokens={SHOWN} per={COUNTED // SHOWN}"
"""Every piece of this answer is twenty tokens to the provider, as with a model that reasons."""


@frozen
class Door:
    link: HttpLink
    ledger: Ledger
    headers: dict[str, str]

    def body(self, name: str, **more: Any) -> bytes:
        words = WORDS.replace("n=a", f"n={name}")
        return json.dumps({"model": "m", "messages": [{"role": "user", "content": words}], **more}).encode()

    async def whole(self, name: str, path: str = "/v1/chat/completions", **more: Any) -> Any:
        reply = await self.link.exchange(path, self.headers, self.body(name, **more), 10.0)
        assert reply.status == 200, reply.body
        return json.loads(reply.body)

    async def stream(self, name: str, path: str = "/v1/chat/completions", **more: Any) -> list[Any]:
        body = self.body(name, stream=True, **more)
        raw = b"".join([chunk async for chunk in self.link.lines(path, self.headers, body, 10.0)]).decode()
        lines = (line.removeprefix("data: ") for line in raw.splitlines())
        return [json.loads(line) for line in lines if line.startswith("{")]


@asynccontextmanager
async def agent_door(folder: Path, providers: Providers, ledger: Ledger) -> AsyncIterator[Door]:
    async with RunningHouse(evolve(config_for(folder), providers=providers)) as agent:
        yield Door(agent.link, ledger, {"content-type": "application/json"})


@asynccontextmanager
async def coordinator_door(folder: Path, providers: Providers, ledger: Ledger) -> AsyncIterator[Door]:
    house = CoordinatorHouse(settings(folder, providers=providers), lambda record: None)
    await house.start()
    context = client_context(house.authority.ca_pem, None, None)
    link = HttpLink("coordinator", f"https://127.0.0.1:{house.port}", ssl=context)
    try:
        key = house.authority.new_client_key or ""
        yield Door(link, ledger, {"content-type": "application/json", "x-api-key": key})
    finally:
        await link.close()
        await house.stop()


@pytest.fixture(params=[agent_door, coordinator_door], ids=["agent", "coordinator"])
async def door(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Door]:
    async with AsyncExitStack() as stack:
        port, ledger, stop = await serve_upstream()
        stack.callback(stop)
        table = {"name": "p", "kind": "openai", "base_url": f"http://127.0.0.1:{port}", "keyless": True}
        providers = read_providers([table], {"m": "p/there"})
        yield await stack.enter_async_context(request.param(tmp_path, providers, ledger))


async def test_usage_is_the_providers_own_for_who_asked_and_absent_otherwise(door: Door) -> None:
    """U1, U2, U3: asked upstream of every stream, told only to clients that asked, the same whole and streamed."""
    whole = (await door.whole("a"))["usage"]
    unasked = await door.stream("b")
    asked = await door.stream("c", stream_options={"include_usage": True})
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (12, COUNTED)
    assert all(event.get("usage") is None and event["choices"] for event in unasked)
    told = [event["usage"] for event in asked if event.get("usage")]
    assert [(one["prompt_tokens"], one["completion_tokens"]) for one in told] == [(12, COUNTED)]
    assert asked[-1]["choices"] == []
    assert [door.ledger.by_name[name].usage for name in "bc"] == [True, True], "also where no client asked"


async def test_clients_of_other_apis_get_the_providers_count_too(door: Door) -> None:
    message = await door.whole("d", "/v1/messages", max_tokens=100)
    events = await door.stream("e", "/v1/messages", max_tokens=100)
    answer = await door.whole("f", "/api/chat", stream=False)
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (12, COUNTED)
    assert [e["usage"]["output_tokens"] for e in events if e["type"] == "message_delta"] == [COUNTED]
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (12, COUNTED)
