"""Every vendor's recorded answer through the front doors: bytes that pass and answers made anew mean the same.

And the houses themselves: an agent with a provider in its configuration, whose model moves while it runs.
"""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from attrs import evolve

from agent.cli.main import main
from benchmarks.fake_upstream import serve_upstream
from engines.key_vault import KeyVault
from gateway.mount import GatewayPorts, build
from gateway.provider_house import ProviderHouse
from gateway.providers import read_providers
from gateway.settings import GatewaySettings
from links.http_lean import LeanHttpLink
from links.http_server import serve
from links.port import Request, Response, Route
from protocol.policy import Policy
from tests.unit.agent.houses import RunningHouse, config_for

STREAMS = Path(__file__).parent.parent / "unit" / "protocol" / "provider_streams"
RECORDED = sorted(STREAMS.glob("*"))
PROBED = ("llama_server", "ollama", "vllm")
"""Whether they take tools is asked of the server itself."""
FORMS = ("anthropic", "gemini", "openai")
PATHS = (
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/messages",
    "/api/chat",
    "/v1beta/models/{call}",
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


@asynccontextmanager
async def vendor(file: Path, tmp_path: Path) -> AsyncIterator[tuple[str, list[Request]]]:
    """A house whose model `m` is at a server that says what is recorded; its URL and what the server was asked."""
    asked: list[Request] = []

    async def parts() -> AsyncIterator[bytes]:
        yield file.read_bytes()

    async def answer(request: Request) -> Response:
        asked.append(request)
        kind = "application/x-ndjson" if file.suffix == ".ndjson" else "text/event-stream"
        return Response(200, {"content-type": kind}, parts())

    async with AsyncExitStack() as stack:
        upstream = await serve([Route("POST", path, answer) for path in PATHS])
        stack.push_async_callback(upstream.close)
        vault = KeyVault(tmp_path)
        vault.add("v", "secret-key")
        house = ProviderHouse(vault, lambda one: LeanHttpLink(one.name, one.base_url))
        stack.push_async_callback(house.close)
        table = {"name": "v", "kind": file.stem, "base_url": f"http://127.0.0.1:{upstream.port}"}
        house.configure(read_providers([table], {"m": "v/there"}))
        mount = build(GatewaySettings(drain_s=0.1), GatewayPorts(targets=house.targets, policy=Policy))
        stack.push_async_callback(mount.stop)
        front = await serve(mount.routes)
        stack.push_async_callback(front.close)
        yield f"http://127.0.0.1:{front.port}", asked


async def ask(url: str, path: str, document: Any) -> list[Any]:
    async with aiohttp.ClientSession() as client, client.post(url + path, json=document) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: ", "{"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def calls_of(deltas: Sequence[Any]) -> list[tuple[str, Any]]:
    found: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            name, arguments = found.setdefault(call["index"], ["", ""])
            function = call.get("function") or {}
            found[call["index"]] = [
                name or function.get("name") or "", arguments + (function.get("arguments") or "")
            ]  # fmt: skip
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


@pytest.mark.parametrize(
    "file",
    [file for file in RECORDED if file.stem not in ("llama_server", "vllm", "ollama")],
    ids=lambda file: file.stem,
)
async def test_openais_client_reads_every_vendor(file: Path, tmp_path: Path) -> None:
    async with vendor(file, tmp_path) as (url, asked):
        document = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "stream": True, "tools": TOOLS}
        events = await ask(url, "/v1/chat/completions", {**document, "stream_options": {"include_usage": True}})
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
        assert calls_of(deltas) == [("get_weather", {"city": "Paris"})]
        finishes = [choice.get("finish_reason") for event in events for choice in event["choices"]]
        assert [finish for finish in finishes if finish] == ["tool_calls"]
        usage = [event["usage"] for event in events if event.get("usage")] or [
            choice["usage"] for event in events for choice in event["choices"] if choice.get("usage")
        ]
        assert (usage[-1]["prompt_tokens"], usage[-1]["completion_tokens"]) == (25, 41)
        assert {event["model"] for event in events} == {"m"}
        assert "secret-key" in str(asked[0].headers) and json.loads(asked[0].body).get("model", "there") == "there"


@pytest.mark.parametrize(
    "file", [file for file in RECORDED if file.stem in ("anthropic", "openai", "gemini")], ids=lambda file: file.stem
)
async def test_anthropics_client_reads_it_too(file: Path, tmp_path: Path) -> None:
    tools = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}]
    document = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Weather?"}], "stream": True}
    async with vendor(file, tmp_path) as (url, _):
        events = await ask(url, "/v1/messages", {**document, "tools": tools})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Let me look."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Paris"}
    assert events[0]["message"]["model"] == "m" and events[-1]["type"] == "message_stop"
    thought = "".join(delta.get("thinking", "") for delta in deltas)
    assert thought == ("The user wants weather." if file.stem == "anthropic" else ""), "its own bytes pass"


async def test_ollamas_lines_pass_to_its_own_clients(tmp_path: Path) -> None:
    async with vendor(STREAMS / "ollama.ndjson", tmp_path) as (url, _):
        lines = await ask(url, "/api/chat", {"model": "m", "messages": [{"role": "user", "content": "Weather?"}]})
    assert "".join(line["message"]["content"] for line in lines) == "Let me look."
    assert lines[-1]["done"] is True and lines[-1]["eval_count"] == 41
    assert {line["model"] for line in lines} == {"m"}


async def test_an_agents_model_moves_to_another_provider_while_it_runs(tmp_path: Path) -> None:
    ports = []
    async with AsyncExitStack() as stack:
        ledgers = []
        for _ in range(2):
            port, ledger, stop = await serve_upstream()
            stack.callback(stop)
            ports.append(port)
            ledgers.append(ledger)
        tables = [
            {"name": f"p{number}", "kind": "openai", "base_url": f"http://127.0.0.1:{port}", "keyless": True}
            for number, port in enumerate(ports)
        ]
        config = evolve(config_for(tmp_path), providers=read_providers(tables, {"chat": "p0/one"}))
        async with RunningHouse(config) as agent:
            document = {"model": "chat", "messages": [{"role": "user", "content": "n=a"}]}
            async with aiohttp.ClientSession() as client:
                for wanted in (0, 1):
                    async with client.post(f"{agent.house.url}/v1/chat/completions", json=document) as response:
                        assert response.status == 200, await response.text()
                        assert response.headers["x-midstream-target"] == f"cloud:p{wanted}"
                    moved = evolve(config, providers=read_providers(tables, {"chat": "p1/two"}))
                    if not wanted:
                        assert agent.house.reconfigure(moved).applied == ("providers",)
        assert [ledger.requests for ledger in ledgers] == [1, 1]


def test_the_verb_seals_lists_and_forgets_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> str:
        assert main(["providers", *words, "--state-dir", str(tmp_path)]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr("sys.stdin", io.StringIO("sk-secret-1\n"))
    key_id = run("add-key", "openai", "--tenant", "acme").split()[-1]
    listed = run("keys")
    assert key_id in listed and "acme" in listed and "sk-secret" not in listed
    assert KeyVault(tmp_path / "providers").keys("openai", "acme") == ("sk-secret-1",)
    run("remove-key", "openai", key_id)
    assert json.loads(run("keys", "--json")) == []
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["providers", "add-key", "openai", "--state-dir", str(tmp_path)]) == 2
