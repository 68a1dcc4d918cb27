"""A provider that says what cannot be: half characters and counts no request has. Nothing of it outlives its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.catalogue import shipped_catalogue
from engines.key_vault import KeyVault
from engines.store import ModelStore
from gateway.memory import TextMemory, remembering
from gateway.memory_settings import MemorySettings
from gateway.mount import GatewayPorts, build
from gateway.provider_house import ProviderHouse
from gateway.providers import read_providers
from gateway.settings import GatewaySettings
from links.http_lean import LeanHttpLink
from links.port import Mount, Request
from protocol.policy import Policy
from protocol.provider_kinds import codec_of
from protocol.text import sayable

HALVES = "half \ud83d end \ud83d\ude00"
CALL = {"id": "c\udfff", "type": "function", "function": {"name": "f", "arguments": '{"a": "\ud800"}'}}


class Upstream:
    """Answers everything with halves of characters; keeps the bodies it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if not head.startswith(b"post"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = int(head.partition(b"content-length:")[2].partition(b"\r")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                data = _stream(body) if body.get("stream") else _whole(body)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(data))
                kind = b"text/event-stream" if body.get("stream") else b"application/json"
                writer.write(b"content-type: " + kind + b"\r\n\r\n" + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    def hang_up(self) -> None:
        for writer in self._open:
            writer.close()


def _message(body: dict[str, Any]) -> dict[str, Any]:
    calls = {"tool_calls": [{"index": 0, **CALL}]} if body.get("tools") else {}
    return {"role": "assistant", "content": HALVES, **calls}


def _whole(body: dict[str, Any]) -> bytes:
    choice = {"index": 0, "message": _message(body), "finish_reason": "stop"}
    return json.dumps({"id": "x", "model": "there", "choices": [choice]}).encode()


def _stream(body: dict[str, Any]) -> bytes:
    parts = [({"delta": _message(body)}, None), ({"delta": {}}, "stop")]
    events = [
        {"id": "x", "model": "there", "choices": [{"index": 0, **part, "finish_reason": end}]} for part, end in parts
    ]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[tuple[Mount, Upstream]]:
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    table = {"name": "p", "kind": "openai_compat", "base_url": f"http://127.0.0.1:{port}", "keyless": True}
    house = ProviderHouse(KeyVault(tmp_path / "keys"), lambda one: LeanHttpLink(one.name, one.base_url))
    house.configure(read_providers([table], {"m": "p/there"}))
    memory = TextMemory(MemorySettings(cache="exact"), tmp_path, ModelStore(tmp_path / "models", shipped_catalogue()))
    ports = GatewayPorts(house.targets, Policy, cache=memory.cache, conversations=memory.conversations)
    mount = remembering(build(GatewaySettings(), ports), memory)
    await mount.start()
    yield mount, upstream
    await mount.stop()
    await house.close()
    upstream.hang_up()
    server.close()
    await server.wait_closed()


async def ask(mount: Mount, text: str, **more: Any) -> tuple[int, str]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 16} | more
    route = next(route for route in mount.routes if route.path == "/v1/chat/completions")
    response = await route.handle(Request("POST", route.path, {}, body=json.dumps(body).encode()))
    data = response.body if isinstance(response.body, bytes) else b"".join([part async for part in response.body])
    return response.status, data.decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_halves_of_characters_poison_neither_cache_nor_conversation(
    door: tuple[Mount, Upstream], stream: bool
) -> None:
    mount, upstream = door
    for _ in range(2):
        status, _text = await ask(mount, "one", stream=stream)
        assert status == 200
    assert len(upstream.bodies) == 1, "the second one came out of the cache"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    status, _text = await ask(mount, "two", stream=stream, conversation_id="c", tools=tools)
    assert status == 200
    status, _text = await ask(mount, "three", stream=stream, conversation_id="c")
    assert status == 200
    history = upstream.bodies[-1]["messages"]
    assert [turn["role"] for turn in history] == ["user", "assistant", "user"]
    assert history[1]["content"].isprintable() and history[1]["content"].endswith(" end \U0001f600")
    assert history[1]["tool_calls"][0]["id"] == "c\ufffd"


@pytest.mark.parametrize("count", [-5, 10**30, 1.5, "7", True, [1]])
def test_counts_that_cannot_be_are_no_usage(count: object) -> None:
    openai = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}}
    assert codec_of("openai").whole(json.dumps(openai).encode()).usage is None
    anthropic = {"type": "message", "content": [], "usage": {"input_tokens": count, "output_tokens": 3}}
    assert codec_of("anthropic").whole(json.dumps(anthropic).encode()).usage is None
    gemini = {"candidates": [{"content": {"parts": []}}], "usageMetadata": {"promptTokenCount": count}}
    assert codec_of("gemini").whole(json.dumps(gemini).encode()).usage is None
    ollama = {"message": {"content": "x"}, "done": True, "done_reason": "stop", "eval_count": count}
    assert codec_of("ollama").whole(json.dumps(ollama).encode()).usage is None


def test_counts_told_as_whole_floats_count() -> None:
    openai = {"choices": [], "usage": {"prompt_tokens": 3.0, "completion_tokens": 2}}
    usage = codec_of("openai").whole(json.dumps(openai).encode()).usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600"), ("\udfff", "\ufffd"), ("é\0漢", "é\0漢")],
)
def test_sayable(text: str, said: str) -> None:
    assert sayable(text) == said
