"""Cache and conversations through a whole front door: what a client sees the second time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines.catalogue import shipped_catalogue
from engines.fakes_text import FakeTextEngine
from engines.store import ModelStore
from gateway.memory import TextMemory, remembering
from gateway.memory_settings import MemorySettings
from gateway.mount import GatewayPorts, build
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.port import Mount, Request, Response
from protocol.policy import Policy


class Door:
    """A text way with memory over a fake engine, asked as a client would."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        self._chat = next(route for route in mount.routes if route.path == "/v1/chat/completions")

    async def ask(self, text: str, **changes: object) -> tuple[Response, dict[str, object]]:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 12} | changes
        response = await self._chat.handle(Request("POST", "/v1/chat/completions", {}, body=json.dumps(body).encode()))
        data = response.body if isinstance(response.body, bytes) else b"".join([part async for part in response.body])
        return response, json.loads(data) if not changes.get("stream") else {"raw": data.decode()}


@pytest.fixture
async def engine() -> AsyncIterator[FakeTextEngine]:
    made = FakeTextEngine(answer_tokens=8)
    yield made
    await made.close()


@pytest.fixture
async def door(tmp_path: Path, engine: FakeTextEngine) -> AsyncIterator[Door]:
    memory = TextMemory(MemorySettings(cache="exact"), tmp_path, ModelStore(tmp_path / "models", shipped_catalogue()))
    target = Target("device", True, engine, frozenset({"m"}))
    ports = GatewayPorts(lambda: [target], Policy, cache=memory.cache, conversations=memory.conversations)
    mount = remembering(build(GatewaySettings(), ports), memory)
    await mount.start()
    yield Door(mount)
    await mount.stop()


def text_of(document: dict[str, object]) -> str:
    choices = document["choices"]
    assert isinstance(choices, list)
    return str(choices[0]["message"]["content"])


async def test_the_same_question_is_answered_from_the_cache_in_either_shape(door: Door) -> None:
    _, first = await door.ask("hello there")
    second_response, second = await door.ask("hello there")
    assert text_of(second) == text_of(first)
    assert second_response.headers["x-midstream-target"] == "cache"
    streamed, raw = await door.ask("hello there", stream=True)
    assert streamed.headers["x-midstream-target"] == "cache"
    events = [json.loads(line[6:]) for line in str(raw["raw"]).splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == text_of(first) and len([piece for piece in pieces if piece]) > 1


async def test_another_question_is_not_answered_from_the_cache(door: Door) -> None:
    await door.ask("hello there")
    response, _ = await door.ask("hello thera")
    assert response.headers["x-midstream-target"] == "device"


async def test_a_conversation_goes_on_by_its_id(door: Door, engine: FakeTextEngine) -> None:
    _, first = await door.ask("my name is Ada", conversation_id="c1")
    await door.ask("what is my name?", conversation_id="c1")
    prompt = engine.prepared[-1].prompt
    assert [getattr(turn, "content", "") for turn in prompt] == ["my name is Ada", text_of(first), "what is my name?"]
    await door.ask("what is my name?", conversation_id="c2")
    assert len(engine.prepared[-1].prompt) == 1


async def test_a_disk_that_cannot_be_used_leaves_the_way_open(tmp_path: Path, engine: FakeTextEngine) -> None:
    (tmp_path / "text").write_text("a file where the folder should be")
    memory = TextMemory(
        MemorySettings(cache="exact"), tmp_path / "text", ModelStore(tmp_path / "models", shipped_catalogue())
    )
    target = Target("device", True, engine, frozenset({"m"}))
    ports = GatewayPorts(lambda: [target], Policy, cache=memory.cache, conversations=memory.conversations)
    mount = remembering(build(GatewaySettings(), ports), memory)
    await mount.start()
    response, _ = await Door(mount).ask("hello")
    assert response.status == 200 and "no cache" in memory.why
    await mount.stop()


def test_semantic_without_its_models_says_what_to_pull(tmp_path: Path) -> None:
    memory = TextMemory(
        MemorySettings(cache="semantic"), tmp_path, ModelStore(tmp_path / "models", shipped_catalogue())
    )
    assert "midstream models pull" in memory.why
